"""A lock that another process holds for long: whoever waits is told whom for, and gets it in the end."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

from infra.storage.filesystem import LocalFiles
from infra.storage.locks import lock
from infra.storage.telling import messages_to

HOLD = (
    "import fcntl, sys; file = open(sys.argv[1]); fcntl.flock(file, fcntl.LOCK_EX); print(flush=True); sys.stdin.read()"
)


def test_a_lock_that_is_held_for_long_is_waited_for_and_its_holder_named(tmp_path: Path) -> None:
    path, said, told = tmp_path / "lock", list[str](), threading.Event()
    path.touch()
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        other.stdout.readline()

        def tell(text: str) -> None:
            said.append(text)
            other.stdin.close()  # the holder lets go once somebody has been told
            told.set()

        descriptor = os.open(path, os.O_RDWR)
        with messages_to(tell):
            lock(descriptor, path, told_after_s=0.2)
        os.close(descriptor)
    assert told.is_set()
    assert said == [f"waiting for {path}, which process {other.pid} holds: if that is stopped, let it go on or end it"]


def test_a_free_lock_is_had_without_a_word_and_is_no_business_of_other_users(tmp_path: Path) -> None:
    said = list[str]()
    with messages_to(said.append), LocalFiles().exclusive(tmp_path / "lock"):
        assert stat.S_IMODE((tmp_path / "lock").stat().st_mode) & 0o007 == 0
    assert said == []
