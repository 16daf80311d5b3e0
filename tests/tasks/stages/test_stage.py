"""Cache keys: a stage's key changes with everything it reads, and with nothing else. And which failures are retried."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import pytest
from prefect.client.schemas.objects import State
from prefect.states import Failed

from infra.artifacts.manifest import ArtifactCorrupted, ArtifactMissing
from infra.engines.protocol import EngineDied, EngineInput, EngineJobError
from infra.runs.lease import LeaseLost
from infra.runs.records import RecordExists
from ppo_core.records import InputError, ScoreJob
from tasks.stages.context import RunContext
from tasks.stages.references import CheckpointRef, DatasetRef, EvaluationRef, ModelRef, RolloutsRef, ScoresRef, StageRef
from tasks.stages.stage import StageSpec, completed, key_of, may_help_again, run_name, stage
from tasks.stages.table import SCORE_ROLLOUTS
from tests.tasks.run_contexts import run_context, smoke_spec

PLACE = {"kind": "anything", "uri": "file:///a/anything/k", "digest": "0"}


def test_a_run_of_a_stage_is_called_by_its_iteration(tmp_path: Path) -> None:
    context = run_context(smoke_spec(), tmp_path)
    context.timings.iteration = 12
    assert run_name("update_policy", {"context": context, "iteration": 12}) == "update_policy-12"
    assert run_name("show_garbage", {"removed": False}) == "show_garbage"


def test_a_plain_call_gives_the_result_and_prefect_what_came_out(
    prefect_server: None, caplog: pytest.LogCaptureFixture
) -> None:
    made = rollouts("1")

    @stage("say")
    def say() -> StageRef:
        return completed(made, made.in_words())

    assert say() == made
    assert say.fn() == made
    assert "Finished in state Completed('1 responses, 1 tokens')" in caplog.text


def test_prefect_does_not_search_the_context(prefect_server: None, tmp_path: Path) -> None:
    class Unread(dict[int, dict[str, float]]):
        def items(self) -> NoReturn:
            raise AssertionError("a run's metrics grow with its iterations, and were searched at a stage")

    context = run_context(smoke_spec(), tmp_path)
    context.reporting.metrics = Unread()

    @stage("say")
    def say(context: RunContext, *, again: RunContext) -> list[RunContext]:
        return [context, again]

    assert all(given is context for given in say(context, again=context))


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (ScoresRef(**PLACE, metrics={"score/mean": 1.04, "score/unscored": 0.0}), "mean 1.040, unscored 0"),
        (RolloutsRef(**PLACE, num_responses=256, num_response_tokens=7312), "256 responses, 7,312 tokens"),
        (ModelRef(**PLACE, losses=(5.0, 2.0, 0.5)), "loss 5.000 to 0.500 in 3 supervised steps"),
        (CheckpointRef(**PLACE, metrics={"policy/entropy": 0.5}), "entropy 0.500"),
        (CheckpointRef(**PLACE), "the policy to start from"),
        (DatasetRef(**PLACE, counts={"train": 8192, "eval": 0}), "8,192 rows to train on"),
        (EvaluationRef(**PLACE, metrics={"evaluation/accuracy": 0.5}), "accuracy 0.500"),
        (StageRef(**PLACE), "anything"),
    ],
)
def test_a_reference_says_what_came_out(made: StageRef, words: str) -> None:
    assert made.in_words() == words


def rollouts(digest: str, uri: str = "file:///a/rollouts/k") -> StageRef:
    """A reference of the same kind wherever the store lies."""
    return RolloutsRef(kind="rollouts", uri=uri, digest=digest, num_responses=1, num_response_tokens=1)


def work(ref: StageRef, sources: str = "s", split: str = "train") -> StageSpec:
    """A scoring stage."""
    job = ScoreJob(reward=smoke_spec().reward, answer_column="answer", split=split)
    paths = {"sources": EngineInput(Path("/somewhere"), sources)}
    return StageSpec(SCORE_ROLLOUTS, job, {"rollouts": ref}, paths)


def test_the_key_changes_with_inputs_code_and_spec_and_not_with_places(tmp_path: Path) -> None:
    context = run_context(smoke_spec(), tmp_path)
    key = key_of(context, work(rollouts("1")))
    assert key_of(context, work(rollouts("1", uri="file:///elsewhere/rollouts/k"))) == key
    others = {
        key_of(context, work(rollouts("2"))),
        key_of(context, work(rollouts("1"), sources="t")),
        key_of(context, work(rollouts("1"), split="eval")),
    }
    assert len(others | {key}) == 4
    context.fingerprints["scoring"] = "other code"
    assert key_of(context, work(rollouts("1"))) not in others | {key}


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (EngineDied("killed"), True),
        (EngineJobError("flaky judge", retryable=True), True),
        (EngineJobError("refused"), False),
        (InputError("no such column"), False),
        (ValueError("bad value"), False),
        (OSError("disk"), True),
        (ArtifactCorrupted("damaged"), False),
        (ArtifactMissing("gone"), False),
        (RecordExists("of something else"), False),
        (LeaseLost("another process has the run"), False),
    ],
)
def test_only_what_may_pass_is_tried_again(error: Exception, again: bool) -> None:
    state: State[None] = Failed(data=error)
    assert may_help_again(None, None, state) is again
