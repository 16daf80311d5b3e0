"""Verify: an honest run passes, and whatever is not as recorded is named by the first stage that differs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from flows.verify import VerifyReport, told, verify_iterations
from infra.artifacts import ArtifactCorrupted
from infra.artifacts.local_store import LocalStore
from infra.artifacts.overlay_store import OverlayStore
from infra.backend import open_records
from infra.settings import Settings
from ppo_core.records import InputError
from ppo_core.spec import RunSpec
from tasks.runs.fork import fork_run
from tasks.runs.run_state import recorded_spec, spec_of_run
from tasks.runs.verification import Comparison, chosen_iterations, require_verifiable
from tasks.stages.context import RunContext
from tasks.stages.engines import PROGRAMS
from tasks.stages.references import StageRef
from tests.tasks.run_contexts import ignore
from tests.tasks.toy_engines import ToyEngines, better_each_time
from tests.tasks.toy_runs import ToyRun, flip_a_bit, lose_it, snapshot, with_artifact
from tests.tasks.toy_tracker import ToyTracker

pytestmark = pytest.mark.usefixtures("prefect_server")
STAGES = ("prepare_dataset", "generate_rollouts", "score_rollouts", "compute_advantages", "update_policy")
SHORT = ("iterations=3", "evaluation.every=2")


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> ToyRun:
    """A finished run."""
    run = ToyRun(tmp_path_factory.mktemp("honest") / "home", SHORT)
    run.train()
    return run


def verify(
    run: ToyRun, scratch: Path, wanted: str | None = None, engines: ToyEngines | None = None
) -> list[Comparison]:
    """What `flows.verify.verify` finds, with engines of our own: all comparisons up to the first that differs."""
    records = open_records(run.home / "store", run.name)
    spec = recorded_spec(records)
    assert spec is not None
    engines = engines or ToyEngines(run.engines.measures)
    engines.serve(spec)
    context = RunContext(
        spec=spec,
        run=run.name,
        settings=Settings(home=scratch, store=str(run.home / "store")),
        store=OverlayStore(LocalStore(scratch / "store"), LocalStore(run.home / "store")),
        records=records,
        engines=engines,
        tracker=ToyTracker(),
        on_progress=ignore,
        fingerprints=dict.fromkeys(PROGRAMS, "toy"),
    )
    return list(verify_iterations(context, chosen_iterations(records, wanted)))


def first_difference(found: list[Comparison]) -> tuple[int, str]:
    """Where it is; all before it are the same."""
    assert [comparison.same for comparison in found] == [True] * (len(found) - 1) + [False]
    return found[-1].iteration, found[-1].stage


@pytest.mark.parametrize(
    ("found", "name", "message"),
    [
        ("aa", "Completed", r"all 2 stages reproduced the recorded bytes"),
        ("bb", "Differs", r"iteration 2, stage score"),
    ],
)
def test_prefect_is_told_the_verdict(found: str, name: str, message: str) -> None:
    """A deployment has no exit status: the state says it, and whoever calls the flow gets the report."""
    same = Comparison(iteration=1, stage="generate", recorded="aa", found="aa")
    report = VerifyReport(
        run="toy", comparisons=[same, Comparison(iteration=2, stage="score", recorded="aa", found=found)]
    )
    state: Any = told(report)
    assert (state.type.value, state.name, state.data) == ("COMPLETED", name, report)
    assert re.match(message, state.message)


def test_what_it_starts_from_must_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PPOFLOW_HOME", str(tmp_path))
    monkeypatch.delenv("PPOFLOW_STORE", raising=False)
    run = ToyRun(tmp_path, ("iterations=4", "evaluation.every=2", "checkpoint.keep_last=1"))
    run.engines.jobs["score_evaluation"] = better_each_time()
    run.train()
    expected = r"iteration 3 of run toy starts from the checkpoint of iteration 2, which is not kept .*: verify an"
    with pytest.raises(InputError, match=expected):
        require_verifiable("toy", "3..4", None)
    require_verifiable("toy", "1", None)
    require_verifiable("toy", None, None)


def test_a_run_that_sampled_until_prompts_had_a_signal_passes(tmp_path: Path) -> None:
    dynamic = ("algorithm.kind=rloo", "rollout.samples_per_prompt=2", "rollout.dynamic_sampling.max_batches=3")
    run = ToyRun(tmp_path / "home", (*SHORT, *dynamic))
    run.train()
    assert run.records()[-1].position > 3 * 32
    found = verify(run, tmp_path / "scratch")
    assert {comparison.stage for comparison in found} >= set(STAGES)
    assert all(comparison.same for comparison in found)


def test_an_honest_run_passes_and_nothing_of_it_is_touched(honest: ToyRun, tmp_path: Path) -> None:
    before = snapshot(honest.home)
    engines = ToyEngines()
    found = verify(honest, tmp_path, engines=engines)
    assert all(comparison.same for comparison in found)
    assert [(comparison.iteration, comparison.stage) for comparison in found] == [
        *((0, stage) for stage in ("prepare_dataset", "finetune_policy", "start_policy", "evaluate_policy")),
        *((1, stage) for stage in STAGES),
        *((2, stage) for stage in (*STAGES, "evaluate_policy")),
        *((3, stage) for stage in (*STAGES, "evaluate_policy")),
    ]
    assert snapshot(honest.home) == before
    assert engines.count("update_policy") == 3  # nothing came from the run's store


def test_a_range_of_iterations_is_made_again_alone(honest: ToyRun, tmp_path: Path) -> None:
    engines = ToyEngines()
    assert {comparison.iteration for comparison in verify(honest, tmp_path, "2..3", engines)} == {2, 3}
    assert (engines.count("start_policy"), engines.count("update_policy")) == (0, 2)


@pytest.mark.parametrize("wanted", ["4", "-1", "2..9", "3..2", "two", "..", "1...2", "2.."])
def test_iterations_that_the_run_does_not_have_are_refused(wanted: str, honest: ToyRun) -> None:
    with pytest.raises(InputError, match=r"run toy has 0\.\.3|write FIRST\.\.LAST"):
        chosen_iterations(open_records(honest.home / "store", "toy"), wanted)


@pytest.mark.parametrize(("wanted", "place"), [(None, (0, "finetune_policy")), ("2", (2, "generate_rollouts"))])
def test_a_run_recorded_with_another_seed_fails(
    wanted: str | None, place: tuple[int, str], honest: ToyRun, tmp_path: Path
) -> None:
    run = honest.copy(tmp_path / "copy")
    run.rewrite("spec.json", lambda spec: spec | {"seed": 7})
    assert first_difference(verify(run, tmp_path / "scratch", wanted)) == place


@pytest.mark.parametrize("stage", [*STAGES, "evaluate_policy"])
def test_a_record_that_names_another_artifact_fails_there(stage: str, honest: ToyRun, tmp_path: Path) -> None:
    run = honest.copy(tmp_path / "copy")
    others = ToyRun(run.home, (*SHORT, "seed=7", "dataset.max_prompt_tokens=17"), name="other")
    other = others.train()[2]
    if stage == "prepare_dataset":
        run.forge(2, dataset=other.model_dump(mode="json")["dataset"])
    else:
        run.rewrite("iterations/000002.json", lambda record: with_artifact(record, stage, other.artifacts[stage]))
    assert first_difference(verify(run, tmp_path / "scratch", "2")) == (2, stage)


def test_a_record_that_tells_another_kl_coefficient_fails_in_the_next_iteration(honest: ToyRun, tmp_path: Path) -> None:
    run = honest.copy(tmp_path / "copy")
    run.forge(1, next_kl_coef=0.02)
    assert first_difference(verify(run, tmp_path / "scratch")) == (2, "compute_advantages")


@pytest.mark.parametrize(
    ("job", "place"),
    [
        ("prepare_dataset", (0, "prepare_dataset")),
        ("finetune_policy", (0, "finetune_policy")),
        ("start_policy", (0, "start_policy")),
        ("generate_rollouts", (0, "evaluate_policy")),
        ("score_rollouts", (1, "score_rollouts")),
        ("compute_advantages", (1, "compute_advantages")),
        ("update_policy", (1, "update_policy")),
        ("score_evaluation", (0, "evaluate_policy")),
    ],
)
def test_an_engine_that_computes_otherwise_is_found_at_its_stage(
    job: str, place: tuple[int, str], honest: ToyRun, tmp_path: Path
) -> None:
    assert first_difference(verify(honest, tmp_path, engines=ToyEngines(**{job: "another machine"}))) == place


@pytest.mark.parametrize("part", ["dataset", "rollouts", "scores", "experience", "checkpoint", "evaluation"])
def test_what_the_store_has_of_an_iteration_must_be_what_was_recorded(
    part: str, honest: ToyRun, tmp_path: Path
) -> None:
    run = honest.copy(tmp_path / "copy")
    last = run.records()[3]
    parts: dict[str, StageRef | None] = {
        "dataset": last.dataset,
        "rollouts": last.made("rollouts"),
        "scores": last.made("scores"),
        "experience": last.made("experience"),
        "checkpoint": last.checkpoint,
        "evaluation": last.evaluation,
    }
    ref = parts[part]
    assert ref is not None
    flip_a_bit(run.place(ref))
    with pytest.raises(ArtifactCorrupted, match=f"artifact {part}/{ref.key}: file .*: expected sha256"):
        verify(run, tmp_path / "scratch", "3")


def test_what_retention_has_removed_is_made_again_and_compared(honest: ToyRun, tmp_path: Path) -> None:
    run = honest.copy(tmp_path / "copy")
    last = run.records()[3]
    assert last.made("experience") is not None
    for ref in (last.made("experience"), last.checkpoint):
        lose_it(run.place(ref))
    found = verify(run, tmp_path / "scratch", "3")
    assert [comparison.same for comparison in found] == [True] * 6


def test_thin_checkpoints_pass(tmp_path: Path) -> None:
    run = ToyRun(tmp_path / "home", ("iterations=5", "checkpoint.every=3", "evaluation.every=5"))
    assert [record.checkpoint.full for record in run.train()] == [True, False, False, True, False, True]
    assert all(comparison.same for comparison in verify(run, tmp_path / "all"))
    assert all(comparison.same for comparison in verify(run, tmp_path / "thin", "5"))


def test_a_run_that_was_rolled_back_passes(tmp_path: Path) -> None:
    def diverges(iteration: int, rate_factor: float) -> Mapping[str, float]:
        return {"kl/reference": 9.0 if (iteration, rate_factor) == (3, 1.0) else 1.0}

    run = ToyRun(tmp_path / "home", (*SHORT, "guards.max_kl=5", "guards.on_divergence=rollback"))
    run.engines.measures = diverges
    assert [record.attempt for record in run.train()] == [0, 0, 1, 1]
    assert all(comparison.same for comparison in verify(run, tmp_path / "scratch"))


def test_a_run_that_went_on_with_other_settings_passes(honest: ToyRun, tmp_path: Path) -> None:
    run = honest.copy(tmp_path / "copy")
    records = run.train("iterations=5", "guards.max_skipped_steps=9", "training.microbatch_size=8")
    assert records[5].changed == {"iterations": 5, "guards.max_skipped_steps": 9, "training.microbatch_size": 8}
    assert all(comparison.same for comparison in verify(run, tmp_path / "scratch"))
    run.forge(5, changed={"iterations": 5, "guards.max_skipped_steps": 9})
    assert first_difference(verify(run, tmp_path / "forged")) == (5, "compute_advantages")


def test_iterations_are_made_again_on_as_many_ranks_as_they_were_made_on(honest: ToyRun, tmp_path: Path) -> None:
    run = honest.copy(tmp_path / "copy")
    run.train("iterations=5", "training.num_ranks=2")
    engines = ToyEngines()
    assert all(comparison.same for comparison in verify(run, tmp_path / "scratch", engines=engines))
    assert engines.ranks == [1, 2]


def test_a_fork_passes_before_and_after_its_first_iteration(
    honest: ToyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = honest.copy(tmp_path / "home")
    source.train("iterations=4", "training.microbatch_size=8")
    monkeypatch.setenv("PPOFLOW_HOME", str(source.home))
    settings = ["seed=5", "reward.function=reward.py:other", "update.learning_rate=0.01", "iterations=5"]
    fork_run("toy", 4, "new", [*settings, "dataset.max_prompt_tokens=17"])
    fork = ToyRun(source.home, name="new")
    spec: RunSpec = spec_of_run("new")
    fork.train(spec=spec)
    found = verify(fork, tmp_path / "scratch")
    assert [comparison for comparison in found if not comparison.same] == []
    assert {comparison.iteration for comparison in found} == {0, 1, 2, 3, 4, 5}
