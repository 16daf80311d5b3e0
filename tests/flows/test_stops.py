"""SIGTERM ends a run as Ctrl-C does, whatever Prefect makes of the signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import pytest
import typer
from prefect import flow, task
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowFilter
from prefect.exceptions import TerminationSignal
from typer.testing import CliRunner

from flows.cli import app
from flows.cli.friendly_errors import friendly_errors, heeding_interrupts, stopping_on_sigterm
from tasks.prefect.server import EmbeddedFlow
from tests.tasks.run_contexts import ARITHMETIC
from tests.tasks.toy_engines import ToyEngines
from tests.tasks.toy_reward_models import toy_engines
from tests.tasks.toy_runs import replace
from tests.waiting import LONG_S


@pytest.mark.thorough
@pytest.mark.usefixtures("prefect_server")
def test_a_signal_while_prefect_makes_a_task_run_is_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = task(lambda: 1)

    def arrives(**_: Any) -> NoReturn:
        raise TerminationSignal(signal=15)

    monkeypatch.setattr("prefect.task_engine._create_task_run_locally", arrives)
    with pytest.raises(ValueError, match="Task run is not set"):  # what Prefect makes of it
        flow(lambda: stage())()
    with pytest.raises(KeyboardInterrupt), stopping_on_sigterm():
        flow(lambda: stage())()


@pytest.mark.usefixtures("prefect_server")
def test_of_such_a_run_prefect_knows_that_it_crashed_and_did_not_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = task(lambda: 1)

    def arrives(**_: Any) -> NoReturn:
        raise TerminationSignal(signal=15)

    def body() -> None:
        stage()

    monkeypatch.setattr("prefect.task_engine._create_task_run_locally", arrives)
    with pytest.raises(KeyboardInterrupt), stopping_on_sigterm():
        EmbeddedFlow(fn=body, name="stopped-by-a-signal")()
    with get_client(sync_client=True) as client:
        runs = client.read_flow_runs(flow_filter=FlowFilter(name={"any_": ["stopped-by-a-signal"]}))
    assert [run.state_name for run in runs] == ["Crashed"]


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(ValueError, match="x"), stopping_on_sigterm():
        raise ValueError("x")


def test_an_interruption_while_a_library_makes_a_class_is_an_interruption(capsys: pytest.CaptureFixture[str]) -> None:
    class Interrupted:
        def __set_name__(self, owner: type, name: str) -> None:
            raise KeyboardInterrupt

    with pytest.raises(typer.Exit) as stopped, friendly_errors():
        type("OfALibrary", (), {"member": Interrupted()})
    assert (stopped.value.exit_code, capsys.readouterr().out) == (130, "interrupted\n")


def test_how_a_command_ends_an_interruption_itself_stays_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> NoReturn:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise typer.Exit(3) from None

    with pytest.raises(typer.Exit) as stopped, friendly_errors():
        command()
    assert (stopped.value.exit_code, capsys.readouterr().out) == (3, "")


@pytest.fixture
def toys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ToyEngines:
    """Engines of runs in a home of their own."""
    monkeypatch.setenv("PPOFLOW_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("PPOFLOW_STORE", raising=False)
    return toy_engines(monkeypatch)


def damage_record(home: Path, iteration: int) -> None:
    """So that it cannot be read."""
    replace(home / f"store/runs/stopped/iterations/{iteration:06d}.json", b"{")


@pytest.mark.usefixtures("prefect_server")
def test_a_damaged_record_does_not_hide_that_a_run_was_interrupted(toys: ToyEngines, tmp_path: Path) -> None:
    def interrupted() -> NoReturn:
        damage_record(tmp_path / "home", 1)
        raise KeyboardInterrupt

    toys.before("update_policy", 2, interrupted)
    done = CliRunner().invoke(app, ["train", str(ARITHMETIC / "smoke.yaml"), "--run", "stopped"])
    assert done.exit_code == 130, done.output
    assert "! the best policy could not be copied to the run's folder: " in done.output
    assert "000001.json is no JSON" in done.output


def test_an_interrupt_that_a_library_swallows_is_raised_all_the_same() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), heeding_interrupts(), suppress(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    with heeding_interrupts():
        pass
    assert signal.getsignal(signal.SIGINT) is before


def test_a_command_that_was_stopped_does_not_wait_for_threads_for_long() -> None:
    """Prefect's own threads may wait for minutes, at the end, for a server that is gone."""
    program = (
        "import sys, threading\nfrom flows.cli.friendly_errors import INTERRUPTED, leaving_soon\n"
        "threading.Thread(target=threading.Event().wait).start()\nwith leaving_soon(0.5):\n    sys.exit(INTERRUPTED)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=LONG_S, check=False)
    assert ended.returncode == 130
