"""Supervised fine-tuning (SFT): cross-entropy on the completions of examples."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ppo_core.data.batches import lengths_of, permutation
from ppo_core.data.shares import Share
from ppo_core.models.forward import Need
from ppo_core.processes.ranks import Ranks
from ppo_core.records import (
    LOSS_DIGITS,
    FinetunePolicyJob,
    OptimizerSettings,
    TokenSequence,
    derive_seed,
    loss_note,
)
from ppo_core.sampling import draw_prompts
from ppo_core.schedules import cosine_learning_rate
from ppo_core.spec import DescentSpec, SupervisedSpec
from ppo_core.training.deepspeed_engine import Trainable, models_of
from ppo_core.training.microbatches import share_of

LOSS_WINDOW = 50


def example_order(count: int, wanted: int, seed: int, stream: str = "sft", shares: Sequence[Share] = ()) -> list[int]:
    """`wanted` row numbers: whole seeded permutations, one after the other, or of each source its `shares`."""
    if shares:
        return draw_prompts(count, 0, wanted, seed=derive_seed(seed, stream), shuffle=True, shares=shares)
    order: list[int] = []
    while len(order) < wanted:
        order += permutation(count, seed, stream, len(order) // count)
    return order[:wanted]


def supervised_settings(spec: SupervisedSpec | DescentSpec) -> OptimizerSettings:
    """AdamW as the spec's section has it."""
    return OptimizerSettings(
        betas=spec.betas, eps=1e-8, weight_decay=spec.weight_decay, max_grad_norm=spec.max_grad_norm
    )


def train_supervised(
    policy: Trainable,
    examples: Sequence[TokenSequence],
    job: FinetunePolicyJob,
    ranks: Ranks,
    tick: Callable[[int, int, str], None],
    curve: list[float] | None = None,
) -> dict[str, float]:
    """Cross-entropy on the completion tokens, mean over the batch's tokens. Returns metrics; `curve` gets the loss
    of each optimizer step, rounded as in the notes of the progress."""
    spec = job.sft
    order = example_order(len(examples), spec.num_steps * spec.batch_size, job.seed)

    def step(number: int) -> tuple[float, float]:
        batch = [examples[row] for row in order[number * spec.batch_size : (number + 1) * spec.batch_size]]
        return _step(policy, batch, job, ranks, number)

    losses = descend(step, spec.num_steps, ("SFT", "sft.learning_rate"), tick, curve)
    window = losses[-LOSS_WINDOW:]
    return {"sft/first_loss": losses[0], "sft/loss": sum(window) / len(window)}


def descend(
    step: Callable[[int], tuple[float, float]],
    num_steps: int,
    called: tuple[str, str],
    tick: Callable[[int, int, str], None],
    curve: list[float] | None,
) -> list[float]:
    """The loss of each optimizer step; `step` makes one and gives its loss and gradient norm.

    `called` is what people call the training, and the key of its learning rate. Raises FloatingPointError for numbers
    that are not finite.
    """
    losses: list[float] = []
    for number in range(num_steps):
        loss, norm = step(number)
        for name, value in (("loss", loss), ("gradient norm", norm)):
            if not math.isfinite(value):
                raise FloatingPointError(f"{called[0]} step {number}: the {name} is {value}: lower {called[1]}")
        losses.append(loss)
        if curve is not None:
            curve.append(round(loss, LOSS_DIGITS))
        tick(number + 1, num_steps, loss_note(loss))
    return losses


def rate_at(spec: SupervisedSpec | DescentSpec, step: int) -> float:
    """The learning rate of an optimizer step: linear warm-up, then cosine decay."""
    return cosine_learning_rate(
        spec.learning_rate,
        step=step,
        warmup_steps=min(spec.warmup_steps, spec.num_steps),
        total_steps=spec.num_steps,
        final_fraction=spec.final_lr_fraction,
    )


def _step(
    policy: Trainable, batch: list[TokenSequence], job: FinetunePolicyJob, ranks: Ranks, step: int
) -> tuple[float, float]:
    """Loss and gradient norm of one optimizer step."""
    spec = job.sft
    normalizer = sum(len(completion) for _, completion in batch)
    models = models_of({"policy": policy}, ranks.threads, temperature=1.0)

    def work(thread: int, rows: list[int]) -> Tensor:
        logprobs = models[thread].forward([batch[row] for row in rows], Need(logprobs=True)).logprobs
        assert logprobs is not None
        loss = -logprobs.sum() / normalizer
        policy.backward(loss * ranks.world_size, thread)
        return loss.detach()

    padded = not models[0].packed
    shares = share_of(ranks, range(len(batch)), lengths_of(batch), job.training, len(models), padded=padded)
    total = sum(ranks.threads.each(work, shares), torch.zeros(()))
    norm = policy.step(rate_at(spec, step))
    return float(ranks.sum(total.cpu())), norm
