"""The stages of a run, as one table: what each makes, by which engine, and of what.

    before     download_source, for each name of the Hugging Face hub (`tasks.stages.download_source`)
    start      prepare_dataset ─► finetune_policy (where the spec has `sft`) ─► start_policy ─► evaluate_policy
    iteration  generate_rollouts ─► score_rollouts ─► compute_advantages ─► update_policy ─► evaluate_policy

Running, re-running, verifying and repairing an iteration, its record, lineage, retention and garbage collection all
read it; a stage that is added here, with a task of its name, is known to all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tasks.stages.references import (
    CheckpointRef,
    DatasetRef,
    EvaluationRef,
    ExperienceRef,
    ModelRef,
    RolloutsRef,
    ScoresRef,
    StageRef,
)

PREVIOUS, SAMPLER, REFERENCE = "previous", "sampler", "reference"
"""Sources besides the kinds of what the iteration made: the checkpoint it started from, the one whose policy answers
(another one where sampling overlaps with updates), and the frozen start."""


@dataclass(frozen=True)
class StageDefinition:
    """One stage: its task's `name`, the `kind` of the artifact made, and the `job` that its `engine` does.

    `inputs` are the artifacts that the task is given, by the names of its arguments: each the kind of what an earlier
    stage made (None where that stage was left out), PREVIOUS, SAMPLER or REFERENCE. `facts` are its other
    arguments, known from the records. `label` is what the command line calls it. What is not `kept` for good goes when
    retention (checkpoint.keep_last) lets its iteration go.
    """

    name: str
    kind: str
    engine: str
    job: str
    made: type[StageRef]
    inputs: Mapping[str, str] = field(default_factory=dict)
    facts: tuple[str, ...] = ()
    label: str = ""
    kept: bool = True


PREPARE_DATASET = StageDefinition("prepare_dataset", "dataset", "scoring", "prepare_dataset", DatasetRef)
FINETUNE_POLICY = StageDefinition(
    "finetune_policy",
    "model",
    "training",
    "finetune_policy",
    ModelRef,
    inputs={"dataset": "dataset"},
    kept=False,
)
START_POLICY = StageDefinition(
    "start_policy",
    "checkpoint",
    "training",
    "start_policy",
    CheckpointRef,
    inputs={"dataset": "dataset", "model": "model"},
    kept=False,
)
GENERATE_ROLLOUTS = StageDefinition(
    "generate_rollouts",
    "rollouts",
    "rollout",
    "generate_rollouts",
    RolloutsRef,
    inputs={"checkpoint": SAMPLER, "dataset": "dataset"},
    facts=("iteration", "position", "attempt"),
    label="generate",
)
SCORE_ROLLOUTS = StageDefinition(
    "score_rollouts",
    "scores",
    "scoring",
    "score_rollouts",
    ScoresRef,
    inputs={"rollouts": "rollouts", "dataset": "dataset"},
    label="score",
)
COMPUTE_ADVANTAGES = StageDefinition(
    "compute_advantages",
    "experience",
    "training",
    "compute_advantages",
    ExperienceRef,
    inputs={"checkpoint": PREVIOUS, "reference": REFERENCE, "rollouts": "rollouts", "scores": "scores"},
    facts=("iteration", "kl_coef", "carried", "restoration"),
    label="advantages",
    kept=False,
)
UPDATE_POLICY = StageDefinition(
    "update_policy",
    "checkpoint",
    "training",
    "update_policy",
    CheckpointRef,
    inputs={"checkpoint": PREVIOUS, "reference": REFERENCE, "experience": "experience", "dataset": "dataset"},
    facts=("iteration", "carried", "rate_factor", "full", "restoration"),
    label="update",
    kept=False,
)
EVALUATE_POLICY = StageDefinition(
    "evaluate_policy",
    "evaluation",
    "scoring",
    "score_evaluation",
    EvaluationRef,
    inputs={"checkpoint": "checkpoint", "dataset": "dataset"},
    label="evaluate",
)

START = (FINETUNE_POLICY, START_POLICY, EVALUATE_POLICY)
"""What iteration 0 is made of, once the dataset is there."""
ITERATION = (GENERATE_ROLLOUTS, SCORE_ROLLOUTS, COMPUTE_ADVANTAGES, UPDATE_POLICY, EVALUATE_POLICY)
"""What each later one is made of."""
BY_NAME = {stage.name: stage for stage in (PREPARE_DATASET, *START, *ITERATION)}


def stages_of(iteration: int) -> tuple[StageDefinition, ...]:
    """The stages of an iteration, in the order of making."""
    return START if iteration == 0 else ITERATION
