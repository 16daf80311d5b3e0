"""Training a policy on preferences (DPO). The reference is the policy as it comes, whose logprobs are taken first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ppo_core.algorithms.dpo import MEASURED, DpoLoss, dpo_loss, implicit_rewards
from ppo_core.algorithms.preferences import pairs_of
from ppo_core.data.rankings import Ranking
from ppo_core.data.shares import Share
from ppo_core.models.forward import Models, Need
from ppo_core.processes.ranks import Ranks
from ppo_core.records import LOSS_DIGITS, TrainDpoJob
from ppo_core.spec import DpoFitSpec
from ppo_core.training.deepspeed_engine import Trainable, models_of
from ppo_core.training.microbatches import share_of
from ppo_core.training.supervised import LOSS_WINDOW, descend, example_order, rate_at

Tick = Callable[[int, int, str], None]
NAMES = ("loss", *MEASURED)


class Trained(NamedTuple):
    """What training tells: `metrics` of the last steps and on held-out preferences, `curves` by optimizer step, and
    each held-out response's numbers as `responses`. Curves are rounded as in the notes of the progress."""

    metrics: dict[str, float]
    curves: dict[str, list[float]]
    responses: list[dict[str, Any]]


def train_dpo(
    policy: Trainable,
    train: Sequence[Ranking],
    held_out: Sequence[Ranking],
    job: TrainDpoJob,
    ranks: Ranks,
    tick: Tick,
    shares: Sequence[Share] = (),
) -> Trained:
    """The loss of `ppo_core.algorithms.dpo`, mean over a batch's rows, drawn by the sources' `shares`."""
    spec, models = job.dpo, models_of({"policy": policy}, ranks.threads, temperature=1.0)
    reference, held_out_reference = (
        _logprobs(models, rows, job, ranks, tick, "logprobs of the start") for rows in (train, held_out)
    )
    order = example_order(len(train), spec.num_steps * spec.batch_size, job.seed, "preferences", shares)
    curves: dict[str, list[float]] = {name: [] for name in NAMES}

    def step(number: int) -> tuple[float, float]:
        rows = order[number * spec.batch_size : (number + 1) * spec.batch_size]
        means, norm = _step(
            policy, models, [train[row] for row in rows], [reference[row] for row in rows], job, ranks, number
        )
        for name, mean in zip(NAMES, means, strict=True):
            curves[name].append(mean)
        return means[0], norm

    descend(step, spec.num_steps, ("DPO", "dpo.learning_rate"), tick, None)
    logprobs = _logprobs(models, held_out, job, ranks, tick, "logprobs of held-out responses")
    measured = _means(_loss(held_out, torch.cat(logprobs), torch.cat(held_out_reference), spec), len(held_out))
    windows = {name: values[-LOSS_WINDOW:] for name, values in curves.items()}
    return Trained(
        {name: sum(window) / len(window) for name, window in windows.items()}
        | {f"evaluation/{name}": mean for name, mean in zip(NAMES, measured, strict=True)},
        {name: [round(value, LOSS_DIGITS) for value in values] for name, values in curves.items()},
        _responses(held_out, logprobs, held_out_reference, spec.beta),
    )


def _step(
    policy: Trainable,
    models: Sequence[Models],
    batch: Sequence[Ranking],
    reference: Sequence[Tensor],
    job: TrainDpoJob,
    ranks: Ranks,
    step: int,
) -> tuple[list[float], float]:
    """Means over the batch's rows, and the gradient norm. All responses of a row are in one backward pass."""

    def work(thread: int, numbers: list[int]) -> Tensor:
        rows = [batch[number] for number in numbers]
        logprobs = _of_responses(models[thread], rows, normalised=job.dpo.length_normalised)
        beside = torch.cat([reference[number] for number in numbers]).to(logprobs.device)
        found = _loss(rows, logprobs, beside, job.dpo)
        policy.backward(found.total / len(batch) * ranks.world_size, thread)
        return torch.stack([found.total.detach(), *found.measured])

    shares = _shares(models, [row.cost(padded=not models[0].packed) for row in batch], job, ranks)
    total = sum(ranks.threads.each(work, shares), torch.zeros(len(NAMES), device=models[0].device))
    norm = policy.step(rate_at(job.dpo, step))
    return (ranks.sum(total.cpu()) / len(batch)).tolist(), norm


def _loss(rows: Sequence[Ranking], logprobs: Tensor, reference: Tensor, spec: DpoFitSpec) -> DpoLoss:
    margins = torch.tensor([row.margin for row in rows], device=logprobs.device)
    pairs = pairs_of([len(row.responses) for row in rows], logprobs.device)
    rewards = implicit_rewards(logprobs, reference, spec.beta)
    return dpo_loss(rewards, margins, pairs, label_smoothing=spec.label_smoothing)


def _means(found: DpoLoss, count: int) -> list[float]:
    return [float(total) / count for total in (found.total, *found.measured)]


def _logprobs(
    models: Sequence[Models], rankings: Sequence[Ranking], job: TrainDpoJob, ranks: Ranks, tick: Tick, note: str
) -> list[Tensor]:
    """What the policy as it is gives each row's responses, on the CPU of every rank; without gradients."""
    # As many rows for each rank, since ZeRO 3 gathers weights in every pass; what is repeated is left out at the end.
    count = len(rankings)
    rows_of_all = [*range(count), *[count - 1] * (-count % ranks.world_size)]
    shapes = [(len(row.responses), row.cost(padded=not models[0].packed)) for row in rankings]
    places = [range(*ends) for ends in pairwise(accumulate((shapes[row][0] for row in rows_of_all), initial=0))]
    out = torch.zeros(places[-1].stop)
    shares = _shares(models, [shapes[row][1] for row in rows_of_all], job, ranks)
    total = sum(map(len, shares))
    done = iter(range(1, total + 1))

    def work(thread: int, rows: list[int]) -> tuple[list[int], Tensor]:
        asked = [rankings[rows_of_all[row]] for row in rows]
        said = _of_responses(models[thread], asked, normalised=job.dpo.length_normalised)
        tick(next(done), total, note)
        return rows, said

    with torch.no_grad():
        found = ranks.threads.each(work, shares)
    for rows, said in found:  # only now is a GPU waited for
        out[[place for row in rows for place in places[row]]] = said.cpu()
    return list(ranks.sum(out).split([shapes[row][0] for row in rows_of_all]))[:count]


def _of_responses(models: Models, rows: Sequence[Ranking], *, normalised: bool) -> Tensor:
    """The logprob of each response of the rows `[N]`: the sum over its tokens, or their mean."""
    answers = [answer for row in rows for answer in row.answers()]
    logprobs = models.forward(answers, Need(logprobs=True)).logprobs
    assert logprobs is not None
    if not normalised:
        return logprobs.sum(1)
    return logprobs.sum(1) / torch.tensor([len(response) for _, response in answers], device=logprobs.device)


def _shares(models: Sequence[Models], costs: list[int], job: TrainDpoJob, ranks: Ranks) -> list[list[list[int]]]:
    return share_of(ranks, range(len(costs)), costs, job.training, len(models), padded=False)


def _responses(
    rankings: Sequence[Ranking], logprobs: Sequence[Tensor], reference: Sequence[Tensor], beta: float
) -> list[dict[str, Any]]:
    """A table's rows: which response it is, its tokens, its logprob under policy and reference, its implicit reward."""
    return [
        {
            "row": number,
            "rank": rank,
            "tokens": len(answer),
            "logprob": said,
            "reference_logprob": start,
            "reward": float(implicit_rewards(torch.tensor(said), torch.tensor(start), beta)),
        }
        for number, (row, after, before) in enumerate(zip(rankings, logprobs, reference, strict=True))
        for rank, ((_, answer), said, start) in enumerate(
            zip(row.answers(), after.tolist(), before.tolist(), strict=True)
        )
    ]
