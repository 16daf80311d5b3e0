"""The training engine with values from the policy itself, by one rank; what training_program runs as shared/NAME."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ppo_core.data.tables import write_rollouts, write_scores
from ppo_core.processes.ranks import Ranks
from ppo_core.records import (
    ComputeAdvantagesJob,
    OptimizerSettings,
    RolloutRow,
    ScoreRow,
    StartPolicyJob,
    UpdatePolicyJob,
)
from ppo_core.spec import AdvantageSpec, PpoSharedSpec
from ppo_core.training.checkpoint import write_checkpoint
from ppo_core.training.learner import Learner
from ppo_core.training.service import TrainingEngine
from ppo_core.training.update import Update
from tests.ppo_core.tiny_models import EOS
from tests.ppo_core.training.programs.deepspeed_program import Facts, load, make_start, silent
from tests.ppo_core.training.programs.replay_program import Run, do, experiences, given, jobs_like
from tests.ppo_core.training.update_cases import make_experience, update_job

CASES = {"stage0-float32": (0, "float32"), "stage2-bfloat16": (2, "bfloat16"), "stage3-float32": (3, "float32")}
ALGORITHM = PpoSharedSpec(value_coef=0.25)
UPDATE: dict[str, Any] = {"num_ppo_epochs": 3, "value_clip": 0.05, "entropy_coef": 0.05, "max_grad_norm": 0.5}


def shared(job: UpdatePolicyJob) -> UpdatePolicyJob:
    return job.model_copy(update={"algorithm": ALGORITHM})


def start_of(root: Path, ranks: Ranks, dtype: str, name: str = "llama-tied") -> Path:
    """Checkpoint 0 as the engine makes it of a model's folder."""
    model, start = make_start(root, name, dtype, ranks) / "policy", root / f"begun-{name}-{dtype}"
    spec = StartPolicyJob(seed=1, model=update_job(dtype=dtype).model, algorithm=ALGORITHM)
    if not start.exists():
        do(TrainingEngine(ranks), "start_policy", given(tokenizer=model, model=model), start, spec, [])
    return start


def runs(root: Path, ranks: Ranks) -> Facts:
    """Four updates, all in full and policy-only ones between; and advantages of the third, full and policy-only."""
    facts: Facts = {}
    rows = [RolloutRow("p", i, [3, 4], [5, 6 + i, EOS], "w5", [-1.0] * 3, "stop") for i in range(4)]
    write_rollouts(root / "rollouts.parquet", rows)
    scores = [ScoreRow("p", i, i + 0.5, {"f": 1.0}, False, None, {0: float(i), 1: 0.5}) for i in range(4)]
    write_scores(root / "scores.parquet", scores)
    for case, (stage, dtype) in CASES.items():
        start = start_of(root, ranks, dtype)
        settings: dict[str, Any] = {"zero_stage": stage, "dtype": dtype, "num_minibatches": 2, "learning_rate": 1e-2}
        jobs = [shared(job) for job in jobs_like({}, {}, {}, {}, **settings)]
        run = Run(root / case, ranks, start, jobs, experiences())
        facts[case] = {**run.warm(), **run.sparse("full4-cold")}
        spec = ComputeAdvantagesJob(
            model=jobs[0].model,
            algorithm=ALGORITHM,
            temperature=1.0,
            max_response_tokens=3,
            advantages=AdvantageSpec(whiten=False),
            training=jobs[0].training,
            optimizer=OptimizerSettings.of(jobs[0].update),
            kl_coef=0.0,
        )
        for name, origin in {"full3": {}, "thin3": run.origin()}.items():
            engine = TrainingEngine(ranks)
            inputs = given(checkpoint=run.root / name, reference=start, rollouts=root, scores=root, **origin)
            facts[case][name] = do(engine, "compute_advantages", inputs, run.root / f"of-{name}", spec, [])
            engine.learner.forget()
    return facts


def updates(root: Path, ranks: Ranks) -> Facts:
    """Three steps on the whole batch; of packed rows and of padded ones."""
    facts: Facts = {}
    for packed in (True, False):
        learner, job = Learner(ranks), shared(update_job(**UPDATE))
        networks = load(learner, start_of(root, ranks, "float32"), job)
        if not packed:
            networks["policy"].module.takes_packed_rows = False
        name = "packed" if packed else "padded"
        facts[name] = Update(networks, make_experience(), job, ranks).run(silent)
        write_checkpoint(root / name, networks, learner.tokenizer, ranks, identity=name)
        learner.forget()
    return facts


SCENARIOS: dict[str, Callable[[Path, Ranks], Facts]] = {"runs": runs, "updates": updates}
