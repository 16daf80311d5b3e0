"""What a response that is tried cannot do to other processes, and what bounds it and not the tests."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ppo_core.scoring import unit_tests
from tests.ppo_core.scoring.test_unit_tests_reward import EVERYTHING, score
from tests.waiting import LONG_S


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    """A process of the same user."""
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


PIPE = "read, write = os.pipe()"
PAIR = "pair = socket.socketpair()\nread, write = (end.fileno() for end in pair)"


@pytest.mark.parametrize(
    ("ends", "owner"),
    [
        (PIPE, "fcntl.fcntl(read, 8, PID)  # F_SETOWN"),
        (PIPE, "fcntl.fcntl(read, 15, struct.pack('ii', 1, PID))  # F_SETOWN_EX"),
        (PAIR, "fcntl.ioctl(read, 0x8901, struct.pack('i', PID))  # FIOSETOWN"),
        (PAIR, "fcntl.ioctl(read, 0x8902, struct.pack('i', PID))  # SIOCSPGRP"),
    ],
)
def test_no_file_sends_a_signal_to_another_process(ends: str, owner: str, other: subprocess.Popen[bytes]) -> None:
    attempt = (
        f"import fcntl, os, socket, struct\n{ends}\nfcntl.fcntl(read, 10, 9)  # F_SETSIG to SIGKILL\n"
        f"{owner.replace('PID', str(other.pid))}\n"
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
    assert score("def add(a, b):\n    return a + b\n", tests, memory_mib=2048, timeout_s=LONG_S) == pytest.approx(2 / 3)


def test_a_process_that_is_slow_to_take_its_job_gets_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unit_tests, "LOOK_EVERY_S", 0.001)  # far less than a process takes to start
    long = f"given = {'x' * 2**20!r}\nassert add(1, 2) == 3"
    assert score("def add(a, b):\n    return a + b\n", [long], timeout_s=LONG_S) == 1.0


def test_a_pair_of_sockets_reaches_nobody_else_and_code_does_not_outlive_the_engine() -> None:
    assert score("import socket\nsocket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)", EVERYTHING) == 0.0
    outlives = "import ctypes\ndied = ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)"
    assert score(outlives, ["assert died == -1"]) == 1.0
    loop = "import asyncio\nasync def seven():\n    return 7\nfound = asyncio.run(seven())"
    assert score(loop, ["assert found == 7"]) == 1.0


def test_folders_in_folders_leave_nothing_and_fail_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    nested = "import os\nfor _ in range(3000):\n    os.mkdir('d')\n    os.chdir('d')"
    assert score(nested, ["assert os.getcwd()"], timeout_s=LONG_S) == 1.0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "fill",
    [
        "for n in range(10**6): open(str(n), 'wb').write(bytes(2**20))",
        "for n in range(10**9): open(str(n), 'wb').close()",
    ],
)
def test_code_that_fills_its_folder_is_ended(fill: str) -> None:
    began = time.monotonic()
    assert score(f"done = 1\n{fill}", ["assert done.real"], timeout_s=LONG_S) == 0.0
    assert time.monotonic() - began < LONG_S / 2


def test_where_the_disk_is_full_there_is_no_score(monkeypatch: pytest.MonkeyPatch) -> None:
    full = shutil.disk_usage(tempfile.gettempdir())._replace(free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    assert score("x = 1", ["assert x.real == 1"]) == 1.0
    assert score("x = 1", ["assert x.real == 2"]) is None
