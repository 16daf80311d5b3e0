"""One scoring engine for all checks of a session: to start one takes longer than most tests of what it says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from infra.engines.process import EngineProcess
from infra.settings import Settings
from tasks.checks import run as checks
from tasks.stages.engine_programs import EnginePlan, launch


class StaysOpen:
    """An engine that its user neither starts nor ends."""

    def __init__(self, engine: EngineProcess) -> None:
        self._engine = engine

    def start(self) -> None:
        """The first job does."""

    def close(self) -> None:
        """The session does."""

    def run(self, *args: Any, **options: Any) -> Any:
        """A job of the real engine."""
        return self._engine.run(*args, **options)


@pytest.fixture(scope="session")
def session_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """A real scoring engine, launched as a check does, outside of every test's folders."""
    home = tmp_path_factory.mktemp("checks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PPOFLOW_HOME", str(home))
        engine = launch(EnginePlan("scoring", "check"), Settings(), home)
    yield engine
    engine.close()


@pytest.fixture
def shared_engine(session_engine: EngineProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks of this test ask the session's engine."""
    session_engine.start()
    monkeypatch.setattr(checks, "launch", lambda *_: StaysOpen(session_engine))
