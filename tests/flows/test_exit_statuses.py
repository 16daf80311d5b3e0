"""How a command ends where something is wrong that no run is to blame for; status 1 is a verdict."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from prefect.exceptions import PrefectHTTPStatusError
from typer.testing import CliRunner

from flows.cli import app, friendly_errors
from flows.cli.friendly_errors import (
    BROKEN,
    INTERRUPTED,
    NO_READER,
    REFUSED,
    no_verdict_by_accident,
    stopping_on_sigterm,
)
from tests.waiting import LONG_S

ROOT = Path(__file__).parents[2]
SMOKE = ROOT / "examples" / "arithmetic" / "smoke.yaml"


def test_an_error_that_nobody_has_foreseen_is_no_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended, no_verdict_by_accident():
        raise ZeroDivisionError("unforeseen")
    assert ended.value.code == BROKEN
    error = capsys.readouterr().err
    assert "Traceback" in error
    assert "unforeseen" in error


@pytest.mark.parametrize("status", [0, 1, 2, INTERRUPTED])
def test_how_a_command_ends_itself_stays_as_it_is(status: int) -> None:
    with pytest.raises(SystemExit) as ended, no_verdict_by_accident():
        raise SystemExit(status)
    assert ended.value.code == status


def test_a_prefect_server_that_fails_is_a_line_and_no_verdict(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(status: int) -> None:
        raise SystemExit(status)

    monkeypatch.setattr("flows.cli.friendly_errors.leave", leave)
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    with pytest.raises(SystemExit) as ended, friendly_errors.friendly_errors():
        raise PrefectHTTPStatusError("500 Internal Server Error", request=None, response=None)  # type: ignore[arg-type]
    assert ended.value.code == REFUSED
    said = "Prefect's server at http://127.0.0.1:9/api fails or does not answer (500 Internal Server Error)\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EACCES, "Permission denied: give this user access to it"),
        (errno.ENOSPC, "No space left on device: make room there"),
        (errno.EIO, "Input/output error: its disk fails"),
    ],
)
def test_a_file_that_the_system_refuses_is_a_line(number: int, remedy: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended, friendly_errors.friendly_errors():
        raise OSError(number, os.strerror(number), "/data/store/runs/r/spec.json")
    assert ended.value.exit_code == REFUSED
    assert capsys.readouterr().err.startswith(f"/data/store/runs/r/spec.json: {remedy}")


def test_other_errors_of_the_system_are_not_foreseen() -> None:
    with pytest.raises(OSError, match="too many"), friendly_errors.friendly_errors():
        raise OSError(errno.EMFILE, "too many open files", "/data")


@pytest.mark.parametrize("arguments", [["--version"], ["check", str(SMOKE)]], ids=["version", "check"])
def test_an_output_on_a_full_disk_is_a_line(arguments: list[str], tmp_path: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "flows.cli", *arguments],
            env={**os.environ, "PPOFLOW_HOME": str(tmp_path)},
            cwd=ROOT,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=LONG_S,
            check=False,
        )
    assert (done.returncode, done.stderr) == (REFUSED, "the output cannot be written: No space left on device\n")


def test_where_nobody_reads_the_output_that_is_no_verdict() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli", "--help"], cwd=ROOT, stdout=writer, timeout=LONG_S, check=False
    )
    os.close(writer)
    assert done.returncode == NO_READER


def test_a_question_that_nobody_answers_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask() -> None:
        raise typer.Abort

    lonely = typer.Typer()
    lonely.command()(ask)
    monkeypatch.setattr(sys, "argv", ["lonely"])
    with pytest.raises(SystemExit) as ended, no_verdict_by_accident():
        lonely()
    assert ended.value.code == INTERRUPTED


def test_a_current_folder_that_is_gone_is_a_line(tmp_path: Path) -> None:
    gone = "import os, sys; os.chdir(sys.argv.pop(1)); os.rmdir(os.getcwd()); from flows.cli import run; run()"
    (tmp_path / "gone").mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PPOFLOW_")}
    done = subprocess.run(
        [sys.executable, "-c", gone, str(tmp_path / "gone"), "status", "demo"],
        env={**environment, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LONG_S,
        check=False,
    )
    assert done.returncode == REFUSED, done.stderr
    assert "the current folder, which is gone" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_prompt_that_begins_with_a_dash_is_told_how() -> None:
    refused = CliRunner().invoke(app, ["sample", "toy", "-5+3="])
    assert refused.exit_code == REFUSED
    assert "No such option: -5" in refused.stderr
    assert "begins with a dash write --" in " ".join(refused.stderr.replace("│", " ").split())


@pytest.fixture
def hangup() -> object:
    before = signal.getsignal(signal.SIGHUP)
    yield before
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hangup")
@pytest.mark.parametrize(
    ("before", "interrupts"), [(signal.SIG_DFL, True), (signal.SIG_IGN, False)], ids=["a terminal", "nohup"]
)
def test_a_terminal_that_is_gone_ends_a_command_but_not_one_under_nohup(
    before: signal.Handlers, interrupts: bool
) -> None:
    signal.signal(signal.SIGHUP, before)
    handlers: list[Callable[..., object] | int | None] = []
    with stopping_on_sigterm():
        handlers.append(signal.getsignal(signal.SIGHUP))
    assert handlers == [friendly_errors.interrupt if interrupts else signal.SIG_IGN]
