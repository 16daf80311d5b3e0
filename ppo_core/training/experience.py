"""Rollouts and scores to experience: what the models say of them, rewards, advantages.

models ──► old_logprobs, reference_logprobs, values ──► kl ──► rewards ──► the algorithm's estimate ──► whitening
sampler_logprobs ──► how far sampler and trainer disagree (logged, never silently used)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ppo_core.algorithms.algorithm import Algorithm, Batch
from ppo_core.data.batches import lengths_of
from ppo_core.kl import kl_estimate, next_kl_coef
from ppo_core.masking import masked_mean, scale, whiten
from ppo_core.models.forward import Models, Need, Outputs
from ppo_core.processes.ranks import Ranks
from ppo_core.records import ComputeAdvantagesJob, InputError, RolloutRow, ScoreRow, TokenSequence
from ppo_core.rewards import ScoreMoments, token_rewards
from ppo_core.schedules import coefficient
from ppo_core.spec import AdaptiveKl, AdvantageSpec, FixedKl, TrainingSpec
from ppo_core.training.microbatches import share_of
from ppo_core.training.shaping import shape_scores

FILE = "experience.safetensors"
NO_MOMENTS = ScoreMoments()


@dataclass(frozen=True)
class Experience:
    """All that an update needs, `B` rows of at most `R` response tokens.

    Token ids are ragged in the flat `prompt_ids` and `response_ids` with their lengths `[B]`; the rest is `[B, R]`.
    `response_mask` is True where a token counts in the losses: a row without a score is all False. Without a critic
    there are no `values` and `returns`; `temperatures` `[B]` only where the prompts have their own, `imitated` `[B]`
    only where the algorithm learns from some responses as from examples.
    """

    prompt_ids: Tensor
    prompt_lengths: Tensor
    response_ids: Tensor
    response_lengths: Tensor
    response_mask: Tensor
    old_logprobs: Tensor
    reference_logprobs: Tensor
    sampler_logprobs: Tensor
    rewards: Tensor
    advantages: Tensor
    values: Tensor | None = None
    returns: Tensor | None = None
    temperatures: Tensor | None = None
    imitated: Tensor | None = None

    def save(self, folder: Path) -> None:
        """Write `experience.safetensors`."""
        tensors = {name: tensor.contiguous() for name, tensor in vars(self).items() if tensor is not None}
        save_file(tensors, folder / FILE)

    @classmethod
    def load(cls, folder: Path) -> Experience:
        """Read it back, on the CPU."""
        return cls(**load_file(folder / FILE))

    def sequences(self) -> list[TokenSequence]:
        """The ragged token sequences, row by row."""
        prompts = self.prompt_ids.split(self.prompt_lengths.tolist())
        responses = self.response_ids.split(self.response_lengths.tolist())
        return [TokenSequence(p.tolist(), r.tolist()) for p, r in zip(prompts, responses, strict=True)]


@dataclass(frozen=True)
class Predictions:
    """What the models say of the rollouts: `[B, R]` each, `final_values` `[B]`; fp32, on the CPU."""

    old_logprobs: Tensor
    reference_logprobs: Tensor
    values: Tensor | None = None
    final_values: Tensor | None = None


def needed(algorithm: Algorithm, spec: AdvantageSpec) -> Need:
    """What the models are asked for: not logprobs where the sampler's are taken, unless values come in that pass."""
    spared = spec.old_logprobs == "sampler" and not algorithm.value_head
    return algorithm.predictions._replace(logprobs=False) if spared else algorithm.predictions


def predict(
    models: Sequence[Models],
    need: Need,
    sequences: list[TokenSequence],
    training: TrainingSpec,
    ranks: Ranks,
    tick: Any,
    temperatures: Tensor | None = None,
) -> Predictions:
    """One pass of each network over all rows, in microbatches, shared among the ranks, and among a rank's threads:
    each has `models` of its own."""
    lengths, width = lengths_of(sequences), max(len(r) for _, r in sequences)
    out = torch.zeros((3, len(sequences), width + 1), dtype=torch.float32)
    shares = share_of(ranks, range(len(sequences)), lengths, training, len(models), padded=not models[0].packed)
    total = sum(map(len, shares))
    done = iter(range(1, total + 1))

    def work(thread: int, rows: list[int]) -> tuple[list[int], Outputs]:
        own = None if temperatures is None else temperatures[rows]
        said = models[thread].forward([sequences[row] for row in rows], need, own)
        tick(next(done), total, "logprobs and values" if need.values else "logprobs")
        return rows, said

    with torch.no_grad():
        found = ranks.threads.each(work, shares)
    for rows, said in found:  # only now is a GPU waited for
        for index, tensor in enumerate((said.logprobs, said.reference_logprobs, said.values)):
            if tensor is not None:
                out[index, rows, : tensor.shape[1]] = tensor.cpu()
        if said.final_values is not None:
            out[2, rows, width] = said.final_values.cpu()
    out = ranks.sum(out)
    logprobs, reference_logprobs, values = out[:, :, :width]
    if not need.values:
        return Predictions(logprobs, reference_logprobs)
    return Predictions(logprobs, reference_logprobs, values, out[2, :, width])


def build_experience(
    rollouts: list[RolloutRow],
    scores: list[ScoreRow],
    predictions: Predictions,
    algorithm: Algorithm,
    spec: AdvantageSpec,
    *,
    kl_coef: float,
    max_response_tokens: int,
    moments: ScoreMoments = NO_MOMENTS,
) -> tuple[Experience, dict[str, float]]:
    """Shape rewards, estimate advantages, whiten. Returns the experience and the metrics of the stage."""
    generated = ragged([[1.0] * len(row.response_token_ids) for row in rollouts]).bool()
    finished, counted = torch.tensor([row.finished for row in rollouts]), trained_on(rollouts, scores, spec)
    given = torch.tensor([math.nan if row.score is None else row.score for row in scores])
    mask = generated & counted[:, None]
    lengths = generated.sum(1)
    shaped = shape_scores(
        scores, finished, lengths, spec, max_response_tokens=max_response_tokens, moments=moments, counted=counted
    )
    sampler, theirs = ragged([row.sampler_logprobs for row in rollouts]), spec.old_logprobs == "sampler"
    old = sampler.clone() if theirs else predictions.old_logprobs  # safetensors writes no tensor twice
    kl = divergence(old, predictions.reference_logprobs, mask, spec)
    rewards = priced = token_rewards(shaped.scores, kl, mask, kl_coef=kl_coef, parts=shaped.parts)
    credits = token_rewards(shaped.scores, kl, mask, kl_coef=0.0, parts=shaped.parts)
    if spec.whiten_rewards:
        rewards = whiten(rewards, mask, shift_mean=False)
    prompts = _numbered([row.prompt_id for row in rollouts])
    batch = Batch(rewards, mask, finished, prompts, predictions.values, predictions.final_values, given, credits)
    estimate = algorithm.estimate(batch, spec)
    advantages = estimate.advantages
    if spec.whiten is True or (spec.whiten is None and algorithm.whitens):
        advantages = whiten(advantages, mask) if spec.whiten_centred else scale(advantages, mask)
    experience = Experience(
        prompt_ids=torch.tensor([t for row in rollouts for t in row.prompt_token_ids], dtype=torch.int64),
        prompt_lengths=torch.tensor([len(row.prompt_token_ids) for row in rollouts]),
        response_ids=torch.tensor([t for row in rollouts for t in row.response_token_ids], dtype=torch.int64),
        response_lengths=torch.tensor([len(row.response_token_ids) for row in rollouts]),
        response_mask=mask,
        old_logprobs=old,
        reference_logprobs=predictions.reference_logprobs,
        sampler_logprobs=sampler,
        values=predictions.values,
        rewards=rewards,
        advantages=advantages,
        returns=estimate.returns,
        temperatures=temperatures_of(rollouts),
        imitated=None if algorithm.imitated is None else algorithm.imitated(batch),
    )
    metrics = {
        **kl_metrics(old, predictions.reference_logprobs, mask),
        **({} if theirs else sampler_mismatch(old, sampler, generated)),
        "kl/coef": kl_coef,
        "reward/mean": float(priced.sum(1)[counted].mean()) if counted.any() else 0.0,
        "advantage/std": float(estimate.advantages[mask].std()) if mask.sum() > 1 else 0.0,
        **shaped.measured,
        **estimate.measured,
    }
    return experience, metrics


def divergence(logprobs: Tensor, reference_logprobs: Tensor, mask: Tensor, spec: AdvantageSpec) -> Tensor:
    """What is to be paid for at each token, `[B, R]` in nats, or with length_normalised in nats per token."""
    kl = kl_estimate(logprobs, reference_logprobs, estimator=spec.kl.estimator)
    return kl / mask.sum(1, keepdim=True).clamp(min=1) if spec.kl.length_normalised else kl


def trained_on(rollouts: Sequence[RolloutRow], scores: Sequence[ScoreRow], spec: AdvantageSpec) -> Tensor:
    """`[B]`: which responses are learned from: those with a score, and with truncated=mask an end of their own."""
    masks = spec.truncated == "mask"
    pairs = zip(rollouts, scores, strict=True)
    return torch.tensor([score.score is not None and (row.finished or not masks) for row, score in pairs])


def require_some(trained: Tensor, scores: Sequence[ScoreRow]) -> None:
    """Raise InputError where no response is learned from."""
    if bool(trained.any()):
        return
    if all(row.score is None for row in scores):
        raise InputError(
            f"there is nothing to learn from: none of {len(scores)} responses has a score (the column error of "
            "scores.parquet says why): see to the reward, and lower reward.max_failed_fraction, which let this pass"
        )
    raise InputError(
        "there is nothing to learn from: advantages.truncated=mask left out every response with a score, since none of "
        "them ended within rollout.max_response_tokens: raise that, or set truncated to terminal"
    )


def temperatures_of(rollouts: list[RolloutRow]) -> Tensor | None:
    """`[B]` of rows that have temperatures of their own; None where none does."""
    own = [row.temperature for row in rollouts if row.temperature is not None]
    return torch.tensor(own, dtype=torch.float32) if own else None


def coefficient_at(job: ComputeAdvantagesJob) -> float:
    """The job's KL coefficient, where its schedule has it at the job's iteration."""
    kl = job.advantages.kl
    if not isinstance(kl, FixedKl) or job.decay_iterations is None:
        return job.kl_coef
    at, until, fraction = job.iteration, job.decay_iterations, kl.final_fraction
    return coefficient(job.kl_coef, iteration=at, decay_iterations=until, schedule=kl.schedule, final_fraction=fraction)


def coefficient_after(
    spec: AdvantageSpec, kl_coef: float, metrics: dict[str, float], num_sequences: int, *, trains_policy: bool = True
) -> float:
    """The next iteration's KL coefficient. `num_sequences`: the responses that the measured KL is a mean over.

    An iteration that trains the critic alone leaves the coefficient: the KL is 0 whatever it is.
    """
    if not isinstance(spec.kl, AdaptiveKl) or not trains_policy:
        return kl_coef
    return next_kl_coef(
        kl_coef, metrics["kl/reference"], target=spec.kl.target, horizon=spec.kl.horizon, num_sequences=num_sequences
    )


def kl_metrics(logprobs: Tensor, reference_logprobs: Tensor, mask: Tensor) -> dict[str, float]:
    """KL to the reference: summed over a response (k1, mean over responses), and per token (k3)."""
    k1 = kl_estimate(logprobs, reference_logprobs, estimator="k1")
    k3 = kl_estimate(logprobs, reference_logprobs, estimator="k3")
    rows = max(int(mask.any(1).sum()), 1)
    return {
        "kl/reference": float(torch.where(mask, k1, 0.0).sum()) / rows,
        "kl/reference_per_token_k3": float(masked_mean(k3, mask)),
    }


def sampler_mismatch(logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> dict[str, float]:
    """How far the sampler's logprobs are from the trainer's for the same weights and tokens."""
    difference = torch.where(mask, (logprobs - sampler_logprobs).abs(), 0.0)
    return {
        "sampler/logprob_difference_mean": float(masked_mean(difference, mask)),
        "sampler/logprob_difference_max": float(difference.max()),
        "sampler/kl": float(masked_mean(kl_estimate(sampler_logprobs, logprobs, estimator="k3"), mask)),
    }


def _numbered(names: list[str]) -> Tensor:
    """Each name's number, in the order of first appearance."""
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return torch.tensor([numbers[name] for name in names])


def ragged(rows: list[list[float]]) -> Tensor:
    """`[B, R]` fp32 from lists of unequal length, zeros on the right."""
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row, dtype=torch.float32) for row in rows], batch_first=True)
