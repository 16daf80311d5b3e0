"""The training engine with an algorithm that has no critic, by one rank; what training_program runs as rloo/NAME."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from ppo_core.data.tables import write_rollouts, write_scores
from ppo_core.processes.protocol import Job
from ppo_core.processes.ranks import Ranks
from ppo_core.records import (
    FORGET,
    ComputeAdvantagesJob,
    OptimizerSettings,
    RolloutRow,
    ScoreRow,
    StartPolicyJob,
    UpdatePolicyJob,
)
from ppo_core.spec import AdvantageSpec, RlooSpec
from ppo_core.training.checkpoint import full_weights
from ppo_core.training.experience import Experience
from ppo_core.training.learner import Learner
from ppo_core.training.service import TrainingEngine
from ppo_core.training.update import Update
from tests.ppo_core.training.programs.deepspeed_program import RECIPES, Facts, load, make_start, silent
from tests.ppo_core.training.programs.replay_program import Run, do, experiences, given, jobs_like
from tests.ppo_core.training.update_cases import make_experience, update_job

CASES = {"stage0-float32": (0, "float32"), "stage2-bfloat16": (2, "bfloat16")}


def rloo(job: UpdatePolicyJob) -> UpdatePolicyJob:
    return job.model_copy(update={"algorithm": RlooSpec()})


def without_values(experience: Experience) -> Experience:
    return replace(experience, values=None, returns=None)


def start_of(root: Path, ranks: Ranks, dtype: str) -> Path:
    """Checkpoint 0 as the engine makes it of a model's folder."""
    model = make_start(root, "llama-tied", dtype, ranks) / "policy"
    job = rloo(update_job(dtype=dtype))
    spec = StartPolicyJob(seed=1, model=job.model, algorithm=job.algorithm)
    start = root / f"begun-{dtype}"
    if not start.exists():
        do(TrainingEngine(ranks), "start_policy", given(tokenizer=model, model=model), start, spec, [])
    return start


def runs(root: Path, ranks: Ranks) -> Facts:
    """Four updates, all in full and policy-only ones between; and advantages from one of each kind."""
    facts: Facts = {}
    rows = [RolloutRow("p", i, [3, 4], [5, 6 + i, 1], "w5", [-1.0] * 3, "stop") for i in range(4)]
    write_rollouts(root / "rollouts.parquet", rows)
    write_scores(root / "scores.parquet", [ScoreRow("p", i, float(i), {"f": 1.0}, False, None) for i in range(4)])
    for case, (stage, dtype) in CASES.items():
        start = start_of(root, ranks, dtype)
        jobs = [rloo(job) for job in jobs_like({}, {}, {}, {}, zero_stage=stage, dtype=dtype, num_minibatches=2)]
        run = Run(root / case, ranks, start, jobs, [without_values(one) for one in experiences()])
        facts[case] = {**run.warm(), **run.sparse("full4-cold")}
        spec = ComputeAdvantagesJob(
            model=jobs[0].model,
            algorithm=jobs[0].algorithm,
            temperature=1.0,
            advantages=AdvantageSpec(whiten=False),
            max_response_tokens=3,
            training=jobs[0].training,
            optimizer=OptimizerSettings.of(jobs[0].update),
            kl_coef=0.0,
        )
        for name, origin in {"full3": {}, "thin3": run.origin()}.items():
            engine = TrainingEngine(ranks)
            inputs = given(checkpoint=run.root / name, reference=start, rollouts=root, scores=root, **origin)
            facts[case][name] = do(engine, "compute_advantages", inputs, run.root / f"advantages-{name}", spec, [])
            assert engine.learner.identity is not None
            engine.handlers[FORGET](Job(FORGET, {}, root, {}, silent))
            assert engine.learner.identity is None
    return facts


def updates(root: Path, ranks: Ranks) -> Facts:
    """The recipes of the other updates, as far as they do without a critic."""
    start, facts = start_of(root, ranks, "float32"), {}
    for index, recipe in enumerate(RECIPES):
        learner, job = Learner(ranks), rloo(update_job(**{k: v for k, v in recipe.items() if k != "value_clip"}))
        networks = load(learner, start, job)
        facts[f"recipe{index}"] = Update(networks, without_values(make_experience()), job, ranks).run(silent)
        save_file(full_weights(networks["policy"], ranks), root / f"recipe{index} policy.safetensors")
        learner.forget()
    return facts


def refusals(root: Path, ranks: Ranks) -> Facts:
    """A checkpoint for each of the two algorithms, full and policy-only, given to the other."""
    with_critic = make_start(root, "llama-tied", "float32", ranks)
    cases: dict[str, tuple[Path, Any]] = {
        "rloo from ppo": (with_critic, rloo),
        "ppo from rloo": (start_of(root, ranks, "float32"), lambda job: job),
        "ppo from thin rloo": (root / "stage0-float32/thin3", lambda job: job),
    }
    facts: Facts = {}
    for name, (start, made) in cases.items():
        run = Run(root / name, ranks, start, [made(update_job())], [make_experience()])
        facts[name] = run.update(TrainingEngine(ranks), 1, "end", start=start, full=True, notes=[])
    return facts


SCENARIOS: dict[str, Callable[[Path, Ranks], Facts]] = {
    scenario.__name__: scenario for scenario in (runs, updates, refusals)
}
