"""What a person is told at the end of a run, as it can be pasted."""

from __future__ import annotations

import shlex
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from infra import ports
from infra.mlflow.registry import Registered
from tasks.reports.summary import MLFLOW_PORT, at_port, places, run_summary
from tests.ports import free_port


@pytest.fixture
def taken() -> Iterator[int]:
    """A port at which somebody listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", free_port()))
        listener.listen()
        yield listener.getsockname()[1]


def test_a_port_that_is_taken_is_left_out(taken: int) -> None:
    assert not ports.is_free(taken)
    assert ports.free_port(taken) > taken
    free = free_port()
    assert ports.free_port(free) == free
    assert at_port(free) == []
    assert at_port(taken) == ["--port", str(ports.free_port(taken))]


def test_the_command_for_mlflows_page_starts_it_where_another_one_has_its_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PPOFLOW_HOME", str(tmp_path))
    monkeypatch.delenv("PPOFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", MLFLOW_PORT))
            listener.listen()
        except OSError:
            pass  # somebody else of this machine has it: just as well
        (line,) = [line for line in places("demo", tmp_path) if "MLflow's page" in line]
    words = shlex.split(line.partition("page")[2])
    assert words[-2] == "--port"
    assert int(words[-1]) > MLFLOW_PORT
    assert ports.is_free(int(words[-1]))


@dataclass(frozen=True)
class Finished:
    """A run's report."""

    run: str
    iterations: int
    best: str
    policy: Registered | None
    policy_folder: Path


def test_the_last_lines_say_which_model_to_take_and_how_good_it_is(tmp_path: Path) -> None:
    best = "best by evaluation/score: 1.068 at iteration 30 (held-out accuracy 0.969)"
    registered = Registered(name="arithmetic", version="1", source="file:///store")
    lines = run_summary(Finished("demo", 30, best, registered, tmp_path), "ppoflow resume demo").splitlines()
    assert lines[0] == "run demo: 30 iterations done"
    assert len(lines) <= 10
    assert lines[-2:] == ["  registered model   models:/arithmetic/1", f"  {best}"]
    in_sight = [line[:60] for line in lines]
    assert any("models:/arithmetic/1" in line for line in in_sight)
    assert any("1.068 at iteration 30" in line for line in in_sight)
    assert any(line.endswith('ppoflow sample demo "PROMPT"') for line in in_sight)
    without = run_summary(Finished("demo", 30, best, None, tmp_path), "ppoflow resume demo").splitlines()
    assert without == [line for line in lines if "registered" not in line]
