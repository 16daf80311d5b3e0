"""A stack in a container bears the mark of the host's one, where both have the same passwords; the host sees it too."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from infra.deploy.stack.orphan_processes import without_leader
from infra.deploy.stack.orphans import MARK, end_marked
from tests.processes import runs
from tests.waiting import FOR_EVER_S, until

STACK = "e" * 48
MARKED = {**os.environ, MARK: f"{STACK}.s3"}
SLEEPER = [sys.executable, "-c", f"import time; time.sleep({FOR_EVER_S})"]
LEFT = "import subprocess, sys; print(subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL).pid)"


@contextmanager
def in_a_container(pid: int) -> Iterator[None]:
    """As if the kernel said so of this process."""
    answer = os.readlink

    def answered(path: str) -> str:
        return "pid:[1]" if path == f"/proc/{pid}/ns/pid" else answer(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "readlink", answered)
        yield


def test_what_a_container_runs_is_not_ended_from_outside() -> None:
    inside, outside = (subprocess.Popen(SLEEPER, env=MARKED) for _ in range(2))
    try:
        with in_a_container(inside.pid):
            end_marked(f"{STACK}.", timeout_s=5, children=True)
        assert (runs(inside.pid), runs(outside.pid)) == (True, False)
    finally:
        for process in (inside, outside):
            process.kill()
            process.wait()


def test_nor_is_what_a_server_in_a_container_has_left() -> None:
    left = [sys.executable, "-c", LEFT, *SLEEPER]
    done = subprocess.run(left, env=MARKED, stdout=subprocess.PIPE, text=True, check=True, start_new_session=True)
    child = int(done.stdout)
    try:
        group = os.getpgid(child)
        assert without_leader(f"{MARK}={STACK}.", "s3") == {group}
        with in_a_container(child):
            assert without_leader(f"{MARK}={STACK}.", "s3") == set()
    finally:
        end_marked(f"{STACK}.", timeout_s=5, children=False)
    until(lambda: not runs(child))
