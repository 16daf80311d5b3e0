"""Engines that were started before the flow: the run that they are for takes them, and nothing of them is left."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from infra.settings import Settings
from tasks.stages.early_engines import engines_of, started_early
from tests.processes import outlived
from tests.tasks.run_contexts import smoke_spec


def test_only_their_own_run_takes_them_and_they_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PPOFLOW_HOME", str(tmp_path))
    settings, spec, before = Settings(), smoke_spec(), children()
    with started_early(spec, "mine"):
        early = engines_of(spec, settings, "mine")
        assert len(children() - before) == len(early.handles)
        assert engines_of(smoke_spec("iterations=9"), settings, "mine") is early
        assert engines_of(spec, settings, "another") is not early
        assert engines_of(smoke_spec("engines.rollout_engines=2"), settings, "mine") is not early
    assert outlived(children() - before) == []
    assert engines_of(spec, settings, "mine") is not early


def children() -> set[int]:
    """The processes that this one has started."""
    return {process.pid for process in psutil.Process().children()}
