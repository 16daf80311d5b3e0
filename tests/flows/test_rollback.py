"""Rollback: the run goes back, draws other samples at lower learning rates, and ends the same however often it dies."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from flows.iteration import Rerun
from tasks.runs.guards import DivergedError
from tests.tasks.run_contexts import QuickFiles
from tests.tasks.toy_engines import ToyEngines
from tests.tasks.toy_runs import Killed, ToyRun, digests, killed
from tests.tasks.toy_updates import not_finite

pytestmark = pytest.mark.usefixtures("prefect_server")
GUARDED = (
    "dataset.evaluation=null",
    "registry.metric=score/mean",
    "iterations=5",
    "guards.max_kl=5",
    "guards.on_divergence=rollback",
)


def diverges_in_the_fourth(iteration: int, rate_factor: float) -> Mapping[str, float]:
    """With learning rates as they were at first."""
    return {"kl/reference": 9.0 if (iteration, rate_factor) == (4, 1.0) else 1.0}


def always_diverges(iteration: int, rate_factor: float) -> Mapping[str, float]:
    """In iteration 2, whatever the learning rates."""
    return {"kl/reference": 9.0 if iteration == 2 else 1.0}


class DiesSuperseding(QuickFiles):
    """The process dies before it takes its `number`-th record out of a run, once."""

    def __init__(self, number: int) -> None:
        self.left = number

    def rename(self, path: Path, target: Path) -> None:
        """A rename, or death."""
        if target.parent.name == "superseded":
            self.left -= 1
            if self.left == 0:
                raise Killed
        super().rename(path, target)


def guarded(home: Path, *overrides: str) -> ToyRun:
    """A run that diverges in iteration 4."""
    return ToyRun(home, (*GUARDED, *overrides), engines=ToyEngines(diverges_in_the_fourth))


@pytest.fixture(scope="module")
def rolled_back(tmp_path_factory: pytest.TempPathFactory) -> ToyRun:
    """A finished run that was rolled back once, by two iterations before the diverged one."""
    run = guarded(tmp_path_factory.mktemp("rolled_back"), "guards.rollback_iterations=2")
    run.train()
    return run


def test_it_goes_back_with_other_samples_and_lower_rates(rolled_back: ToyRun, tmp_path: Path) -> None:
    undisturbed = ToyRun(tmp_path, rolled_back.overrides).train()
    records = rolled_back.records()
    assert [(r.iteration, r.attempt, r.rate_factor) for r in records] == [
        (0, 0, 1.0),
        (1, 0, 1.0),
        (2, 1, 0.5),
        (3, 1, 0.5),
        (4, 1, 0.5),
        (5, 1, 0.5),
    ]
    first, second = (record.made("rollouts") for record in (undisturbed[2], records[2]))
    assert first is not None
    assert second is not None
    assert first.digest != second.digest  # though policy and prompts are the same
    assert digests(records)[:1] == digests(undisturbed)[:1]
    assert (records[2].position, records[2].dataset) == (64, records[0].dataset)
    [note], [divergence] = rolled_back.notes("rollbacks"), rolled_back.notes("divergences")
    assert (note["after"], note["attempt"]) == (1, {"number": 1, "rate_factor": 0.5})
    assert divergence["record"]["iteration"] == 4
    assert "iteration 4 diverged: kl/reference=9 passes guards.max_kl=5" in rolled_back.said
    assert "rollback 1 of 3: back to iteration 1, with other samples and learning rates times 0.5" in rolled_back.said
    assert sorted(path.name for path in rolled_back.folder.glob("leases/*/superseded/*")) == [
        "000002.json",
        "000003.json",
    ]
    assert sorted(rolled_back.tracker.steps("seconds/iteration")) == [0, 1, 2, 2, 3, 3, 4, 5]
    assert rolled_back.tracker.figures >= 1  # drawn again at the rollback, before the next picture is due


def test_it_is_the_same_every_time(rolled_back: ToyRun, tmp_path: Path) -> None:
    again = guarded(tmp_path, "guards.rollback_iterations=2")
    assert digests(again.train()) == digests(rolled_back.records())


@pytest.mark.parametrize("number", [1, 2])
def test_killed_while_it_goes_back_the_next_process_completes_that(
    number: int, rolled_back: ToyRun, tmp_path: Path
) -> None:
    run = guarded(tmp_path, "guards.rollback_iterations=2")
    run.files = DiesSuperseding(number)
    run.train_until_killed()
    assert [record.iteration for record in run.records()] == [0, 1, 2, 3][: 5 - number]
    assert digests(run.train()) == digests(rolled_back.records())
    assert (len(run.notes("rollbacks")), len(run.notes("divergences"))) == (1, 1)


@pytest.mark.parametrize("number", [3, 4, 5, 7])
def test_killed_before_or_after_it_the_run_ends_the_same(number: int, rolled_back: ToyRun, tmp_path: Path) -> None:
    run = guarded(tmp_path, "guards.rollback_iterations=2")
    run.engines.before("update_policy", number, killed)
    run.train_until_killed()
    assert digests(run.train()) == digests(rolled_back.records())
    assert len(run.notes("rollbacks")) == 1


def test_iterations_that_no_rollback_gave_up_stay_as_they_were(rolled_back: ToyRun, tmp_path: Path) -> None:
    run = rolled_back.copy(tmp_path / "copy", diverges_in_the_fourth)
    run.train(rerun=Rerun(iteration=1, start="generate"))
    assert digests(run.records()) == digests(rolled_back.records())
    assert [record.attempt for record in run.records()] == [0, 0, 1, 1, 1, 1]
    assert "update_policy" not in run.engines.done


def test_after_too_many_it_stops(tmp_path: Path) -> None:
    rates: list[float] = []

    def always(iteration: int, rate_factor: float) -> Mapping[str, float]:
        rates.extend([rate_factor] if iteration == 2 else [])
        return always_diverges(iteration, rate_factor)

    run = ToyRun(tmp_path, (*GUARDED, "guards.max_rollbacks=2", "guards.rollback_rate_factor=0.1"))
    run.engines = ToyEngines(always)
    with pytest.raises(DivergedError, match=r"It was rolled back 2 times \(guards.max_rollbacks\) before") as told:
        run.train()
    assert "other samples: ppoflow resume toy --set guards.max_rollbacks=3;" in str(told.value)
    assert "on_divergence=rollback" not in str(told.value)
    assert rates == pytest.approx([1.0, 0.1, 0.01])
    assert [record.iteration for record in run.records()] == [0, 1]
    before = run.record_bytes()
    with pytest.raises(DivergedError, match=r"kl/reference=9 passes guards\.max_kl=5"):
        run.train()
    assert (len(run.notes("rollbacks")), len(run.notes("divergences"))) == (2, 3)
    assert run.record_bytes() == before
    with pytest.raises(DivergedError, match=r"rolled back 2 times .* --set guards.max_rollbacks=3;"):
        run.train("guards.max_rollbacks=1")


def test_numbers_that_are_not_finite_take_the_same_way(tmp_path: Path) -> None:
    def explodes(iteration: int, rate_factor: float) -> Mapping[str, float]:
        if (iteration, rate_factor) == (3, 1.0):
            raise not_finite("policy: 3 optimizer steps in a row had no finite loss")
        return {}

    run = ToyRun(tmp_path, GUARDED, engines=ToyEngines(explodes))
    with pytest.raises(
        DivergedError, match=r"iteration 3 .* diverged: policy: 3 optimizer steps in a row had no finite"
    ) as stopped:
        run.train("guards.on_divergence=stop")
    assert "ppoflow resume toy --set guards.on_divergence=rollback" in str(stopped.value)
    assert "ignore" not in str(stopped.value)  # there is no policy to go on with
    assert [record.iteration for record in run.records()] == [0, 1, 2]
    assert [(r.iteration, r.attempt) for r in run.train()] == [(0, 0), (1, 0), (2, 1), (3, 1), (4, 1), (5, 1)]
    [note] = run.notes("divergences")
    assert (note["iteration"], note["record"]) == (3, None)


def better_and_better(iteration: int, rate_factor: float) -> Mapping[str, float]:
    """It diverges in iteration 4; retention keeps none because it was the best."""
    return {**diverges_in_the_fourth(iteration, rate_factor), "policy/quality": float(iteration)}


def frugal(home: Path, *overrides: str) -> ToyRun:
    """Such a run, which keeps one checkpoint, as far as the user has a say in it."""
    settings = (*GUARDED, "checkpoint.keep_last=1", "registry.metric=policy/quality", *overrides)
    return ToyRun(home, settings, engines=ToyEngines(better_and_better))


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("back", [0, 1, 2])
def test_retention_keeps_what_it_goes_back_to(back: int, every: int, tmp_path: Path) -> None:
    """No update is made twice but those that were given up."""
    run = frugal(tmp_path, f"guards.rollback_iterations={back}", f"checkpoint.every={every}")
    records = run.train()
    assert [note["after"] for note in run.notes("rollbacks")] == [3 - back]
    assert [record.attempt for record in records] == [0] * (4 - back) + [1] * (2 + back)
    assert "making it again" not in run.said
    assert run.engines.count("update_policy") == 5 + 1 + back


def test_it_goes_back_although_retention_has_removed_that_checkpoint(tmp_path: Path) -> None:
    """Until then the guards were to stop the run, so nothing was kept to go back to."""
    run = frugal(tmp_path)
    with pytest.raises(DivergedError):
        run.train("guards.on_divergence=stop")
    assert [run.place(record.checkpoint).exists() for record in run.records()] == [True, False, False, True]
    records = run.train("guards.rollback_iterations=2")
    assert [(r.iteration, r.attempt) for r in records] == [(0, 0), (1, 0), (2, 1), (3, 1), (4, 1), (5, 1)]


def test_it_goes_back_to_the_nearest_checkpoint_that_retention_has_left(tmp_path: Path) -> None:
    """That of iteration 2 is gone, and so is what it would be made again from: nothing before is given up for that."""
    run = frugal(tmp_path)
    with pytest.raises(DivergedError):
        run.train("guards.on_divergence=stop")
    records = run.train("guards.rollback_iterations=1")
    assert [(r.iteration, r.attempt) for r in records] == [(0, 0), (1, 0), (2, 0), (3, 0), (4, 1), (5, 1)]
    assert "back to iteration 3, with other samples" in run.said
    assert run.engines.count("update_policy") == 4 + 2
