"""The training engine with adapters, by one rank; what training_program runs as adapted/NAME."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

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
from ppo_core.spec import AdvantageSpec, LoraSpec
from ppo_core.training.checkpoint import write_checkpoint
from ppo_core.training.learner import Learner, LoadConfig
from ppo_core.training.service import TrainingEngine
from ppo_core.training.update import Update
from tests.ppo_core.tiny_models import EOS
from tests.ppo_core.training.programs.deepspeed_program import Facts, make_start, silent
from tests.ppo_core.training.programs.replay_program import Notes, Run, do, experiences, given, jobs_like
from tests.ppo_core.training.update_cases import make_experience, update_job

CASES = {"stage0-float32": (0, "float32"), "stage1-bfloat16": (1, "bfloat16"), "stage2-float32": (2, "float32")}
CASES |= {"stage3-float32": (3, "float32"), "stage3-bfloat16": (3, "bfloat16")}
SPECS = {
    "llama-tied": LoraSpec(rank=4, alpha=12.0, target_modules=("q_proj", "v_proj", "down_proj")),
    "gpt2": LoraSpec(rank=3, alpha=9.0),
}
UPDATE: dict[str, Any] = {"num_ppo_epochs": 4, "kl_loss_coef": 3.0, "weight_decay": 0.01}


def adapting(job: UpdatePolicyJob, name: str = "llama-tied") -> UpdatePolicyJob:
    return job.model_copy(update={"model": job.model.model_copy(update={"lora": SPECS[name]})})


def start_of(root: Path, ranks: Ranks, dtype: str, name: str = "llama-tied") -> Path:
    """Checkpoint 0 as the engine makes it of a model's folder."""
    start = root / f"begun-{name}-{dtype}"
    missing = not start.exists()
    model = make_start(root, name, dtype, ranks) / "policy"  # all ranks have looked once it returns
    spec = StartPolicyJob(seed=1, model=adapting(update_job(dtype=dtype), name).model)
    if missing:
        do(TrainingEngine(ranks), "start_policy", given(tokenizer=model, model=model), start, spec, [])
    return start


class AdaptedRun(Run):
    """Every update is given the start, whose weights it needs."""

    def update(
        self, engine: TrainingEngine, number: int, end: str, *, start: Path, full: bool, notes: Notes, **more: Path
    ) -> Facts:
        more = {"reference": self.folders[0], **more}
        return super().update(engine, number, end, start=start, full=full, notes=notes, **more)


def runs(root: Path, ranks: Ranks) -> Facts:
    """Four updates, all in full and policy-only ones between; and advantages of the last policy-only one."""
    facts: Facts = {}
    rows = [RolloutRow("p", i, [3, 4], [5, 6 + i, EOS], "w5", [-1.0] * 3, "stop") for i in range(4)]
    write_rollouts(root / "rollouts.parquet", rows)
    write_scores(root / "scores.parquet", [ScoreRow("p", i, float(i), {"f": 1.0}, False, None) for i in range(4)])
    for case, (stage, dtype) in CASES.items():
        start = start_of(root, ranks, dtype)
        shared: dict[str, Any] = {"zero_stage": stage, "dtype": dtype, "num_minibatches": 2, "learning_rate": 1e-2}
        jobs = [adapting(job) for job in jobs_like({}, {}, {}, {}, **shared)]
        run = AdaptedRun(root / case, ranks, start, jobs, experiences())
        facts[case] = {**run.warm(), **run.sparse("full4-cold")}
        spec = ComputeAdvantagesJob(
            model=jobs[0].model,
            temperature=1.0,
            max_response_tokens=3,
            advantages=AdvantageSpec(whiten=False),
            training=jobs[0].training,
            optimizer=OptimizerSettings.of(jobs[0].update),
            kl_coef=0.0,
        )
        engine = TrainingEngine(ranks)
        inputs = given(checkpoint=run.root / "thin3", reference=start, rollouts=root, scores=root, **run.origin())
        facts[case]["advantages"] = do(engine, "compute_advantages", inputs, run.root / "advantages", spec, [])
        engine.learner.forget()
    return facts


def updates(root: Path, ranks: Ranks) -> Facts:
    """Four steps of policy and critic on the whole batch, of a model with Conv1D layers too."""
    facts: Facts = {}
    for name in SPECS:
        start, job, learner = (
            start_of(root, ranks, "float32", name),
            adapting(update_job(**UPDATE), name),
            Learner(ranks),
        )
        networks = learner.checkpoint(start, LoadConfig.of(job), start)
        facts[name] = Update(networks, make_experience(name), job, ranks).run(silent)
        write_checkpoint(root / f"updated-{name}", networks, learner.tokenizer, ranks, identity=name)
        learner.forget()
    return facts


def sharded(root: Path, ranks: Ranks) -> Facts:
    """The same steps by ranks that share all weights; what they wrote, loaded and written again."""
    name = "llama-tied"
    start, job = start_of(root, ranks, "float32", name), adapting(update_job(zero_stage=3, **UPDATE), name)
    written, again, learner = root / "sharded", root / "sharded-again", Learner(ranks)
    networks = learner.checkpoint(start, LoadConfig.of(job), start)
    facts = Update(networks, make_experience(name), job, ranks).run(silent)
    held = [vars(p)["ds_tensor"].numel() for p in networks["policy"].module.parameters()]
    write_checkpoint(written, networks, learner.tokenizer, ranks, identity="sharded")
    learner.forget()
    networks = learner.checkpoint(written, LoadConfig.of(job), start)
    write_checkpoint(again, networks, learner.tokenizer, ranks, identity="sharded")
    learner.forget()
    return {**facts, "held": sum(held)}


def refusals(root: Path, ranks: Ranks) -> Facts:
    """What the engine says where the start is missing, adapters are others, or no layer is meant."""
    start = start_of(root, ranks, "float32")
    job = adapting(update_job())
    wider = job.model_copy(update={"model": job.model.model_copy(update={"lora": LoraSpec(rank=5)})})
    facts: Facts = {}
    run = Run(root / "refused", ranks, start, [job, wider], experiences(2))
    facts["no start"] = run.update(TrainingEngine(ranks), 1, "end", start=start, full=True, notes=[])
    facts["other rank"] = run.update(
        TrainingEngine(ranks), 2, "end-rank", start=start, full=True, notes=[], reference=start
    )
    cut = root / "cut"
    broken = AdaptedRun(cut, ranks, start, [job], experiences(1))
    broken.update(TrainingEngine(ranks), 1, "full1", start=start, full=True, notes=[])
    file = cut / "full1/adapters/policy/adapter_model.safetensors"
    tensors = load_file(file)
    save_file(dict(list(tensors.items())[1:]), file)
    facts["incomplete"] = broken.update(TrainingEngine(ranks), 1, "end", start=cut / "full1", full=True, notes=[])
    file.unlink()
    facts["missing"] = broken.update(TrainingEngine(ranks), 1, "end-missing", start=cut / "full1", full=True, notes=[])
    model = make_start(root, "llama-tied", "float32", ranks) / "policy"
    for name, lora in {"no layer": LoraSpec(target_modules=("q", "lm_head")), "high rank": LoraSpec(rank=64)}.items():
        spec = StartPolicyJob(seed=1, model=job.model.model_copy(update={"lora": lora}))
        inputs = given(tokenizer=model, model=model)
        facts[name] = do(TrainingEngine(ranks), "start_policy", inputs, root / f"refused-{name}", spec, [])
        facts[name]["files"] = len(list((root / f"refused-{name}").iterdir()))
    return facts


SCENARIOS: dict[str, Callable[[Path, Ranks], Facts]] = {
    scenario.__name__: scenario for scenario in (runs, updates, sharded, refusals)
}
