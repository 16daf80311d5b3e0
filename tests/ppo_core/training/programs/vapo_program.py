"""The training engine with correct responses as examples besides; what training_program runs as vapo/NAME."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ppo_core.processes.ranks import Ranks
from ppo_core.records import UpdatePolicyJob
from ppo_core.spec import VapoSpec
from ppo_core.training.experience import Experience
from tests.ppo_core.training.programs.deepspeed_program import Facts, make_start, updated
from tests.ppo_core.training.programs.replay_program import Run, experiences, jobs_like
from tests.ppo_core.training.update_cases import ROWS, make_experience, update_job

ALGORITHM = VapoSpec(lm_coef=0.5)
IMITATED = (1, 4, 6)
RECIPE: dict[str, Any] = {"num_ppo_epochs": 3, "entropy_coef": 0.05, "max_grad_norm": 0.5}
BY_RESPONSE: dict[str, Any] = {**RECIPE, "aggregation": "sequence_mean_token_mean", "importance_correction": "token"}
HALVES: dict[str, Any] = {"num_minibatches": 2, "learning_rate": 3e-4}
CASES = {"stage0-float32": (0, "float32"), "stage2-bfloat16": (2, "bfloat16")}


def imitating(job: UpdatePolicyJob, algorithm: VapoSpec = ALGORITHM) -> UpdatePolicyJob:
    return job.model_copy(update={"algorithm": algorithm})


def with_examples(experience: Experience, rows: tuple[int, ...] = IMITATED) -> Experience:
    """The same, of which these responses are imitated."""
    return replace(experience, imitated=torch.tensor([row in rows for row in range(ROWS)]))


def runs(root: Path, ranks: Ranks) -> Facts:
    """Four updates, all in full and policy-only ones between."""
    facts: Facts = {}
    for case, (stage, dtype) in CASES.items():
        start = make_start(root, "llama-tied", dtype, ranks)
        settings: dict[str, Any] = {"zero_stage": stage, "dtype": dtype, "num_minibatches": 2, "learning_rate": 1e-2}
        jobs = [imitating(job) for job in jobs_like({}, {}, {}, {}, **settings)]
        run = Run(root / case, ranks, start, jobs, [with_examples(one) for one in experiences()])
        facts[case] = {**run.warm(), **run.sparse("full4-cold")}
    return facts


def updates(root: Path, ranks: Ranks) -> Facts:
    """Updates that differ in one thing each, by however many ranks there are."""
    experience = with_examples(make_experience())
    cases: dict[str, tuple[Experience, UpdatePolicyJob]] = {
        "recipe": (experience, imitating(update_job(**RECIPE))),
        "by response": (experience, imitating(update_job(**BY_RESPONSE))),
        "without weight": (experience, imitating(update_job(**RECIPE), VapoSpec(lm_coef=0.0))),
        "nothing correct": (with_examples(experience, ()), imitating(update_job(**RECIPE))),
        "ppo": (make_experience(), update_job(**RECIPE)),
    }
    cases |= {
        f"microbatch{size}": (experience, imitating(update_job(**HALVES, microbatch_size=size))) for size in (1, 3, 8)
    }
    return updated(cases, root, make_start(root, "llama-tied", "float32", ranks), ranks, f"-{ranks.world_size}")


SCENARIOS: dict[str, Callable[[Path, Ranks], Facts]] = {"runs": runs, "updates": updates}
