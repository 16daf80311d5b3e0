"""Rollouts and scores to experience: logprobs of policy and reference, values, rewards, advantages.

policy, reference, critic ──► old_logprobs, reference_logprobs, values ──► kl ──► rewards ──► GAE ──► whitening
sampler_logprobs ──► how far sampler and trainer disagree (logged, never silently used)
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ppo_core.advantages import gae
from ppo_core.data.batches import lengths_of, microbatches
from ppo_core.kl import kl_estimate, next_kl_coef
from ppo_core.masking import masked_mean, whiten
from ppo_core.metrics import explained_variance
from ppo_core.models.forward import Models, Need
from ppo_core.records import RolloutRow, ScoreRow, TokenSequence
from ppo_core.rewards import clip_scores, missing_eos_penalty, token_rewards
from ppo_core.spec import AdaptiveKl, AdvantageSpec, TrainingSpec
from ppo_core.training.ranks import Ranks

FILE = "experience.safetensors"


@dataclass(frozen=True)
class Experience:
    """All that an update needs, `B` rows of at most `R` response tokens.

    Token ids are ragged in the flat `prompt_ids` and `response_ids` with their lengths `[B]`; the rest is `[B, R]`.
    `response_mask` is True where a token counts in the losses: a row without a score is all False.
    """

    prompt_ids: Tensor
    prompt_lengths: Tensor
    response_ids: Tensor
    response_lengths: Tensor
    response_mask: Tensor
    old_logprobs: Tensor
    reference_logprobs: Tensor
    sampler_logprobs: Tensor
    values: Tensor
    rewards: Tensor
    advantages: Tensor
    returns: Tensor

    def save(self, folder: Path) -> None:
        """Write `experience.safetensors`."""
        save_file({f.name: vars(self)[f.name].contiguous() for f in fields(self)}, folder / FILE)

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
    """What the three models say of the rollouts: `[B, R]` each, `final_values` `[B]`; fp32, on the CPU."""

    old_logprobs: Tensor
    reference_logprobs: Tensor
    values: Tensor
    final_values: Tensor


def predict(
    models: Models, sequences: list[TokenSequence], training: TrainingSpec, ranks: Ranks, tick: Any
) -> Predictions:
    """One pass of each model over all rows, in microbatches, shared among the ranks."""
    lengths, width = lengths_of(sequences), max(len(r) for _, r in sequences)
    out = torch.zeros((3, len(sequences), width + 1), dtype=torch.float32)
    parts = microbatches(ranks.share(range(len(sequences))), lengths, training.microbatch_size)
    need = Need(logprobs=True, reference_logprobs=True, values=True)
    with torch.no_grad():
        for number, rows in enumerate(parts):
            said = models.forward([sequences[row] for row in rows], need)
            for index, tensor in enumerate((said.logprobs, said.reference_logprobs, said.values)):
                assert tensor is not None
                out[index, rows, : tensor.shape[1]] = tensor.cpu()
            assert said.final_values is not None
            out[2, rows, width] = said.final_values.cpu()
            tick(number + 1, len(parts), "logprobs and values")
    out = ranks.sum(out)
    return Predictions(out[0, :, :width], out[1, :, :width], out[2, :, :width], out[2, :, width])


def build_experience(
    rollouts: list[RolloutRow], scores: list[ScoreRow], predictions: Predictions, spec: AdvantageSpec, *, kl_coef: float
) -> tuple[Experience, dict[str, float]]:
    """Shape rewards, run GAE, whiten. Returns the experience and the metrics of the stage."""
    generated = ragged([[1.0] * len(row.response_token_ids) for row in rollouts]).bool()
    finished = torch.tensor([row.finished for row in rollouts])
    scored = torch.tensor([row.score is not None for row in scores])
    counted = scored & finished if spec.truncated == "mask" else scored
    mask = generated & counted[:, None]
    raw = torch.tensor([row.score or 0.0 for row in scores], dtype=torch.float32)
    shaped = raw if spec.score_clip is None else clip_scores(raw, limit=spec.score_clip)
    shaped = missing_eos_penalty(shaped, finished, penalty=spec.missing_eos_penalty)
    kl = kl_estimate(predictions.old_logprobs, predictions.reference_logprobs, estimator=spec.kl.estimator)
    rewards = token_rewards(shaped, kl, mask, kl_coef=kl_coef)
    bootstrap = torch.where(finished, 0.0, predictions.final_values) if spec.truncated == "bootstrap" else None
    estimate = gae(
        rewards, predictions.values, mask, gamma=spec.gamma, gae_lambda=spec.gae_lambda, bootstrap_values=bootstrap
    )
    advantages = whiten(estimate.advantages, mask) if spec.whiten else estimate.advantages
    sampler = ragged([row.sampler_logprobs for row in rollouts])
    experience = Experience(
        prompt_ids=torch.tensor([t for row in rollouts for t in row.prompt_token_ids], dtype=torch.int64),
        prompt_lengths=torch.tensor([len(row.prompt_token_ids) for row in rollouts]),
        response_ids=torch.tensor([t for row in rollouts for t in row.response_token_ids], dtype=torch.int64),
        response_lengths=torch.tensor([len(row.response_token_ids) for row in rollouts]),
        response_mask=mask,
        old_logprobs=predictions.old_logprobs,
        reference_logprobs=predictions.reference_logprobs,
        sampler_logprobs=sampler,
        values=predictions.values,
        rewards=rewards,
        advantages=advantages,
        returns=estimate.returns,
    )
    metrics = {
        **kl_metrics(predictions.old_logprobs, predictions.reference_logprobs, mask),
        **sampler_mismatch(predictions.old_logprobs, sampler, generated),
        "kl/coef": kl_coef,
        "reward/mean": float(rewards.sum(1)[counted].mean()) if counted.any() else 0.0,
        "advantage/std": float(estimate.advantages[mask].std()) if mask.sum() > 1 else 0.0,
        "critic/explained_variance": explained_variance(predictions.values, estimate.returns, mask),
    }
    return experience, metrics


def coefficient_after(spec: AdvantageSpec, kl_coef: float, metrics: dict[str, float], num_sequences: int) -> float:
    """The next iteration's KL coefficient."""
    if not isinstance(spec.kl, AdaptiveKl):
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


def ragged(rows: list[list[float]]) -> Tensor:
    """`[B, R]` fp32 from lists of unequal length, zeros on the right."""
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row, dtype=torch.float32) for row in rows], batch_first=True)
