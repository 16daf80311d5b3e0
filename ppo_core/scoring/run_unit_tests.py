"""The program of a process that runs unit tests on code which a model wrote: with the standard library alone, in little
room, and without processes, sockets and signals.

    stdin     {"secret", "code", "tests", "seconds", "memory_mib"}
    stdout    a line `SECRET ready` once the process is locked up, and `SECRET NUMBER` for each test that passed

The secret keeps code from printing that it passed by chance; code that means to cheat runs in the same interpreter, and
can find it. The kernel refuses (seccomp, with EPERM) what would reach beyond the process, and (Landlock, with EACCES)
to write, make or remove files outside its folder and to look into other processes. As the user who runs it, it can read
files, and change their modes, owners and times.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import platform
import resource
import struct
import sys
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

MIB = 2**20
LARGEST_FILE = MIB
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38
SIGKILL, SECCOMP_MODE_FILTER = 9, 2
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | 1
LOAD, AND, IF_EQUAL, IF_AT_LEAST, RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
NUMBER_AT, MACHINE_AT, OTHER_NUMBERS = 0, 4, 0x40000000
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""By the machine's name: its place in the pairs below, and its number in linux/audit.h."""
REFUSED: dict[str, tuple[int, int | None]] = {
    **{"clone": (56, 220), "fork": (57, None), "vfork": (58, None), "clone3": (435, 435)},
    **{"socket": (41, 198), "io_uring_setup": (425, 425)},
    # signals
    **{"kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "pidfd_send_signal": (424, 424)},
    **{"rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240)},
    # other processes: what they hold, where and when they run
    **{"ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272)},
    **{"pidfd_open": (434, 434), "pidfd_getfd": (438, 438), "process_madvise": (440, 440)},
    **{"process_mrelease": (448, 448), "move_pages": (279, 239), "migrate_pages": (256, 238)},
    **{"unshare": (272, 97), "setns": (308, 268), "setrlimit": (160, 164), "prlimit64": (302, 261)},
    **{"setpriority": (141, 140), "ioprio_set": (251, 30), "sched_setaffinity": (203, 122)},
    **{"sched_setscheduler": (144, 119), "sched_setparam": (142, 118), "sched_setattr": (314, 274)},
    # memory, queues, semaphores and keys that processes share, and that outlive them
    **{"shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "mq_open": (240, 180), "mq_unlink": (241, 181)},
    **{"msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188), "msgctl": (71, 187)},
    **{"semget": (64, 190), "semop": (65, 193), "semctl": (66, 191), "semtimedop": (220, 192)},
    **{"add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219)},
    # the machine, which is root's
    **{"mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "mount_setattr": (442, 442)},
    **{"open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsmount": (432, 432)},
    **{"fspick": (433, 433), "open_by_handle_at": (304, 265), "fanotify_init": (300, 262), "quotactl": (179, 60)},
    **{"swapon": (167, 224), "swapoff": (168, 225), "acct": (163, 89), "syslog": (103, 116), "vhangup": (153, 58)},
    **{"reboot": (169, 142), "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106)},
    **{"kexec_load": (246, 104), "kexec_file_load": (320, 294), "iopl": (172, None), "ioperm": (173, None)},
    **{"bpf": (321, 280), "perf_event_open": (298, 241), "sethostname": (170, 161), "setdomainname": (171, 162)},
    **{"settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171), "clock_adjtime": (305, 266)},
}
"""System calls that the kernel refuses, with their numbers on either machine; None: it does not have it."""
FIRST_ARGUMENT_AT, SECOND_ARGUMENT_AT, EVERY_BIT = 16, 24, 0xFFFFFFFF


class Guard:
    """A system call of which one argument says whether the kernel refuses it: with one of `values`, or where these are
    `allowed`, with any other. `at` is the argument's offset in what seccomp looks at, and `bits` are those of it that
    count."""

    def __init__(
        self,
        numbers: tuple[int, int],
        at: int,
        values: tuple[int, ...],
        *,
        bits: int = EVERY_BIT,
        allowed: bool = False,
    ) -> None:
        self.numbers, self.at, self.values, self.bits, self.allowed = numbers, at, values, bits, allowed


GUARDED = (
    # A file's owner gets a signal of one's choice: fcntl F_SETOWN and F_SETOWN_EX, ioctl FIOSETOWN and SIOCSPGRP.
    Guard((72, 25), SECOND_ARGUMENT_AT, (8, 15)),
    Guard((16, 29), SECOND_ARGUMENT_AT, (0x8901, 0x8902)),
    Guard((157, 167), FIRST_ARGUMENT_AT, (PR_SET_PDEATHSIG,)),  # prctl: by it this process ends with its parent
    Guard((53, 199), SECOND_ARGUMENT_AT, (1,), bits=0xF, allowed=True),  # socketpair: SOCK_STREAM alone has no address
)
CAPABILITIES_VERSION_3, DAC_READ_SEARCH = 0x20080522, 1 << 2
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
WRITE_FILE, MAKE_CHAR, MAKE_BLOCK, TRUNCATE = 1 << 1, 1 << 6, 1 << 11, 1 << 14
CHANGES = (
    WRITE_FILE | sum(1 << bit for bit in range(4, 13)),  # also: remove, make
    *(1 << 13, TRUNCATE, 0, 1 << 15),  # link or rename between folders, -, talk to devices
)
"""What a version of Landlock can refuse besides what those before it can (linux/landlock.h), without reading."""


def main() -> None:
    """Run the job on standard input."""
    job = json.load(sys.stdin)
    results, nowhere, folder = os.dup(1), os.open(os.devnull, os.O_RDWR), Path.cwd()
    limit(job["seconds"], job["memory_mib"])
    lock_up()
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    os.write(results, f"{job['secret']} ready\n".encode())
    sys.modules["solution"] = solution = ModuleType("solution")  # where pickle and imports look for it
    tests = job["tests"] if run(folder / "solution.py", job["code"], solution) else ()
    of_code = dict(solution.__dict__)
    for number, test in enumerate(tests):
        if run(folder / "test.py", test, solution):
            os.write(results, f"{job['secret']} {number}\n".encode())
        solution.__dict__.clear()
        solution.__dict__.update(of_code)
    os._exit(0)  # whatever the code has left to do at the end


class AsGiven(SourceFileLoader):
    """Compiles the source that it is given: what lies at its path, or bytecode beside that, may be the code's own."""

    def __init__(self, fullname: str, path: str, source: bytes) -> None:
        super().__init__(fullname, path)
        self.source = source

    def get_code(self, fullname: str) -> CodeType:
        """Raises SyntaxError or ValueError."""
        return self.source_to_code(self.source, self.path)


def run(file: Path, text: str, module: ModuleType) -> bool:
    """Run a text on the global names of a module; False where it raises anything."""
    try:
        source = text.encode(errors="replace")
        if len(source) <= LARGEST_FILE:  # where Python looks for the lines of a traceback; a test may be longer
            file.write_bytes(source)
        AsGiven(module.__name__, str(file), source).exec_module(module)
    except BaseException:  # also SystemExit
        return False
    return True


def limit(seconds: float, memory_mib: int) -> None:
    """Bound processor time, memory, the size of files and their number."""
    cpu = math.ceil(seconds)
    for what, most in (
        (resource.RLIMIT_CPU, cpu),
        (resource.RLIMIT_AS, memory_mib * MIB),
        (resource.RLIMIT_FSIZE, LARGEST_FILE),
        (resource.RLIMIT_NOFILE, 32),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (most, most))


def lock_up() -> None:
    """Have the kernel refuse system calls and changes of files from here on, and end this process with its parent.

    Raises OSError where it does not.
    """
    column, machine = MACHINES[platform.machine()]
    steps = [(LOAD, 0, 0, MACHINE_AT), (IF_EQUAL, 1, 0, machine), (RETURN, 0, 0, REFUSE), (LOAD, 0, 0, NUMBER_AT)]
    steps += [(IF_AT_LEAST, 0, 1, OTHER_NUMBERS), (RETURN, 0, 0, REFUSE)]
    for number in (numbers[column] for numbers in REFUSED.values()):
        steps += [(IF_EQUAL, 0, 1, number), (RETURN, 0, 0, REFUSE)] if number is not None else []
    for guard in GUARDED:
        block = [(LOAD, 0, 0, guard.at), (AND, 0, 0, guard.bits)]
        for value in guard.values:
            block += [(IF_EQUAL, 0, 1, value), (RETURN, 0, 0, ALLOW if guard.allowed else REFUSE)]
        block.append((RETURN, 0, 0, REFUSE if guard.allowed else ALLOW))
        steps += [(IF_EQUAL, 0, len(block), guard.numbers[column]), *block]
    steps.append((RETURN, 0, 0, ALLOW))
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    pointer = ctypes.create_string_buffer(struct.pack("HP", len(steps), ctypes.addressof(program)))
    library = ctypes.CDLL(None, use_errno=True)
    drop_capabilities(library)
    call(library.prctl, PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
    call(library.prctl, PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    enclose(library)
    call(library.prctl, PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.c_void_p(ctypes.addressof(pointer)), 0, 0)


def drop_capabilities(library: ctypes.CDLL) -> None:
    """Of what root may do besides what its files allow, keep reading, by which Python finds its library.

    Processes with more are then closed to this one, also where the user is the same. Raises OSError.
    """
    of_this = ctypes.create_string_buffer(struct.pack("Ii", CAPABILITIES_VERSION_3, 0))
    held = ctypes.create_string_buffer(24)
    call(library.capget, of_this, held)
    _, permitted, *_ = struct.unpack("6I", held.raw[:24])
    kept = permitted & DAC_READ_SEARCH
    call(library.capset, of_this, ctypes.create_string_buffer(struct.pack("6I", kept, kept, 0, 0, 0, 0)))


def enclose(library: ctypes.CDLL) -> None:
    """Let this process change nothing but what is in its folder, nor look into processes that are not so enclosed.

    Where the kernel has no Landlock, this does nothing. Raises OSError.
    """
    version: int = library.syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)
    if version < 1:
        return
    changes = sum(CHANGES[:version])
    handled = ctypes.create_string_buffer(struct.pack("Q", changes), 8)
    rules = call(library.syscall, LANDLOCK_CREATE, handled, ctypes.c_size_t(8), 0)
    null = changes & (WRITE_FILE | TRUNCATE)
    for path, allowed in ((".", changes & ~MAKE_CHAR & ~MAKE_BLOCK), (os.devnull, null)):
        place = os.open(path, os.O_PATH)
        rule = ctypes.create_string_buffer(struct.pack("=Qi", allowed, place))
        call(library.syscall, LANDLOCK_ADD, rules, 1, rule, 0)
        os.close(place)
    call(library.syscall, LANDLOCK_RESTRICT, rules, 0)
    os.close(rules)


def call(function: Callable[..., int], *arguments: object) -> int:
    """What a function of the C library returns; raises OSError where that is -1."""
    found = function(*arguments)
    if found == -1:
        raise OSError(ctypes.get_errno(), f"{arguments[:2]} is refused here")
    return found


if __name__ == "__main__":
    main()
