from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import infra.engines.guardian
from tests.infra.engines.echo_engine import STUBBORN
from tests.processes import outlived
from tests.waiting import LONG_S

GUARDIAN = Path(infra.engines.guardian.__file__)
TREE = f"""
import json, os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {STUBBORN!r}], start_new_session=True)
orphan = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {STUBBORN!r}], " \\
    "start_new_session=True, stdout=subprocess.DEVNULL).pid)"
made = subprocess.run([sys.executable, "-c", orphan], stdout=subprocess.PIPE, check=True)
print(json.dumps([os.getpid(), child.pid, int(made.stdout)]), flush=True)
"""


class Guarded:
    """A command under the guardian, with our end of the lifeline."""

    def __init__(self, *command: str) -> None:
        self.lifeline, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(GUARDIAN), str(theirs.fileno()), "--", *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                pass_fds=[theirs.fileno()],
            )

    def line(self) -> str:
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], LONG_S)[0], "neither a line nor the end of file"
        return self.process.stdout.readline().decode()

    def end(self) -> None:
        self.lifeline.close()
        self.process.communicate(timeout=LONG_S)


@pytest.fixture
def guarded() -> Iterator[type[Guarded]]:
    started: list[Guarded] = []

    class Remembered(Guarded):
        def __init__(self, *command: str) -> None:
            super().__init__(*command)
            started.append(self)

    yield Remembered
    for one in started:
        one.end()


def python(source: str) -> list[str]:
    return [sys.executable, "-c", source]


@pytest.mark.parametrize(
    ("source", "code"),
    [("", 0), ("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 11)", 128 + signal.SIGSEGV)],
)
def test_it_ends_with_the_commands_status(guarded, source, code):
    assert guarded(*python(source)).process.wait(LONG_S) == code


def test_a_command_that_cannot_start_is_named(guarded):
    one = guarded("/no/such/program")
    assert one.process.wait(LONG_S) == 127
    assert b"cannot start '/no/such/program': No such file" in one.process.stderr.read()


def test_wrong_arguments_are_refused():
    called = subprocess.run(
        [sys.executable, "-I", "-S", str(GUARDIAN), "3", "sleep"], capture_output=True, timeout=LONG_S
    )
    assert called.returncode == 2
    assert b"usage" in called.stderr


def test_what_the_command_leaves_behind_ends_with_it(guarded):
    one = guarded(*python(TREE))
    pids = json.loads(one.line())
    assert one.process.wait(LONG_S) == 0
    assert outlived(pids, within_s=0) == []


@pytest.mark.parametrize("end", ["lifeline", "SIGTERM"])
def test_the_whole_tree_ends_at_the_end_of_the_lifeline_and_at_sigterm(guarded, end):
    one = guarded(*python(TREE + STUBBORN))
    pids = json.loads(one.line())
    if end == "lifeline":
        one.lifeline.close()
    else:
        one.process.terminate()
    assert one.process.wait(LONG_S) == 128 + signal.SIGKILL
    assert outlived(pids, within_s=0) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_the_keyboard_and_the_terminal_do_not_end_it(guarded, number):
    one = guarded("cat")
    one.process.stdin.write(b"before\n")
    assert one.line() == "before\n"
    one.process.send_signal(number)
    one.process.stdin.write(b"after\n")
    assert one.line() == "after\n"


def test_the_guardian_takes_the_command_along(guarded):
    one = guarded(*python("import os, time; print(os.getpid(), flush=True); time.sleep(3600)"))
    pid = int(one.line())
    one.process.kill()
    assert outlived([pid]) == []


def test_a_fork_of_the_parent_that_holds_the_lifeline_does_not_keep_the_tree_alive(tmp_path):
    owner = f"""
import os, socket, subprocess, sys, time
ours, theirs = socket.socketpair()
subprocess.Popen([sys.executable, "-I", "-S", {str(GUARDIAN)!r}, str(theirs.fileno()), "--",
    sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(3600)"],
    pass_fds=[theirs.fileno()])
theirs.close()
fork = os.fork()
if fork:
    print(fork, flush=True)
time.sleep(3600)
"""
    process = subprocess.Popen(python(owner), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    fork, command = int(process.stdout.readline()), int(process.stdout.readline())
    if os.getpgid(fork) != os.getpgid(0):  # the command's line came first
        fork, command = command, fork
    process.kill()
    process.wait(LONG_S)
    try:
        assert outlived([command]) == []
        assert outlived([fork], within_s=0) == [fork]
    finally:
        os.kill(fork, signal.SIGKILL)
        process.stdout.close()


def test_the_command_has_a_session_of_its_own_and_default_signals(guarded):
    one = guarded("sh", "-c", "echo $$; sleep 3600")
    pid = int(one.line())
    assert os.getsid(pid) == pid
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    ignored = int(status["SigIgn"], 16)
    assert not ignored & sum(1 << (number - 1) for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM))


def test_the_guardian_holds_neither_pipe(guarded):
    one = guarded(*python("import os, time; os.close(0); os.write(1, b'x\\n'); os.close(1); time.sleep(3600)"))
    assert one.line() == "x\n"
    assert one.line() == ""  # end of file, though command and guardian run
    with pytest.raises(BrokenPipeError):
        os.write(one.process.stdin.fileno(), b"job\n")
    assert one.process.poll() is None


def test_it_stays_small(guarded):
    one = guarded("cat")
    one.process.stdin.write(b"\n")
    one.line()
    resident = int(Path(f"/proc/{one.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    assert resident < 20 * 2**20


def test_a_chain_of_processes_that_fork_and_exit_is_caught(guarded):
    """Each link runs for 5 ms as an orphan in a new session, then replaces itself."""
    runner = "import os, time\nos.write(1, b'x\\n')\nwhile True:\n    os.setsid() if os.fork() == 0 else os._exit(0)\n"
    one = guarded(
        *python(
            f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {runner!r} + "
            "'    time.sleep(0.005)']); time.sleep(3600)"
        )
    )
    assert one.line() == "x\n"
    one.lifeline.close()
    one.process.wait(LONG_S)
    assert one.line() == ""  # nobody holds the pipe any more
