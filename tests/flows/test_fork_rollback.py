"""A fork of a run that was rolled back begins in the attempt of its last shared iteration, however often it dies."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from flows.iteration import Rerun
from infra.runs.s3_runs import S3Runs
from infra.storage.objects import Objects
from ppo_core.spec import RunSpec
from tasks.runs.fork import fork_run, shared_records, shared_rollbacks
from tasks.runs.fsck import check_run
from tasks.runs.guards import DivergedError
from tasks.runs.iteration_record import IterationRecord
from tasks.runs.run_state import spec_of_run, spec_to_go_on
from tests.flows.test_rollback import GUARDED, diverges_in_the_fourth
from tests.flows.test_verify import verify
from tests.infra.storage.faulty_files import Died
from tests.infra.storage.s3.faulty_objects import FaultyObjects
from tests.infra.storage.s3.memory_objects import MemoryObjects
from tests.tasks.bucket_runs import BucketRun
from tests.tasks.run_contexts import QuickFiles
from tests.tasks.toy_engines import Measures, ToyEngines
from tests.tasks.toy_runs import Killed, ToyRun, digests, finished

pytestmark = pytest.mark.usefixtures("prefect_server")
SETTINGS = (*GUARDED, "guards.rollback_iterations=2")
ATTEMPTS = [(0, 1.0), (0, 1.0), (1, 0.5), (1, 0.5), (1, 0.5), (1, 0.5)]
OTHER = "update.learning_rate=0.01"
NOTED = ("iterations", "rollbacks", "divergences", "superseded")


def diverges_in_the_fifth(iteration: int, rate_factor: float) -> Mapping[str, float]:
    """With learning rates as one rollback has left them."""
    return {"kl/reference": 9.0 if (iteration, rate_factor) == (5, 0.5) else 1.0}


def always_diverges_in_the_fifth(iteration: int, rate_factor: float) -> Mapping[str, float]:
    """Whatever the learning rates."""
    return {"kl/reference": 9.0 if iteration == 5 else 1.0}


class DiesNoting(QuickFiles):
    """The process dies before its `number`-th change of records or notes, once."""

    def __init__(self, number: int) -> None:
        self.left = number

    def rename(self, path: Path, target: Path) -> None:
        """A rename, or death."""
        self._count(target)
        super().rename(path, target)

    def link(self, path: Path, target: Path) -> None:
        """A link, or death."""
        self._count(target)
        super().link(path, target)

    def _count(self, target: Path) -> None:
        if target.parent.name not in NOTED:
            return
        self.left -= 1
        if self.left == 0:
            raise Killed


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> ToyRun:
    """A finished run that was rolled back from iteration 4 to 1."""
    run = finished(tmp_path_factory.mktemp("trained") / "home", SETTINGS, diverges_in_the_fourth)
    assert attempts(run.records()) == ATTEMPTS
    return run


@pytest.fixture
def source(trained: ToyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ToyRun:
    """Its copy, where ppoflow keeps its state."""
    return copied(trained, tmp_path / "home", monkeypatch)


def copied(run: ToyRun, home: Path, monkeypatch: pytest.MonkeyPatch) -> ToyRun:
    """The run and its store where ppoflow keeps its state from now on."""
    monkeypatch.setenv("PPOFLOW_HOME", str(home))
    monkeypatch.delenv("PPOFLOW_STORE", raising=False)
    return run.copy(home, diverges_in_the_fourth)


def attempts(records: list[IterationRecord]) -> list[tuple[int, float]]:
    """How often the run was rolled back before each, and what that left of the learning rates."""
    return [(record.attempt, record.rate_factor) for record in records]


def forked(
    source: ToyRun, iteration: int, *overrides: str, name: str = "new", measures: Measures = diverges_in_the_fourth
) -> ToyRun:
    """A fork, not gone on with yet."""
    fork_run(source.name, iteration, name, list(overrides))
    return ToyRun(source.home, name=name, engines=ToyEngines(measures))


def go_on(fork: ToyRun) -> list[IterationRecord]:
    """As `ppoflow resume` does."""
    return fork.train(spec=spec_to_go_on(fork.name))


def damages(run: ToyRun) -> list[str]:
    """What fsck says is damaged of a run, or verify finds different."""
    compared = verify(run, run.home / f"verified {run.name}")
    different = [f"{found.stage} of {found.iteration}" for found in compared if not found.same]
    return [*(damage.complaint for damage in check_run(run.name, lambda text: None).damages), *different]


@pytest.mark.parametrize("iteration", range(5))
def test_with_no_other_setting_it_repeats_the_run(iteration: int, source: ToyRun) -> None:
    """From 1, to which the run went back, it diverges as the run did, and goes back as the run did."""
    fork = forked(source, iteration)
    assert attempts(fork.records()) == ATTEMPTS[: iteration + 1]
    go_on(fork)
    assert attempts(fork.records()) == ATTEMPTS
    assert digests(fork.records()) == digests(source.records())
    assert damages(fork) == []
    assert "update_policy" not in fork.engines.done


def test_with_other_settings_it_goes_on_with_other_samples_at_lower_rates(source: ToyRun) -> None:
    fork = forked(source, 4, OTHER)
    assert damages(fork) == []
    assert attempts(go_on(fork)) == ATTEMPTS
    assert digests(fork.records())[5][:3] == digests(source.records())[5][:3]  # the same samples
    assert damages(fork) == []


@pytest.mark.thorough
def test_its_own_rollbacks_count_on_however_often_it_dies(
    trained: ToyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes back to 2, before the iteration that it was forked at; killed at each change of its records and notes."""

    def fork_there(home: Path) -> ToyRun:
        return forked(copied(trained, home, monkeypatch), 3, OTHER, measures=diverges_in_the_fifth)

    whole = fork_there(tmp_path / "whole")
    records = go_on(whole)
    assert attempts(records) == [*ATTEMPTS[:3], (2, 0.25), (2, 0.25), (2, 0.25)]
    assert [note["after"] for note in whole.notes("rollbacks")] == [1, 2]
    assert "rollback 2 of 3: back to iteration 2, with other samples and learning rates times 0.25" in whole.said
    assert damages(whole) == []
    number, died = 0, True
    while died:
        number += 1
        fork = fork_there(tmp_path / str(number))
        fork.files = DiesNoting(number)
        try:
            go_on(fork)
            died = False
        except Killed:
            assert digests(go_on(fork)) == digests(records), number
        assert attempts(fork.records()) == attempts(records)
        assert len(fork.notes("rollbacks")) == 2
    made = ["4", "divergence", "rollback", "4 taken out", "3 taken out", "3", "4", "5"]
    assert number == len(made) + 1


def test_after_too_many_in_all_it_stops(source: ToyRun) -> None:
    fork = forked(source, 3, OTHER, measures=always_diverges_in_the_fifth)
    with pytest.raises(DivergedError, match=r"It was rolled back 3 times \(guards.max_rollbacks\) before"):
        go_on(fork)
    assert attempts(fork.records()) == [*ATTEMPTS[:3], (3, 0.125), (3, 0.125)]
    assert len(fork.notes("divergences")) == 3  # the first rollback of three was the source's
    assert damages(fork) == []


@pytest.mark.parametrize("iteration", [1, 3])
def test_a_shared_iteration_that_is_done_again_stays_as_it_was(iteration: int, source: ToyRun) -> None:
    fork = forked(source, 4)
    fork.train(rerun=Rerun(iteration=iteration, start="generate"), spec=spec_of_run("new"))
    assert attempts(fork.records()) == ATTEMPTS
    assert digests(fork.records()) == digests(source.records())
    assert "update_policy" not in fork.engines.done


def test_a_fork_of_a_fork_begins_in_its_attempt(source: ToyRun) -> None:
    fork = forked(source, 3, OTHER, measures=diverges_in_the_fifth)
    go_on(fork)
    again = forked(fork, 4, name="newer", measures=diverges_in_the_fifth)
    assert attempts(go_on(again)) == attempts(fork.records())
    assert digests(again.records()) == digests(fork.records())
    assert damages(again) == []
    before = forked(fork, 2, OTHER, name="newest", measures=diverges_in_the_fifth)
    assert digests(go_on(before)) == digests(fork.records())


def test_what_a_dying_source_is_about_to_give_up_is_no_concern_of_it(source: ToyRun) -> None:
    note = {"after": 2, "attempt": {"number": 2, "rate_factor": 0.25}, "passed": []}
    source.context().records.note("rollbacks", note)
    fork = forked(source, 4)
    before = digests(source.records())
    assert digests(go_on(fork)) == before


def test_a_changed_attempt_of_its_last_shared_iteration_is_found(source: ToyRun) -> None:
    fork = forked(source, 3)
    fork.forge(3, rate_factor=0.75)
    [told] = [damage.complaint for damage in check_run("new", lambda text: None).damages]
    assert told.startswith("its attempt is {'number': 1, 'rate_factor': 0.75}, and {'number': 1, 'rate_factor': 0.5}")


@pytest.mark.thorough
def test_on_s3_it_is_the_same_killed_at_each_change_of_its_head(tmp_path: Path) -> None:
    def fork_there(home: Path) -> tuple[MemoryObjects, RunSpec]:
        source = BucketRun(home / "toy", SETTINGS, engines=ToyEngines(diverges_in_the_fourth))
        records, before = source.train()[:4], source.context().spec
        spec, runs = before.with_overrides([OTHER]), S3Runs(source.address, source.objects)
        shared = shared_records(before, spec, records, "new")
        rollbacks = {"rollbacks": shared_rollbacks("new", shared)}
        runs.create("new", spec.model_dump(mode="json"), shared, rollbacks)
        assert isinstance(source.objects, MemoryObjects)
        return source.objects, spec

    def fork_on(home: Path, objects: Objects) -> BucketRun:
        return BucketRun(home, name="new", objects=objects, engines=ToyEngines(diverges_in_the_fifth))

    objects, spec = fork_there(tmp_path)
    seam = FaultyObjects(objects)
    records = fork_on(tmp_path / "whole", seam).train(spec=spec)
    assert attempts(records) == [*ATTEMPTS[:3], (2, 0.25), (2, 0.25), (2, 0.25)]
    swaps = [number for number, call in enumerate(seam.trace, 1) if call == "replace team/runs/new/head.json"]
    assert len(swaps) > 7
    for number in swaps:
        home = tmp_path / str(number)
        objects, spec = fork_there(home)
        with pytest.raises(Died):
            fork_on(home / "before", FaultyObjects(objects, number, "dies before")).train(spec=spec)
        assert digests(fork_on(home / "after", objects).train(spec=spec)) == digests(records), number
