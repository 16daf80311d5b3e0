"""What a holder does with its lease: it beats, and pins the artifacts that it uses."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

from infra.runs.lease import Heartbeat
from infra.runs.local_lease import acquire_lease
from infra.storage.filesystem import LocalFiles
from tests.infra.runs.leases import successor
from tests.infra.storage.faulty_files import FaultyFiles
from tests.waiting import LONG_S, until


def test_the_heartbeat_beats_and_says_when_the_lease_is_lost(tmp_path: Path):
    lease, lost = acquire_lease(tmp_path, "r"), threading.Event()
    calls: list[str] = []

    def on_lost() -> None:
        calls.append(threading.current_thread().name)
        lost.set()

    def beats() -> int:
        return int(json.loads((lease.folder / "heartbeat").read_text())["beat"])

    with Heartbeat(lease, on_lost, every_s=0.005):
        until(lambda: beats() >= 5, "five beats")
        assert calls == []
        successor(tmp_path)
        assert lost.wait(timeout=LONG_S)
    assert lease.lost
    assert calls == ["heartbeat-r"]


class FullAtFirst(LocalFiles):
    """A disk that is full for the first beats."""

    def __init__(self) -> None:
        self.failures = 0

    def rename(self, source: Path, target: Path) -> None:
        if target.name == "heartbeat" and self.failures < 3:
            self.failures += 1
            raise OSError(28, os.strerror(28), str(target))
        super().rename(source, target)


def test_a_beat_that_fails_is_tried_again(tmp_path: Path):
    files, calls = FullAtFirst(), list[int]()
    lease = acquire_lease(tmp_path, "r", files=files)
    first = (lease.folder / "heartbeat").read_bytes()
    with Heartbeat(lease, lambda: calls.append(1), every_s=0.005):
        until(lambda: (lease.folder / "heartbeat").read_bytes() != first, "a beat")
    assert (files.failures, calls, lease.lost) == (3, [], False)
    assert (lease.folder / "heartbeat").read_bytes() != first
    assert os.listdir(lease.partial) == []


def test_pins_last_until_they_are_let_go(tmp_path: Path):
    files = FaultyFiles()
    lease = acquire_lease(tmp_path, "r", files=files)
    lease.pin("scores", "a-b_1")
    lease.pin("scores", "a-b_1")
    lease.pin("rollouts", "c")
    pins = lease.folder / "pins"
    assert sorted(os.listdir(pins)) == ["rollouts.c", "scores.a-b_1"]
    locks = [operation.path for operation in files.trace if operation.name == "exclusive"]
    assert locks == [tmp_path / ".gc.lock"] * 3
    lease.unpin_all()
    lease.unpin_all()
    assert os.listdir(pins) == []
