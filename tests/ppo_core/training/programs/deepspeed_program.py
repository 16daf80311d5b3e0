"""The learner under DeepSpeed: starts, updates, checkpoints; what training_program runs as trained/NAME."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ppo_core.logprobs import response_logprobs
from ppo_core.models.forward import Need
from ppo_core.models.loading import critic_from_policy, save_policy
from ppo_core.processes.ranks import Ranks
from ppo_core.records import FinetunePolicyJob, OptimizerSettings, UpdatePolicyJob
from ppo_core.spec import KlPenaltyPpoSpec, ModelSpec, SupervisedSpec, TrainingSpec
from ppo_core.training.checkpoint import full_weights, write_checkpoint, write_start
from ppo_core.training.deepspeed_engine import Trainable, models_of
from ppo_core.training.experience import Experience, predict
from ppo_core.training.learner import Learner, LoadConfig
from ppo_core.training.supervised import supervised_settings, train_supervised
from ppo_core.training.update import Update
from tests.ppo_core.tiny_models import ragged_sequences, tiny_policy, tiny_tokenizer
from tests.ppo_core.training.update_cases import (
    BF16,
    FP32,
    ROWS,
    TEMPERATURE,
    checkpoint_folder,
    make_experience,
    only_rows,
    update_job,
    whitened_by_hand,
    without_scores,
)

Facts = dict[str, Any]
PENALTY = 3.0
SMALL = (1.0, *[2.0**-10] * 16)  # added up in bf16, the first would swallow all others


def silent(*_: Any) -> None:
    """Nobody follows the progress."""


def load(learner: Learner, folder: Path, job: UpdatePolicyJob) -> dict[str, Trainable]:
    return learner.checkpoint(folder, LoadConfig.of(job))


def train(learner: Learner, start: Path, end: Path, job: UpdatePolicyJob, experience: Experience) -> Facts:
    networks = load(learner, start, job)
    learner.invalidate()
    metrics = Update(networks, experience, job, learner.ranks).run(silent)
    write_checkpoint(end, networks, learner.tokenizer, learner.ranks, identity=end.name)
    learner.mark_loaded(end.name)
    return metrics


def make_start(
    root: Path, name: str, dtype: str, ranks: Ranks, networks: tuple[str, ...] = ("policy", "critic")
) -> Path:
    folder = root / f"start-{name}-{dtype}-{ranks.world_size}"
    if ranks.is_first and not folder.exists():
        policy = tiny_policy(name, dtype=dtype)
        weights = {key: p.detach() for key, p in policy.named_parameters()}
        write_start(folder, policy, weights, tiny_tokenizer(), identity=folder.name, networks=networks, dtype=dtype)
    ranks.barrier()
    return folder


def resume(root: Path, ranks: Ranks, cases: Sequence[tuple[int, str]] = (*FP32, *BF16)) -> Facts:
    """Two iterations in one go; the second again by a fresh engine; the first written again without a step."""
    facts: Facts = {}
    experience = make_experience()
    for stage, dtype in cases:
        job = update_job(zero_stage=stage, dtype=dtype, num_minibatches=2)
        start = make_start(root, "gpt2" if stage == 1 else "llama-tied", dtype, ranks)
        first, second, resumed, again = (
            checkpoint_folder(root, stage, dtype, name) for name in ("first", "second", "resumed", "again")
        )
        warm, cold = Learner(ranks), Learner(ranks)
        train(warm, start, first, job, experience)
        facts[second.name] = train(warm, first, second, job.model_copy(update={"iteration": 1}), experience)
        write_checkpoint(again, load(cold, first, job), cold.tokenizer, ranks, identity=first.name)
        facts[resumed.name] = train(cold, first, resumed, job.model_copy(update={"iteration": 1}), experience)
        warm.forget()
        cold.forget()
    return facts


def spread(root: Path, ranks: Ranks) -> Facts:
    """One update in each stage, by however many ranks there are; each one's last microbatch is smaller."""
    facts: Facts = {}
    for stage, dtype in FP32:
        folder = checkpoint_folder(root, stage, dtype, f"ranks{ranks.world_size}")
        job, learner = update_job(zero_stage=stage, dtype=dtype, microbatch_size=3), Learner(ranks)
        start = make_start(root, "llama-tied", dtype, ranks)
        facts[folder.name] = train(learner, start, folder, job, make_experience())
        learner.forget()
    return facts


def move(root: Path, ranks: Ranks) -> Facts:
    """What two ranks in stage 2 wrote, loaded by one rank in stage 0 and 3 and written again."""
    written = checkpoint_folder(root, 2, "float32", "ranks2")
    for stage in (0, 3):
        learner = Learner(ranks)
        networks = load(learner, written, update_job(zero_stage=stage))
        folder = checkpoint_folder(root, stage, "float32", "moved")
        write_checkpoint(folder, networks, learner.tokenizer, ranks, identity="moved")
        learner.forget()
    return {}


def updates(root: Path, ranks: Ranks) -> Facts:
    """PPO updates that differ in one thing each."""
    experience, exact = make_experience(), make_experience(noise=0.0)
    rest = [row for row in range(ROWS) if row not in (0, 3)]
    cases: dict[str, tuple[Experience, UpdatePolicyJob]] = {
        f"microbatch{size}": (experience, update_job(microbatch_size=size, num_minibatches=2, learning_rate=3e-4))
        for size in (1, 2, 3, 4, 8)
    }
    cases |= {f"recipe{index}": (experience, update_job(**recipe)) for index, recipe in enumerate(RECIPES)}
    cases |= {
        "critic alone": (experience, update_job(**RECIPES[0], critic_warmup_iterations=1)),
        "recomputed": (experience, recomputing(update_job(**RECIPES[0]))),
        "unscored": (without_scores(experience, [0, 3]), update_job()),
        "absent": (only_rows(experience, rest), update_job()),
        "three rows scored": (without_scores(experience, [0, 1, 3, 5, 6]), update_job(num_minibatches=8)),
        "no row scored": (without_scores(experience, list(range(ROWS))), update_job(num_minibatches=2)),
        "trust region": (exact, update_job(num_ppo_epochs=5, max_kl=1e-6)),
        "no trust region": (exact, update_job(num_ppo_epochs=5)),
    }
    halves = update_job(num_minibatches=2)
    far = replace(experience, advantages=3 * experience.advantages + 1)
    for kind in ("centred", "scaled"):
        cases[f"whitened {kind}"] = far, halves.model_copy(update={"whitening": kind})
        cases[f"{kind} by hand"] = whitened_by_hand(far, halves, kind), halves
    schedules = {"entropy_schedule": "linear", "kl_loss_schedule": "cosine", "decay_iterations": 4}
    falling = update_job(entropy_coef=0.3, kl_loss_coef=2.0, **schedules)
    cases["scheduled"] = experience, falling.model_copy(update={"iteration": 2})
    cases["at its value"] = experience, update_job(entropy_coef=0.15, kl_loss_coef=1.0, iteration=2)
    own = replace(experience, temperatures=torch.full((ROWS,), TEMPERATURE))
    cases["own temperatures"] = own, update_job(**RECIPES[1]).model_copy(update={"temperature": 5.0})
    penalty = {"algorithm": KlPenaltyPpoSpec(coef=PENALTY)}
    cases["penalised"] = experience, update_job(**RECIPES[0]).model_copy(update=penalty)
    start = make_start(root, "llama-tied", "float32", ranks)
    facts = updated(cases, root, start, ranks)
    facts["first ratios"] = {size: first_ratio(start, size, ranks) for size in (2, 3, 4, ROWS)}
    return facts


def updated(
    cases: Mapping[str, tuple[Experience, UpdatePolicyJob]], root: Path, start: Path, ranks: Ranks, ending: str = ""
) -> Facts:
    """Each case's update of `start`; facts by its name, weights as `NAME NETWORK{ending}.safetensors`."""
    facts: Facts = {}
    for name, (given, job) in cases.items():
        learner = Learner(ranks)
        networks = load(learner, start, job)
        facts[name] = Update(networks, given, job, ranks).run(silent)
        for part, network in networks.items():
            weights = full_weights(network, ranks)
            if ranks.is_first:
                save_file(weights, root / f"{name} {part}{ending}.safetensors")
        learner.forget()
    return facts


def first_ratio(start: Path, microbatch_size: int, ranks: Ranks) -> float:
    """The ratio that is furthest from 1 in the first step on what the engine itself said of the rollouts before."""
    learner, experience, job = Learner(ranks), make_experience(), update_job(microbatch_size=4)
    networks, training = load(learner, start, job), TrainingSpec(microbatch_size=microbatch_size)
    models = models_of(networks, ranks.threads, temperature=TEMPERATURE)
    before = predict(models, Need(logprobs=True), experience.sequences(), training, ranks, silent)
    facts = Update(networks, replace(experience, old_logprobs=before.old_logprobs), job, ranks).run(silent)
    learner.forget()
    return facts["policy/ratio_max"]


def recomputing(job: UpdatePolicyJob) -> UpdatePolicyJob:
    """The same with activation checkpointing."""
    training = job.training.model_copy(update={"activation_checkpointing": True})
    return job.model_copy(update={"training": training})


def agree(root: Path, ranks: Ranks) -> Facts:
    """How far the logprobs of a policy under DeepSpeed are from those of the same folder, loaded as the reference."""
    facts: Facts = {}
    for stage, dtype in BF16:
        job, learner = update_job(zero_stage=stage, dtype=dtype), Learner(ranks)
        start = make_start(root, "llama-tied", dtype, ranks)
        policy = load(learner, start, job)["policy"]
        reference = learner.reference(start / "policy", start.name, model=job.model, training=job.training)
        with torch.no_grad():
            ours, theirs = (
                response_logprobs(model, ragged_sequences(ROWS), temperature=1.0)
                for model in (policy.modules[0], reference)
            )
        facts[f"{stage} {dtype}"] = float((ours - theirs).abs().max())
        learner.forget()
    return facts


RECIPES: list[dict[str, Any]] = [
    {"num_ppo_epochs": 3, "max_grad_norm": 0.5, "weight_decay": 0.01},
    {"num_ppo_epochs": 2, "value_clip": 0.05, "entropy_coef": 0.05, "dual_clip": 1.5, "clip_low": 0.1},
    {"num_ppo_epochs": 3, "kl_loss_coef": 3.0, "kl_loss_estimator": "k2"},
    {"num_ppo_epochs": 3, "kl_loss_coef": 3.0, "kl_loss_estimator": "k3", "aggregation": "sequence_mean_token_mean"},
    {"num_ppo_epochs": 2, "entropy_coef": 0.05, "value_clip": 0.05, "aggregation": "sequence_mean_token_sum"},
    {"num_ppo_epochs": 2, "entropy_coef": 0.05, "kl_loss_coef": 3.0, "aggregation": "fixed_length"},
    {"num_ppo_epochs": 2, "importance_correction": "token", "importance_cap": 1.2, "entropy_coef": 0.05},
    {
        "num_ppo_epochs": 2,
        "importance_correction": "sequence",
        "aggregation": "sequence_mean_token_mean",
        "kl_loss_coef": 3.0,
    },
    {"num_ppo_epochs": 2, "importance_correction": "mask", "importance_cap": 1.3, "importance_floor": 0.8},
]


def trainable(model: Any, spec: SupervisedSpec, training: TrainingSpec, ranks: Ranks) -> Trainable:
    return Trainable(model, supervised_settings(spec), training, dtype="float32", threads=ranks.threads.count)


def supervised(root: Path, ranks: Ranks) -> Facts:
    """One SFT step on eight examples, also recomputed and in threes, forty on the same eight, and broken ones."""
    facts: Facts = {}
    for name, steps in {"1": 1, "recomputed": 1, "threes": 1, "40": 40}.items():
        spec = SupervisedSpec(data="sft.jsonl", num_steps=steps, batch_size=ROWS, warmup_steps=0, learning_rate=3e-3)
        size = 3 if name == "threes" else 2
        training = TrainingSpec(microbatch_size=size, activation_checkpointing=name == "recomputed")
        job = FinetunePolicyJob(seed=1, model=ModelSpec(path="policy"), sft=spec, training=training)
        model, passes = tiny_policy("llama-tied"), []
        model.model.layers[0].mlp.register_forward_pre_hook(lambda *_, passes=passes: passes.append(1))
        policy = trainable(model, spec, training, ranks)
        metrics = train_supervised(policy, ragged_sequences(ROWS), job, ranks, silent)
        facts[name] = {**metrics, "passes": len(passes)}
        save_policy(policy.module, full_weights(policy, ranks), tiny_tokenizer(), root / f"sft{name}")
        policy.close()
    for name in ("nan weight", "infinite gradient"):
        model, job = tiny_policy("llama-tied"), job.model_copy(update={"training": TrainingSpec()})
        if name == "nan weight":
            torch.nn.init.constant_(model.model.norm.weight, torch.nan)
        else:
            model.model.norm.weight.register_hook(lambda gradient: gradient * torch.inf)
        policy = trainable(model, spec, job.training, ranks)
        try:
            facts[name] = train_supervised(policy, ragged_sequences(ROWS), job, ranks, silent)
        except FloatingPointError as error:
            facts[name] = str(error)
        policy.close()
    return facts


def accumulate(root: Path, ranks: Ranks) -> Facts:
    """The gradient norm of the same loss, in one backward pass and in parts, before clipping, in every stage."""
    cases = [(stage, "float32", parts) for stage in range(4) for parts in ((1.0,), (0.5, 0.5))]
    cases += [(stage, "bfloat16", parts) for stage in (1, 2, 3) for parts in ((1.0,), SMALL)]
    folder = make_start(root, "llama-tied", "float32", ranks) / "policy"
    settings = OptimizerSettings(betas=(0.9, 0.95), eps=1e-5, weight_decay=0.0, max_grad_norm=1e-3)
    facts: Facts = {}
    for stage, dtype, parts in cases:
        critic = critic_from_policy(folder, dtype=dtype)
        torch.nn.init.ones_(critic.value_head.weight)
        critic.register_parameter("unused", torch.nn.Parameter(critic.value_head.weight.new_ones(3)))  # no gradient
        network = Trainable(critic, settings, TrainingSpec(zero_stage=stage), dtype=dtype)
        for part in parts:
            network.backward(network.modules[0](torch.tensor([[3, 4, 5]])).sum() * part)
        facts[f"{stage} {dtype} {len(parts)}"] = network.step(1e-3)
        facts[f"{stage} steps"] = network.num_steps
        network.close()
    return facts


def one_by_one(root: Path, ranks: Ranks) -> Facts:
    """Which other networks hold gradients, at each backward pass of an update."""
    learner, job, held = Learner(ranks), update_job(num_minibatches=2), list[list[str]]()
    networks = load(learner, make_start(root, "llama-tied", "float32", ranks), job)
    holders = {name: [p for _, p in network.parameters()] for name, network in networks.items()}
    for name, network in networks.items():

        def noted(loss: Any, module: int = 0, *, name: str = name, backward: Any = network.backward) -> None:
            others = {other for other, learned in holders.items() if any(p.grad is not None for p in learned)}
            held.append(sorted(others - {name}))
            backward(loss, module)

        network.backward = noted  # type: ignore[method-assign]
    Update(networks, make_experience(), job, ranks).run(silent)
    learner.forget()
    return {"held": held}


SCENARIOS: dict[str, Callable[[Path, Ranks], Facts]] = {
    scenario.__name__: scenario
    for scenario in (resume, spread, move, updates, supervised, accumulate, agree, one_by_one)
}
