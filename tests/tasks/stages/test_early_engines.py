"""Engines that were started before the flow: the run that they are for takes them, and nothing of them is left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from infra.settings import Settings
from ppo_core.records import InputError
from tasks.checks.run import checking
from tasks.stages.early_engines import engines_of, scoring_engine, started_early
from tests.processes import outlived
from tests.tasks.run_contexts import smoke_spec


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty one; no process of these tests outlives them."""
    before = children()
    monkeypatch.setenv("PPOFLOW_HOME", str(tmp_path / "home"))
    yield tmp_path / "home"
    assert outlived(children() - before) == []


def test_only_their_own_run_takes_them_and_they_end() -> None:
    settings, spec, before = Settings(), smoke_spec(), children()
    with started_early(spec, "mine"):
        early = engines_of(spec, settings, "mine")
        assert len(children() - before) == len(early.handles)
        assert engines_of(smoke_spec("iterations=9"), settings, "mine") is early
        assert engines_of(spec, settings, "another") is not early
        assert engines_of(smoke_spec("engines.rollout_engines=2"), settings, "mine") is not early
    assert outlived(children() - before) == []
    assert engines_of(spec, settings, "mine") is not early


def test_the_scoring_engine_that_checked_a_run_serves_it(home: Path) -> None:
    settings, spec, before = Settings(), smoke_spec(), children()
    with scoring_engine("mine") as scoring:
        with checking(spec, "mine", engine=scoring) as answer:
            (checked,) = children() - before
            assert answer.result().good
        with started_early(spec, "mine", scoring):
            early = engines_of(spec, settings, "mine")
            assert early.scoring is scoring
            assert early.answered == {"scoring"}
            assert checked in children()
            assert len(children() - before) == len(early.handles)
        assert outlived(children() - before) == []
    assert scoring.log == settings.log_folder("mine") / "scoring.log"
    assert scoring.log.exists()


def test_after_a_refusal_it_ends_and_only_a_log_of_earlier_stays(home: Path) -> None:
    refused = smoke_spec("reward.function=nowhere.py:score")
    for earlier in ("", "of before\n"):
        with scoring_engine("mine") as scoring:
            if earlier:
                scoring.log.parent.mkdir(parents=True)
                scoring.log.write_text(earlier)
            before = children()
            with pytest.raises(InputError, match="nowhere"), checking(refused, "mine", engine=scoring) as answer:
                answer.result()
            assert outlived(children() - before) == []
        assert scoring.log.exists() == bool(earlier)
        assert scoring.log.parent.exists() == bool(earlier)
    assert scoring.log.read_text().startswith(earlier)


def children() -> set[int]:
    """The processes that this one has started."""
    return {process.pid for process in psutil.Process().children()}
