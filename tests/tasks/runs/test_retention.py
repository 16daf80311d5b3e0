"""Retention and gc: what goes, what stays whatever happens, and that a run goes on from what is left."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from itertools import product
from pathlib import Path

import pytest

from infra.artifacts.local_store import LocalStore
from infra.process_identity import this_process
from ppo_core.spec import CheckpointSpec
from tasks.policies.policy import find_policy
from tasks.register_policy import register_policy
from tasks.runs.fork import fork_run
from tasks.runs.guards import DivergedError
from tasks.runs.iteration_record import read_record, resume_inputs
from tasks.runs.kept import REGISTERED
from tasks.runs.reachability import Reachability, kept_iterations
from tasks.runs.retention import find_garbage, remove_garbage, remove_orphans
from tasks.runs.run_state import spec_of_run
from tasks.runs.verification import open_verification
from tests.tasks.run_contexts import ignore
from tests.tasks.toy_engines import ToyEngines
from tests.tasks.toy_reward_models import toy_engines
from tests.tasks.toy_runs import ToyRun, digests, killed, snapshot

pytestmark = pytest.mark.usefixtures("prefect_server")
GONE = this_process().model_copy(update={"started": 1})
SHORT = ("dataset.evaluation=null", "registry.metric=policy/quality", "iterations=6")


def worse_and_worse_from_the_second(iteration: int, rate_factor: float) -> Mapping[str, float]:
    """Iteration 2 is the best; before it, iteration 1 was."""
    return {"policy/quality": 9.0 if iteration == 2 else 1 / iteration}


def better_and_better(iteration: int, rate_factor: float) -> Mapping[str, float]:
    """Each iteration is the best so far."""
    return {"policy/quality": float(iteration)}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where ppoflow keeps its state."""
    monkeypatch.setenv("PPOFLOW_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("PPOFLOW_STORE", raising=False)
    return tmp_path / "home"


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> ToyRun:
    """A run that keeps all."""
    run = quality(tmp_path_factory.mktemp("everything"))
    run.train()
    return run


def quality(home: Path, *overrides: str) -> ToyRun:
    """A run whose best policy is that of iteration 2."""
    return ToyRun(home, (*SHORT, *overrides), engines=ToyEngines(worse_and_worse_from_the_second))


def stored(run: ToyRun, kind: str) -> list[int]:
    """The iterations whose artifact of this kind is in the store."""
    refs = {record.iteration: record.made(kind) for record in run.records()}
    return [iteration for iteration, ref in refs.items() if ref is not None and run.place(ref).is_dir()]


@pytest.mark.parametrize(
    ("rule", "checkpoints"),
    [
        (["keep_last=1"], [0, 2, 6]),
        (["keep_last=3"], [0, 2, 4, 5, 6]),
        (["keep_last=1", "keep_every=3"], [0, 2, 3, 6]),
        (["keep_last=9"], [0, 1, 2, 3, 4, 5, 6]),
        (["keep_last=1", "guards.on_divergence=rollback"], [0, 2, 5, 6]),
        (["keep_last=1", "guards.on_divergence=rollback", "guards.rollback_iterations=2"], [0, 2, 4, 5, 6]),
        (["keep_last=3", "guards.on_divergence=rollback"], [0, 2, 4, 5, 6]),
        (["keep_last=9", "keep_every=3"], [0, 1, 2, 3, 4, 5, 6]),
    ],
)
def test_the_last_ones_stay_and_every_so_many_and_the_best_and_the_reference(
    rule: list[str], checkpoints: list[int], everything: ToyRun, home: Path
) -> None:
    run = quality(home, *(setting if "." in setting else f"checkpoint.{setting}" for setting in rule))
    assert digests(run.train()) == digests(everything.records())
    assert stored(run, "checkpoint") == checkpoints
    assert stored(run, "experience") == [n for n in checkpoints if n > 0]
    for record in run.records()[1:]:  # what was sampled and scored is always kept
        assert record.made("rollouts") is not None
        assert record.made("scores") is not None
        assert run.place(record.made("rollouts")).is_dir()
        assert run.place(record.made("scores")).is_dir()
    assert find_garbage().artifacts == []


@pytest.mark.parametrize("every", [1, 3])
def test_every_kept_iteration_can_be_gone_on_from(every: int, tmp_path: Path) -> None:
    def up_and_down(iteration: int, rate_factor: float) -> Mapping[str, float]:
        return {"policy/quality": [0.0, 1.0, 3.0, 2.0, 0.5, 5.0, 4.0][iteration]}

    run = quality(tmp_path, f"checkpoint.every={every}")
    run.engines.measures = up_and_down
    records, store = run.train(), LocalStore(tmp_path / "store")
    for until in range(1, len(records) + 1):
        for last, often in product((1, 2, 3), (None, 2, 4)):
            rule = CheckpointSpec(every=every, keep_last=last, keep_every=often)
            told = [record.model_copy(update={"retention": rule}) for record in records[:until]]
            kept, needed = kept_iterations(told), Reachability(store).of(told)
            assert {told[-1].iteration, told[-1].best.iteration} <= kept
            for iteration in kept:
                assert {(ref.kind, ref.key) for _, ref in resume_inputs(told[iteration], best=True)} <= needed


def test_amid_thin_checkpoints_a_run_goes_on_after_release(everything: ToyRun, home: Path) -> None:
    run = quality(home, "checkpoint.every=3", "checkpoint.keep_last=1")
    run.engines.before("generate_rollouts", 6, killed)
    run.train_until_killed()
    assert stored(run, "checkpoint") == [0, 2, 3, 5]
    assert stored(run, "experience") == [1, 2, 4, 5]
    before = run.record_bytes()
    run.train()
    assert {name: run.record_bytes()[name] for name in before} == before
    assert run.policy_at(6) == everything.policy_at(6)
    assert run.engines.count("update_policy") == 6


def test_a_rule_that_is_made_stricter_applies_from_the_next_commit_on(everything: ToyRun, home: Path) -> None:
    run = everything.copy(home, worse_and_worse_from_the_second)
    run.train("iterations=7", "checkpoint.keep_last=2")
    assert stored(run, "checkpoint") == [0, 2, 6, 7]


def test_what_a_fork_needs_stays_when_its_source_lets_it_go(everything: ToyRun, home: Path) -> None:
    run = everything.copy(home, worse_and_worse_from_the_second)
    fork_run("toy", 3, "new", [])
    run.train("iterations=7", "checkpoint.keep_last=1")
    assert stored(run, "checkpoint") == [0, 1, 2, 3, 7]
    fork = ToyRun(home, name="new", engines=ToyEngines(worse_and_worse_from_the_second))
    assert digests(fork.train(spec=spec_of_run("new"))) == digests(everything.records())


def test_what_a_diverged_iteration_made_stays_as_evidence(home: Path) -> None:
    run = quality(home, "checkpoint.keep_last=1", "guards.max_kl=5")
    run.engines.measures = lambda iteration, rate_factor: {"kl/reference": 9.0 if iteration == 3 else 0.0}
    with pytest.raises(DivergedError):
        run.train()
    remove_garbage(find_garbage())
    evidence = read_record(run.notes("divergences")[0]["record"])
    for ref in (evidence.made("rollouts"), evidence.made("scores"), evidence.made("experience"), evidence.checkpoint):
        assert ref is not None
        assert run.place(ref).is_dir()
    assert run.engines.count("update_policy") == 3
    with pytest.raises(DivergedError):
        run.train()
    assert run.engines.count("update_policy") == 3


def test_gc_removes_what_no_record_needs_and_nothing_else(everything: ToyRun, home: Path) -> None:
    run = everything.copy(home)
    before = snapshot(home / "store")
    store = LocalStore(home / "store", writer=GONE)
    orphan, unfinished = store.scratch(), store.scratch()
    (orphan / "stats.json").write_text("{}")
    (unfinished / "half").write_text("12345")
    store.put(orphan, "scores", "0" * 64)
    garbage = find_garbage()
    [artifact], [orphan] = garbage.artifacts, garbage.orphans
    assert (artifact.kind, artifact.key, Path(orphan.place), orphan.bytes) == ("scores", "0" * 64, unfinished, 5)
    assert (home / "store" / "scores" / ("0" * 64)).is_dir()  # only looked at
    assert remove_garbage(garbage) == garbage.bytes == artifact.bytes + 5
    assert snapshot(home / "store") == before
    assert find_garbage().rows() == []
    assert run.train() == everything.records()


@pytest.mark.parametrize("by", ["gc", "the next run"])
def test_what_a_killed_verification_left_goes(
    by: str, everything: ToyRun, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = everything.copy(home)
    toy_engines(monkeypatch)
    with open_verification("toy", None, ignore) as context:
        scratch = Path(context.store.root).parent
        (scratch / "half").write_text("12345")
        assert find_garbage().rows() == []
    assert not scratch.exists()
    left = scratch.with_name(scratch.name.replace(this_process().token, GONE.token))
    left.mkdir()
    own = home / "scratch" / "own"  # somebody's else, whatever its age
    own.mkdir(parents=True)
    os.utime(own, (0, 0))
    (left / "half").write_text("12345")
    garbage = find_garbage()
    assert [(place, size) for place, size, _ in garbage.rows()] == [(str(left), 5)]
    assert (remove_garbage(garbage) if by == "gc" else remove_orphans(run.context())) == 5
    assert (left.exists(), own.exists()) == (False, True)
    assert find_garbage().rows() == []


def test_a_superseded_iteration_is_garbage(everything: ToyRun, home: Path) -> None:
    run = everything.copy(home, worse_and_worse_from_the_second)
    last = run.records()[6]
    context = run.context()
    context.supersede(5)
    gone = {(ref.kind, ref.key) for ref in last.artifacts.values()}
    assert {(found.kind, found.key) for found in find_garbage().artifacts} == gone


def test_what_a_run_works_with_is_pinned_until_its_record_names_it(home: Path) -> None:
    run = quality(home)
    looked: list[object] = []

    def look() -> None:
        looked.append(find_garbage().artifacts)
        looked.append(remove_garbage(find_garbage()))

    run.engines.before("update_policy", 2, look)
    run.engines.before("score_rollouts", 1, look)
    run.train()
    assert looked == [[], 0, [], 0]


def test_what_became_garbage_is_kept_where_a_record_names_it_meanwhile(home: Path) -> None:
    run = quality(home)
    run.engines.before("update_policy", 1, killed)
    run.train_until_killed()
    run.context()  # a new process: the pins of the one before are gone
    garbage = find_garbage()
    assert sorted(found.kind for found in garbage.artifacts) == ["experience", "rollouts", "scores"]
    run.train()
    before = snapshot(home / "store")
    assert remove_garbage(garbage) == 0
    assert snapshot(home / "store") == before


def test_what_was_set_aside_goes_only_when_asked_for(everything: ToyRun, home: Path) -> None:
    everything.copy(home)
    aside = home / "store" / "damaged" / "scores-00-1"
    aside.mkdir(parents=True)
    (aside / "scores.json").write_text("what was left of it")
    assert find_garbage().rows() == []
    garbage = find_garbage(damaged=True)
    assert [Path(found.place) for found in garbage.damaged] == [aside]
    assert remove_garbage(garbage) == len("what was left of it")
    assert not aside.exists()


def test_what_was_registered_stays_when_the_run_goes_on_to_a_better_one(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version of the model registry is the checkpoint where it lies."""
    monkeypatch.setenv("PPOFLOW_TRACKING_URI", f"sqlite:///{home}/mlflow.db")
    rule = ("dataset.evaluation=null", "registry.metric=policy/quality", "checkpoint.keep_last=1")
    run = ToyRun(home, (*rule, "iterations=2"), engines=ToyEngines(better_and_better))
    last = run.train()[-1]
    context = run.context()
    registered = register_policy(context, last, last.best)
    assert context.lease is not None
    context.lease.release()
    run.overrides = (*rule, "iterations=4")
    run.train()
    assert stored(run, "checkpoint") == [0, 2, 4]
    assert find_garbage().artifacts == []
    assert find_policy(f"models:/{registered.name}/{registered.version}").checkpoint.digest == last.checkpoint.digest
    shutil.rmtree(home / "store/runs/toy")
    assert {found.key for found in find_garbage().artifacts}.isdisjoint({last.checkpoint.key})
    [page] = (home / "store" / REGISTERED).iterdir()
    page.unlink()
    assert last.checkpoint.key in {found.key for found in find_garbage().artifacts}
