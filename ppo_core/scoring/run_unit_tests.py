"""The program of a process that runs unit tests on code which a model wrote: with the standard library alone, in little
room, and without processes, sockets and signals.

    stdin     {"secret", "code", "tests", "seconds", "memory_mib"}
    stdout    a line `SECRET ready` once the process is locked up, and `SECRET NUMBER` for each test that passed

The secret keeps code from printing that it passed by chance; code that means to cheat runs in the same interpreter, and
can find it. The kernel refuses (seccomp, with EPERM) what would reach beyond the process; files it can read and write
as the user who runs it.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import platform
import resource
import runpy
import struct
import sys
from pathlib import Path
from typing import Any

MIB = 2**20
LARGEST_FILE = MIB
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38
SIGKILL, SECCOMP_MODE_FILTER = 9, 2
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | 1
LOAD, IF_EQUAL, IF_AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
NUMBER_AT, MACHINE_AT, OTHER_NUMBERS = 0, 4, 0x40000000
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""By the machine's name: its place in the pairs below, and its number in linux/audit.h."""
REFUSED: dict[str, tuple[int, int | None]] = {
    **{"clone": (56, 220), "fork": (57, None), "vfork": (58, None), "clone3": (435, 435)},
    **{"socket": (41, 198), "io_uring_setup": (425, 425), "pidfd_getfd": (438, 438)},
    **{"kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "pidfd_send_signal": (424, 424)},
    **{"rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240)},
    **{"ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271)},
    **{"unshare": (272, 97), "setns": (308, 268), "setrlimit": (160, 164), "prlimit64": (302, 261)},
}
"""System calls that the kernel refuses, with their numbers on either machine; None: it does not have it."""


def main() -> None:
    """Run the job on standard input."""
    job = json.load(sys.stdin)
    results, nowhere = os.dup(1), os.open(os.devnull, os.O_RDWR)
    limit(job["seconds"], job["memory_mib"])
    lock_up()
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    os.write(results, f"{job['secret']} ready\n".encode())
    namespace = run("solution.py", job["code"], {})
    for number, test in enumerate(job["tests"] if namespace is not None else ()):
        if run("test.py", test, namespace or {}) is not None:
            os.write(results, f"{job['secret']} {number}\n".encode())
    os._exit(0)  # whatever the code has left to do at the end


def run(name: str, text: str, namespace: dict[str, Any]) -> dict[str, Any] | None:
    """The names that a text leaves which starts with those of `namespace`; None where it raises anything."""
    try:
        Path(name).write_text(text, encoding="utf-8", errors="replace")
        return runpy.run_path(name, init_globals=dict(namespace))
    except BaseException:  # also SystemExit
        return None


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
    """Have the kernel refuse system calls from here on, and end this process with the one that started it.

    Raises OSError where it does not.
    """
    column, machine = MACHINES[platform.machine()]
    steps = [(LOAD, 0, 0, MACHINE_AT), (IF_EQUAL, 1, 0, machine), (RETURN, 0, 0, REFUSE), (LOAD, 0, 0, NUMBER_AT)]
    steps += [(IF_AT_LEAST, 0, 1, OTHER_NUMBERS), (RETURN, 0, 0, REFUSE)]
    for number in (numbers[column] for numbers in REFUSED.values()):
        steps += [(IF_EQUAL, 0, 1, number), (RETURN, 0, 0, REFUSE)] if number is not None else []
    steps.append((RETURN, 0, 0, ALLOW))
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    pointer = ctypes.create_string_buffer(struct.pack("HP", len(steps), ctypes.addressof(program)))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    for call in (
        (PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0),
        (PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.c_void_p(ctypes.addressof(pointer)), 0, 0),
    ):
        if prctl(*call):
            raise OSError(ctypes.get_errno(), f"prctl({call[0]}) is refused here")


if __name__ == "__main__":
    main()
