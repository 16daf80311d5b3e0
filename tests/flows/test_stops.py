"""SIGTERM ends a run as Ctrl-C does, whatever Prefect makes of the signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn
from uuid import uuid4

import httpx
import pytest
import typer
from prefect import flow, task
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowFilter
from prefect.exceptions import TerminationSignal
from typer.testing import CliRunner

from flows.cli import app, run_training
from flows.cli.friendly_errors import AGAIN_S, REFUSED, friendly_errors, stopping_on_sigterm
from tasks.checks.run import Findings
from tasks.prefect.server import EmbeddedFlow
from tasks.stages.stage import RETRIES
from tests.tasks.run_contexts import ARITHMETIC, smoke_spec
from tests.tasks.toy_engines import ToyEngines
from tests.tasks.toy_reward_models import toy_engines
from tests.tasks.toy_runs import replace
from tests.waiting import LONG_S

STARTS = RETRIES + 1


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Signals of this process do afterwards what they did before."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGALRM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


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

    name = f"stopped-by-a-signal-{uuid4().hex}"
    monkeypatch.setattr("prefect.task_engine._create_task_run_locally", arrives)
    with pytest.raises(KeyboardInterrupt), stopping_on_sigterm():
        EmbeddedFlow(fn=body, name=name)()
    with get_client(sync_client=True) as client:
        runs = client.read_flow_runs(flow_filter=FlowFilter(name={"any_": [name]}))
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


@pytest.mark.usefixtures("prefect_server")
def test_an_interrupted_rerun_is_what_goes_on_until_it_is_done(toys: ToyEngines) -> None:
    def pressed() -> NoReturn:
        raise KeyboardInterrupt

    def told(*words: str) -> str:
        done = CliRunner().invoke(app, list(words))
        assert done.exit_code == 130, done.output
        return done.output.splitlines()[-1].partition("continue")[2].strip()

    made = CliRunner().invoke(app, ["train", str(ARITHMETIC / "smoke.yaml"), "--run", "stopped", "--set=iterations=2"])
    assert made.exit_code == 0, made.output
    toys.reward = "another"
    rerun = ("rerun", "stopped@1", "--from", "score")
    for job, number, expected in (
        ("describe_sources", 1, "ppoflow rerun stopped@1 --from score"),  # nobody has noted it yet
        ("update_policy", 1, "ppoflow rerun stopped@1 --from score"),
        ("update_policy", 2, "ppoflow resume stopped"),  # of the iteration after it
    ):
        toys.before(job, number, pressed)
        assert told(*rerun) == expected


@pytest.mark.usefixtures("prefect_server")
def test_without_prefects_server_a_command_has_failed_unless_it_did_what_it_was_to_do(
    toys: ToyEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away() -> NoReturn:
        raise httpx.ConnectError("nobody is there")

    def status(*words: str) -> int:
        done = CliRunner().invoke(app, list(words))
        assert "fails or does not answer (nobody is there)" in done.output or done.exit_code == 0, done.output
        return done.exit_code

    monkeypatch.setattr(os, "_exit", sys.exit)
    train = ("train", str(ARITHMETIC / "smoke.yaml"), "--run", "stopped", "--set=iterations=2")
    assert status(*train) == 0
    toys.reward = "another"
    for number in range(1, STARTS + 1):
        toys.before("describe_sources", number, away)
    assert status("rerun", "stopped@1", "--from", "score") == REFUSED
    assert status("resume", "stopped") == 0
    for number in range(1, STARTS + 1):
        toys.before("describe_sources", number, away)
    assert status(*train) == REFUSED  # all iterations were there before; the policy may not be registered


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_import_is_not_interrupted_in_its_middle(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python would keep its import lock now and then, and another thread that imports anything hang for ever.

    However often the signal came, it is an interrupt once: what ends the run is not interrupted.
    """
    name, before = f"interrupted_by_{number.name.lower()}_{uuid4().hex}", signal.getsignal(signal.SIGINT)
    lines = ("import os, time", *[f"os.kill(os.getpid(), {number})", "time.sleep(0.1)"] * 3, "done = True")
    (tmp_path / f"{name}.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)

    def run() -> None:
        import_module(name)
        threading.Event().wait(LONG_S)

    with pytest.raises(KeyboardInterrupt), stopping_on_sigterm():
        run()
    time.sleep(2 * AGAIN_S)
    assert sys.modules[name].done
    assert signal.getsignal(signal.SIGINT) is before


def test_the_main_thread_imports_nothing_while_it_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    importing: Future[str] = Future()
    monkeypatch.setattr(run_training, "import_module", lambda _: importing.set_result(threading.current_thread().name))

    @contextmanager
    def checking(*_: Any, **__: Any) -> Iterator[Future[Findings]]:
        answer: Future[Findings] = Future()
        answer.set_result(Findings())
        yield answer

    monkeypatch.setattr("tasks.checks.run.checking", checking)
    run_training.check_first(smoke_spec(), None)
    assert importing.result(LONG_S) != threading.main_thread().name


def test_sigterm_while_it_checks_ends_it_as_ctrl_c_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextmanager
    def checking(*_: Any, **__: Any) -> Iterator[None]:
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(LONG_S)
        yield

    monkeypatch.setattr("tasks.checks.run.checking", checking)
    with pytest.raises(typer.Exit) as ended:
        run_training.check_first(smoke_spec(), None)
    assert ended.value.exit_code == 130
    assert "interrupted; nothing was started" in capsys.readouterr().out


def test_a_command_that_was_stopped_does_not_wait_for_threads_for_long() -> None:
    """Prefect's own threads may wait for minutes, at the end, for a server that is gone."""
    program = (
        "import sys, threading\nfrom flows.cli.friendly_errors import INTERRUPTED, leaving_soon\n"
        "threading.Thread(target=threading.Event().wait).start()\nwith leaving_soon(0.5):\n    sys.exit(INTERRUPTED)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=LONG_S, check=False)
    assert ended.returncode == 130
