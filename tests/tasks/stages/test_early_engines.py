"""Engines that were started before the flow: the run that they are for takes them, and nothing of them is left."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from infra.settings import Settings
from ppo_core.records import InputError
from tasks.checks.run import check_engine, keeping_check_engine
from tasks.stages.early_engines import SCORING_ALONE, engines_of, started_early
from tests.processes import outlived
from tests.tasks.run_contexts import smoke_spec
from tests.waiting import LONG_S


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


WITHOUT_CODE = ["dataset={train: rows.jsonl}", "sft=null", "reward={sources: [{kind: exact_match}]}"]
WITH_A_MODEL = [*WITHOUT_CODE, "reward={sources: [{kind: model, path: rm}]}"]
WITH_A_FUNCTION = [*WITHOUT_CODE, "reward={function: reward.py:score}"]
WITH_ROWS_OF_A_FUNCTION = [*WITHOUT_CODE, "dataset={train: rows.py:train}"]


@pytest.mark.parametrize(
    ("changes", "taken"),
    [
        *[(WITHOUT_CODE, True), (WITH_A_FUNCTION, False)],
        pytest.param(WITH_A_MODEL, False, marks=pytest.mark.thorough),
        pytest.param(WITH_ROWS_OF_A_FUNCTION, False, marks=pytest.mark.thorough),
    ],
)
def test_the_scoring_engine_of_a_check_goes_on_as_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: list[str], *, taken: bool
) -> None:
    monkeypatch.setenv("PPOFLOW_HOME", str(tmp_path))
    monkeypatch.setattr("infra.engines.process.HAND_OVER_S", LONG_S)
    spec, before = smoke_spec(*changes), children()
    with keeping_check_engine() as kept:
        with check_engine():
            pass
        checked = children() - before
        assert len(checked) == 1
        with started_early(spec, "mine", kept.engine):
            kept.closing.close()
            handles = engines_of(spec, Settings(), "mine").handles
            assert len(children() - before) == len(handles)
            assert (checked <= children()) == taken
    assert outlived(children() - before) == []


def test_the_engine_of_a_check_that_refuses_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PPOFLOW_HOME", str(tmp_path))
    before = children()
    with keeping_check_engine() as kept:
        with pytest.raises(InputError), check_engine():
            raise InputError("no")
        assert kept.engine is None
        assert children() == before


def children() -> set[int]:
    """The processes that this one has started."""
    return {process.pid for process in psutil.Process().children()}


def test_a_run_that_has_all_its_iterations_starts_the_one_that_knows_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PPOFLOW_HOME", str(tmp_path))
    spec, before = smoke_spec(), children()
    with started_early(spec, "mine", only=SCORING_ALONE):
        assert len(children() - before) == 1
        engines = engines_of(spec, Settings(), "mine")
        engines.start(SCORING_ALONE)
        assert len(children() - before) == 1
        engines.start()
        assert len(children() - before) == len(engines.handles)
        engines.close()
        engines.start()
        assert outlived(children() - before) == []
