"""Cache keys: a stage's key changes with everything it reads, and with nothing else. And which failures are retried."""

from __future__ import annotations

from pathlib import Path

import pytest
from prefect.client.schemas.objects import State
from prefect.states import Failed

from infra.engine_protocol import EngineDied, EngineInput, EngineJobError
from infra.lease import LeaseLost
from infra.manifest import ArtifactCorrupted, ArtifactMissing
from infra.runs import RecordExists
from ppo_core.records import InputError, ScoreJob
from tasks.references import RolloutsRef, StageRef
from tasks.stage import Work, key_of, may_help_again, run_name
from tests.tasks.benches import smoke_spec, workbench


def test_a_run_of_a_stage_is_called_by_its_iteration(tmp_path: Path) -> None:
    bench = workbench(smoke_spec(), tmp_path)
    bench.timings.iteration = 12
    assert run_name("update_policy", {"bench": bench, "iteration": 12}) == "update_policy-12"
    assert run_name("show_garbage", {"removed": False}) == "show_garbage"


def rollouts(digest: str, uri: str = "file:///a/rollouts/k") -> StageRef:
    """A reference of the same kind wherever the store lies."""
    return RolloutsRef(kind="rollouts", uri=uri, digest=digest, num_responses=1, num_response_tokens=1)


def work(ref: StageRef, sources: str = "s", split: str = "train") -> Work:
    """A scoring stage."""
    job = ScoreJob(reward=smoke_spec().reward, answer_column="answer", split=split)
    paths = {"sources": EngineInput(Path("/somewhere"), sources)}
    return Work("score_rollouts", "scores", "scoring", "score_rollouts", job, {"rollouts": ref}, paths)


def test_the_key_changes_with_inputs_code_and_spec_and_not_with_places(tmp_path: Path) -> None:
    bench = workbench(smoke_spec(), tmp_path)
    key = key_of(bench, work(rollouts("1")))
    assert key_of(bench, work(rollouts("1", uri="file:///elsewhere/rollouts/k"))) == key
    others = {
        key_of(bench, work(rollouts("2"))),
        key_of(bench, work(rollouts("1"), sources="t")),
        key_of(bench, work(rollouts("1"), split="eval")),
    }
    assert len(others | {key}) == 4
    bench.fingerprints["scoring"] = "other code"
    assert key_of(bench, work(rollouts("1"))) not in others | {key}


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
