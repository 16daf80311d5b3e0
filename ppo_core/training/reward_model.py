"""Training a reward model on preferences."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ppo_core.algorithms.preferences import pairs_of, preference_loss
from ppo_core.data.rankings import Ranking
from ppo_core.data.shares import Share
from ppo_core.models.packing import packs
from ppo_core.models.reward_model import scores_of
from ppo_core.processes.ranks import Ranks
from ppo_core.records import TrainRewardModelJob
from ppo_core.training.deepspeed_engine import Trainable
from ppo_core.training.microbatches import share_of
from ppo_core.training.supervised import LOSS_WINDOW, descend, example_order, rate_at


def train_reward_model(
    model: Trainable,
    rankings: Sequence[Ranking],
    job: TrainRewardModelJob,
    ranks: Ranks,
    tick: Callable[[int, int, str], None],
    curve: list[float] | None = None,
    shares: Sequence[Share] = (),
) -> dict[str, float]:
    """The loss of `ppo_core.algorithms.preferences`, mean over a batch's rows, drawn by the sources' `shares`. Returns
    metrics; `curve` gets the loss of each optimizer step, rounded as in the notes of the progress."""
    spec = job.fit
    order = example_order(len(rankings), spec.num_steps * spec.batch_size, job.seed, "preferences", shares)

    def step(number: int) -> tuple[float, float]:
        batch = [rankings[row] for row in order[number * spec.batch_size : (number + 1) * spec.batch_size]]
        return _step(model, batch, job, ranks, number)

    losses = descend(step, spec.num_steps, ("reward model", "fit.learning_rate"), tick, curve)
    window = losses[-LOSS_WINDOW:]
    return {"reward_model/first_loss": losses[0], "reward_model/loss": sum(window) / len(window)}


def _step(
    model: Trainable, batch: Sequence[Ranking], job: TrainRewardModelJob, ranks: Ranks, step: int
) -> tuple[float, float]:
    """Loss and gradient norm of one optimizer step. All responses of a row are in one backward pass."""
    spec = job.fit

    def work(thread: int, numbers: list[int]) -> Tensor:
        rows = [batch[number] for number in numbers]
        scores = scores_of(model.modules[thread], [text for row in rows for text in row.responses])
        pairs = pairs_of([len(row.responses) for row in rows], scores.device)
        margins = torch.tensor([row.margin for row in rows], device=scores.device)
        summed = preference_loss(scores, margins, pairs, label_smoothing=spec.label_smoothing, centring=spec.centring)
        loss = summed / len(batch)
        model.backward(loss * ranks.world_size, thread)
        return loss.detach()

    costs = [row.cost(padded=not packs(model.modules[0])) for row in batch]
    threads = ranks.threads.usable(len(model.modules))
    shares = share_of(ranks, range(len(batch)), costs, job.training, threads, padded=False)
    total = sum(ranks.threads.each(work, shares), torch.zeros(()))
    norm = model.step(rate_at(spec, step))
    return float(ranks.sum(total.cpu())), norm
