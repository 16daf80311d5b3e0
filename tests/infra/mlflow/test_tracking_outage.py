"""The tracker and the registry against a real MLflow server that hangs, dies and comes back."""

from __future__ import annotations

import math
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.mlflow.client import open_client
from infra.mlflow.registry import register, resolve
from infra.mlflow.tracking import Point, RunTracker
from tests.infra.mlflow.mlflow_points import NOW, points_of, rows
from tests.infra.mlflow.mlflow_server import Server, with_long_timeouts
from tests.waiting import LONG_S, until

TIMEOUT_S = 15.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server"))
    server.start()
    with pytest.MonkeyPatch.context() as patch:
        with_long_timeouts(patch)
        yield server
    server.signal(signal.SIGKILL)


@pytest.mark.thorough
def test_an_outage_delays_points_and_loses_none(server: Server, tmp_path: Path) -> None:
    patient = RunTracker(server.uri, "outage", "run-1", tmp_path, timeout_s=LONG_S, back_off_s=1)
    tracker = RunTracker(server.uri, "outage", "run-1", tmp_path, timeout_s=TIMEOUT_S, back_off_s=1)
    records = [points_of(step) for step in range(6)]
    assert patient.open(), patient.last_error
    assert tracker.open(), tracker.last_error
    assert patient.log_points([*records[0], Point("wild", math.inf, 0, NOW)])
    assert patient.log_parameters({"empty": "", "key": "value"})
    assert patient.log_table("samples", ["prompt"], [["1+1="]])

    server.signal(signal.SIGSTOP)  # hangs: takes connections and never answers
    started = time.monotonic()
    for step in (1, 2):
        assert not tracker.log_points(records[step])
    assert time.monotonic() - started < 2 * TIMEOUT_S  # once, not for each
    assert not tracker.available()

    server.signal(signal.SIGKILL)  # refuses
    until(tracker.available, "the hanging call ends")
    started = time.monotonic()
    assert not tracker.log_points(records[3])
    assert time.monotonic() - started < TIMEOUT_S
    assert tracker.seen_points("train/m0") is None
    assert not tracker.open()

    server.start()
    assert tracker.open(), tracker.last_error
    assert patient.open(), patient.last_error
    until(lambda: tracker.log_points(records[1]), "the one that met the outage logs again")
    seen = patient.seen_points("train/m0")
    assert seen is not None
    assert 0 in {step for step, _ in seen}
    for record in records:
        assert patient.log_points(record), patient.last_error
    assert patient.finish()
    stored = rows(server.folder, tracker.run_id)
    expected = [(p.key, p.step, p.value, p.timestamp_ms) for record in records for p in record]
    assert stored == sorted([*expected, ("wild", 0, sys.float_info.max, NOW)])
    assert tracker.link().endswith(f"/runs/{tracker.run_id}")


def test_a_server_that_refuses_the_local_folder_gets_a_copy(server: Server, tmp_path: Path) -> None:
    tracker = RunTracker(server.uri, "registry", "run-2", tmp_path, timeout_s=LONG_S)
    assert tracker.open(), tracker.last_error
    folder = tmp_path / "a policy"
    folder.mkdir()
    (folder / "MLmodel").write_text("flavors: {}\n")
    tags = {"ppoflow.digest": "d" * 64}
    first = register(server.uri, name="m", source=folder.as_uri(), tags=tags, aliases=["best"], run_id=tracker.run_id)
    again = register(server.uri, name="m", source=folder.as_uri(), tags=tags, aliases=["best"], run_id=tracker.run_id)
    assert first == again
    assert first.source.startswith("mlflow-artifacts:")
    assert resolve(server.uri, "models:/m@best") == first.source
    assert (Path(open_client(server.uri).download_artifacts(str(tracker.run_id), "models", str(tmp_path)))).is_dir()
