"""A committed record made by hand."""

from __future__ import annotations

from tasks.runs.iteration_record import Best, IterationRecord
from tasks.stages.references import CheckpointRef, DatasetRef, EvaluationRef, StageRef


def record(
    iteration: int, metrics: dict[str, float], samples: list[dict[str, object]] | None = None
) -> IterationRecord:
    """A record with these metrics; with `samples` also an evaluation."""
    place = {"uri": "file:///store/checkpoint/aa", "digest": "0" * 64}
    checkpoint = CheckpointRef(kind="checkpoint", **place)
    artifacts: dict[str, StageRef] = {"update_policy": checkpoint}
    if samples is not None:
        artifacts["evaluate_policy"] = EvaluationRef(kind="evaluation", samples=samples, **place)
    return IterationRecord(
        run="r",
        iteration=iteration,
        spec_digest="1" * 64,
        dataset=DatasetRef(kind="dataset", counts={"train": 10}, **place),
        reference=checkpoint,
        artifacts=artifacts,
        metrics={"seconds/iteration": 30.0, **metrics},
        position=0,
        epoch=0,
        index=0,
        next_kl_coef=0.01,
        best=Best(metric="evaluation/score", iteration=iteration, value=None, checkpoint=checkpoint),
        committed_at_ms=1,
    )
