"""What is said of an engine that ended, from its log."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.engines.process import EngineDied, EngineProcess
from infra.engines.protocol import printed
from tests.infra.engines.test_engines import PROGRAM, ROOT, run


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


def test_what_it_wrote_last_is_printed_without_control_characters_and_not_for_ever():
    assert printed("\x1b[31mred\x07\ttext\u00a0here") == "[31mred text here"
    assert printed("x" * 70_000) == "x" * 500 + "…"
