"""What is said of an engine that ended, from its log."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from infra.engines.process import EngineDied, EngineProcess
from infra.engines.protocol import printed
from tests.infra.engines.test_engines import PROGRAM, ROOT, run

OVER_THE_PROTOCOL = "tests.ppo_core.processes.protocol_program"


def test_an_engine_that_died_says_so_although_its_log_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    log = tmp_path / "logs" / "echo.log"
    engine = EngineProcess("echo", PROGRAM, log=log)
    try:
        run(engine, "echo")
        log.unlink()
        log.parent.rmdir()
        with pytest.raises(EngineDied, match=r"exit code 3(?s:.)*echo\.log cannot be read \(No such file") as raised:
            run(engine, "crash", code=3)
        assert str(log) in str(raised.value)
        assert run(engine, "echo").result["pid"], "the next job starts it anew"
    finally:
        engine.close()


def test_an_engine_goes_on_with_the_process_of_another_and_logs_to_its_own_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(ROOT)
    old, new = tmp_path / "first", tmp_path / "second"
    first, second = (EngineProcess(log.name, OVER_THE_PROTOCOL, log=log) for log in (old, new))
    other = EngineProcess("other", OVER_THE_PROTOCOL, log=tmp_path / "other", environment={"TORCH_SHOW": "1"})
    new.write_text("of a run before\n")
    try:
        assert not second.take_over(first), "it has no process"
        run(first, "talk")
        pid = run(first, "echo").result["pid"]
        assert not other.take_over(first), "it would have been started otherwise"
        assert second.take_over(first)
        assert run(second, "echo").result["pid"] == pid
        run(second, "talk")
        said = ["from print", "from os.write", "from a child"]
        assert sorted(old.read_text().splitlines()) == sorted(said)
        assert sorted(new.read_text().splitlines()) == sorted([*said, *said, "of a run before"])
        first.close()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineDied, match=r"(?s)^engine 'second', job 'echo'.*from a child") as raised:
            run(second, "echo")
        assert "of a run before" not in str(raised.value)
        first.start()
        assert run(first, "echo").result["pid"] not in (pid, run(second, "echo").result["pid"])
        assert not second.take_over(first), "it has a process of its own"
    finally:
        for engine in (first, second, other):
            engine.close()


def test_an_engine_that_cannot_hand_its_process_over_leaves_the_other_to_start_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(ROOT)
    first, second = (EngineProcess(name, PROGRAM, log=tmp_path / name) for name in ("first", "second"))
    try:
        pid = run(first, "echo").result["pid"]
        assert not second.take_over(first), "this program knows no such job"
        assert run(second, "echo").result["pid"] != pid
    finally:
        first.close()
        second.close()


def test_what_it_wrote_last_is_printed_without_control_characters_and_not_for_ever():
    assert printed("\x1b[31mred\x07\ttext\u00a0here") == "[31mred text here"
    assert printed("x" * 70_000) == "x" * 500 + "…"
