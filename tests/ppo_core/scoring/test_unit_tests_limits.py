"""What a response that is tried cannot do to other processes, and what bounds it and not the tests."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.ppo_core.scoring.test_unit_tests_reward import EVERYTHING, score


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    """A process of the same user."""
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


@pytest.mark.parametrize("owner", ["8, PID", "15, struct.pack('ii', 1, PID)"])
def test_no_file_sends_a_signal_to_another_process(owner: str, other: subprocess.Popen[bytes]) -> None:
    attempt = (
        "import fcntl, os, struct\nread, write = os.pipe()\nfcntl.fcntl(read, 10, 9)  # F_SETSIG to SIGKILL\n"
        f"fcntl.fcntl(read, {owner.replace('PID', str(other.pid))})  # F_SETOWN, F_SETOWN_EX\n"
        "fcntl.fcntl(read, fcntl.F_SETFL, os.O_ASYNC)\nos.write(write, b'x')\n"
    )
    assert score(attempt, EVERYTHING) == 0.0
    with pytest.raises(subprocess.TimeoutExpired):
        other.wait(0.2)
    harmless = "import fcntl, os\nfcntl.fcntl(os.pipe()[0], fcntl.F_SETFL, os.O_NONBLOCK)"
    assert score(harmless, EVERYTHING) == 1.0


def test_a_test_may_be_longer_than_a_file_that_code_may_write() -> None:
    numbers = ", ".join(map(str, range(300_000)))
    long = f"given = [{numbers}]\nassert add(given, [1]) == [*given, 1]"
    assert len(long) > 2**20
    tests = ["assert add(1, 2) == 3", long, f"{long}0"]
    assert score("def add(a, b):\n    return a + b\n", tests, memory_mib=2048, timeout_s=60) == pytest.approx(2 / 3)
