"""Fork: a new run from an iteration of another one, which shares all before it and goes on with other settings."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli import app
from flows.recovery import last_resumable_record
from infra.runs.local_lease import acquire_lease
from infra.runs.records import InvalidRunName
from ppo_core.records import InputError
from tasks.runs.fork import fork_run, fork_spec, parse_place
from tasks.runs.inspect import read_run
from tasks.runs.run_state import spec_of_run, spec_to_go_on
from tests.tasks.toy_runs import ToyRun, digests, finished, flip_a_bit, lose_it, snapshot

pytestmark = pytest.mark.usefixtures("prefect_server")
SETTINGS = ("iterations=4", "evaluation.every=2")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> ToyRun:
    """A finished run."""
    return finished(tmp_path_factory.mktemp("trained") / "home", SETTINGS)


@pytest.fixture
def source(trained: ToyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ToyRun:
    """Its copy, where ppoflow keeps its state."""
    return trained.own_copy(tmp_path / "home", monkeypatch)


def forked(source: ToyRun, iteration: int, *overrides: str) -> ToyRun:
    """A fork called `new`, not gone on with yet."""
    fork_run(source.name, iteration, "new", list(overrides))
    return ToyRun(source.home, name="new", engines=source.engines)


def go_on(fork: ToyRun) -> None:
    """As `ppoflow resume` does."""
    fork.train(spec=spec_to_go_on(fork.name))


def test_it_shares_every_artifact_before_and_goes_on_from_there(source: ToyRun) -> None:
    store = snapshot(source.home / "store")
    fork = forked(source, 2, "update.learning_rate=0.01", "iterations=5")
    after = snapshot(source.home / "store")
    assert {name for name in after if name not in store} == {
        f"runs/new/{name}" for name in ("spec.json", "last.json", *(f"iterations/00000{n}.json" for n in range(3)))
    }
    assert {name: after[name] for name in store} == store
    assert digests(fork.records()) == digests(source.records())[:3]
    assert {(r.run, r.forked_from, r.lease) for r in fork.records()} == {("new", "toy@2", 0)}
    assert read_run("new").iterations == 5
    go_on(fork)
    old, new = digests(source.records()), digests(fork.records())
    assert [record.iteration for record in fork.records()] == [0, 1, 2, 3, 4, 5]
    assert new[3][:3] == old[3][:3]  # the same policy answers the same prompts; only the update is another
    assert new[3][3] != old[3][3]
    assert source.engines.count("update_policy") == 3
    assert source.engines.count("generate_rollouts") == 2  # iteration 3's came from the store


@pytest.mark.parametrize("change", ["advantages.kl.coef=0.5", "advantages.kl={kind: adaptive, coef: 0.5, target: 6}"])
def test_another_price_of_divergence_counts_from_there_on(source: ToyRun, change: str) -> None:
    fork = forked(source, 2, change)
    coefficients = [record.next_kl_coef for record in source.records()]
    assert [record.next_kl_coef for record in fork.records()] == [*coefficients[:2], 0.5]
    assert coefficients[2] != 0.5
    assert forked_again(source).records()[-1].next_kl_coef == coefficients[2]


def test_with_another_reward_the_moments_of_its_scores_begin_anew(source: ToyRun) -> None:
    def counted(run: ToyRun) -> list[float]:
        """The iterations that the toy engine counts in what is carried, of each but the start."""
        return [record.carried()["compute_advantages"]["iterations"] for record in run.records()[1:]]

    fork, other = forked(source, 2, "reward={sources: [{kind: exact_match}]}"), forked_again(source)
    for run in (fork, other):
        go_on(run)
    assert (counted(fork), counted(other)) == ([1, 2, 1, 2], [1, 2, 3, 4])
    fork_run(fork.name, 1, "third", [])  # a record of the first reward, in a run that has the second
    third = ToyRun(source.home, name="third", engines=source.engines)
    go_on(third)
    assert counted(third) == [1, 1, 2, 3]


def forked_again(source: ToyRun) -> ToyRun:
    """Another fork from there, with another setting."""
    fork_run(source.name, 2, "other", ["update.learning_rate=0.01"])
    return ToyRun(source.home, name="other", engines=source.engines)


def test_with_no_other_setting_it_repeats_the_run(source: ToyRun) -> None:
    fork = forked(source, 1)
    go_on(fork)
    assert digests(fork.records()) == digests(source.records())
    assert set(source.engines.done) <= {"describe_sources"}


@pytest.mark.parametrize(
    ("run", "iteration", "new", "overrides", "message"),
    [
        ("toy", 2, "new", ["model.dtype=bfloat16", "training.zero_stage=1"], "model.dtype: 'float32' -> 'bfloat16'"),
        ("toy", 2, "new", ["sft.num_steps=60"], "sft.num_steps: 50 -> 60"),
        (
            "toy",
            2,
            "new",
            ["algorithm.kind=rloo", "rollout.samples_per_prompt=2"],
            "algorithm.kind: 'ppo' -> 'rloo'",
        ),
        ("toy", 2, "new", ["sft=null"], "these keys cannot change: sft: "),
        ("toy", 9, "new", [], "run toy has no iteration 9: it has 0..4"),
        ("nobody", 2, "new", [], "there is no run nobody"),
        ("toy", 2, "new", ["iterations=1"], "iterations=1 leaves nothing to do after toy@2, .*: --set iterations=3 or"),
        ("toy", 2, "new", ["iterations=2"], "iterations=2 leaves nothing"),
        ("toy", 4, "new", [], "iterations=4 leaves nothing to do after toy@4"),
        ("toy", 2, "toy", [], "run toy exists already: choose another name"),
    ],
)
def test_what_cannot_be_forked_is_refused_and_leaves_nothing(
    run: str, iteration: int, new: str, overrides: list[str], message: str, source: ToyRun
) -> None:
    before = snapshot(source.home / "store")
    with pytest.raises(InputError, match=message):
        fork_run(run, iteration, new, overrides)
    assert snapshot(source.home / "store") == before


def test_a_name_of_a_run_that_was_ended_before_its_first_record_is_told_from_one_of_a_run(source: ToyRun) -> None:
    acquire_lease(source.home / "store", "new").release()
    with pytest.raises(InputError, match=r"run new has no record, but its name is taken: .* remove runs/new from"):
        forked(source, 2)
    shutil.rmtree(source.home / "store/runs/new")
    assert len(forked(source, 2).records()) == 3


def test_a_taken_name_is_refused_before_anything_is_checked(source: ToyRun) -> None:
    assert fork_spec("toy", 2, "new", ["seed=5"]).seed == 5
    with pytest.raises(InputError, match="run toy exists already: choose another name"):
        fork_spec("toy", 2, "toy", [])
    lease = acquire_lease(source.home / "store", "new")
    with pytest.raises(InputError, match=r"run new: process \d+ .* has it, .*; or choose another name"):
        fork_spec("toy", 2, "new", [])
    told = CliRunner().invoke(app, ["fork", "toy@2", "new"])
    lease.release()
    assert told.exit_code == 2
    assert "or choose another name" in told.stderr
    assert "checking" not in told.output


def test_a_name_that_leaves_the_store_is_refused(source: ToyRun) -> None:
    with pytest.raises(InvalidRunName):
        fork_run("toy", 2, "../evil", [])


@pytest.mark.parametrize("place", ["toy", "toy@", "@3", "toy@two", "toy@-1", ""])
def test_a_place_is_a_run_and_an_iteration(place: str) -> None:
    assert parse_place("my@run@12") == ("my@run", 12)
    with pytest.raises(InputError, match="write RUN@ITERATION"):
        parse_place(place)


def test_an_iteration_that_is_not_kept_is_refused(source: ToyRun) -> None:
    gone = source.records()[1].checkpoint
    lose_it(source.place(gone))
    told = f"iteration 1 of run toy cannot be continued from: its checkpoint {gone.key} is not kept"
    with pytest.raises(InputError, match=told):
        forked(source, 1)
    assert not (source.home / "store" / "runs" / "new").exists()
    forked(source, 2)


def test_the_next_iteration_of_a_fork_is_its_own(source: ToyRun) -> None:
    fork = forked(source, 2, "dataset.max_prompt_tokens=17", "seed=5")
    go_on(fork)
    old, new = source.records(), fork.records()
    assert new[2].dataset == old[2].dataset
    assert new[3].dataset.digest != old[3].dataset.digest
    assert (new[3].position, new[3].changed) == (old[3].position, {})


@pytest.mark.parametrize("iteration", [0, 2])
def test_what_it_shares_is_made_again_with_the_settings_of_the_first_run(iteration: int, source: ToyRun) -> None:
    ref = source.records()[iteration].checkpoint
    settings = ("seed=5", "dataset.max_prompt_tokens=17", "reward.function=reward.py:other", "update.eps=0.5")
    fork = forked(source, 2, *settings)
    flip_a_bit(fork.place(ref))
    context = fork.context(spec=spec_of_run("new"))
    found = last_resumable_record(context, fork.console())
    assert found is not None
    assert found.iteration == 2
    context.store.fetch(ref.bare())
    assert f"checkpoint of iteration {iteration} is undamaged again, with the same digest" in fork.said


def test_a_fork_of_a_fork_goes_on(source: ToyRun) -> None:
    fork = forked(source, 2, "update.eps=0.5")
    go_on(fork)
    fork_run("new", 3, "newest", ["update.eps=0.25"])
    newest = ToyRun(source.home, name="newest", engines=source.engines)
    go_on(newest)
    assert digests(newest.records())[:4] == digests(fork.records())[:4]
    assert digests(newest.records())[4][3] != digests(fork.records())[4][3]
    assert [record.forked_from for record in newest.records()] == ["new@3"] * 4 + [None]


@pytest.mark.parametrize(("folder", "overrides"), [("moved/spec", []), (None, ["folder=moved/spec"])])
def test_its_folder_is_the_same_one_from_anywhere(
    source: ToyRun, folder: str | None, overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its records, which nobody changes any more, say where it is, and not from where it was named."""
    monkeypatch.chdir(tmp_path)
    fork_run(source.name, 2, "new", overrides, folder)
    first = ToyRun(source.home, name="new").records()[0].spec
    assert first is not None
    assert first["folder"] == spec_of_run("new").folder == str(tmp_path / "moved" / "spec")
