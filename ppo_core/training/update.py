"""The PPO update: epochs over shuffled minibatches, each one optimizer step of policy and critic.

Losses are sums over tokens divided by the number of counting tokens of the whole minibatch, so neither the microbatch
size nor the number of ranks changes them. Source: Schulman et al. 2017 (arXiv:1707.06347), equations 7 and 9.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ppo_core.batches import lengths_of, microbatches, minibatches
from ppo_core.logprobs import device_of, response_logprobs, response_values
from ppo_core.losses import policy_loss, value_loss
from ppo_core.metrics import Maximum, Mean, approximate_kl, clip_fraction, ratio_maximum, value_clip_fraction
from ppo_core.records import TokenSequence, UpdatePolicyJob
from ppo_core.schedules import learning_rate
from ppo_core.training.deepspeed_engine import Trainable
from ppo_core.training.experience import Experience
from ppo_core.training.ranks import Ranks


@dataclass(frozen=True)
class Rates:
    """Learning rates of one iteration."""

    policy: float
    critic: float


def rates_at(job: UpdatePolicyJob) -> Rates:
    """The schedule at the job's iteration."""
    spec = job.update
    decay_iterations = spec.decay_iterations
    assert decay_iterations is not None

    def at(base: float) -> float:
        return learning_rate(
            base,
            iteration=job.iteration,
            warmup_iterations=spec.warmup_iterations,
            decay_iterations=decay_iterations,
            final_fraction=spec.final_lr_fraction,
        )

    return Rates(at(spec.learning_rate), at(spec.critic_learning_rate))


class PPOUpdate:
    """One iteration's update of `policy` and `critic` on `experience`."""

    def __init__(
        self, policy: Trainable, critic: Trainable, experience: Experience, job: UpdatePolicyJob, ranks: Ranks
    ) -> None:
        self.policy, self.critic, self.experience, self.job, self.ranks = policy, critic, experience, job, ranks
        self.sequences: list[TokenSequence] = experience.sequences()
        self.lengths = lengths_of(self.sequences)
        self.means: dict[str, Mean] = {}
        self.maxima: dict[str, Maximum] = {}

    def run(self, tick: Callable[[int, int, str], None]) -> dict[str, float]:
        """All epochs; returns the metrics. Raises FloatingPointError for a loss or gradient that is not finite."""
        spec, rates = self.job.update, rates_at(self.job)
        total, done, steps = spec.num_ppo_epochs * spec.num_minibatches, 0, 0
        for epoch in range(spec.num_ppo_epochs):
            before = self.means.get("policy/approximate_kl", Mean())
            for rows in minibatches(
                len(self.sequences), spec.num_minibatches, self.job.seed, self.job.iteration, "update", epoch
            ):
                steps += self._step(rows, rates)
                done += 1
                tick(done, total, f"epoch {epoch + 1} of {spec.num_ppo_epochs}")
            if self._left_trust_region(before):
                break
        return {
            **{name: self._over_ranks(mean).value for name, mean in sorted(self.means.items())},
            **{name: self.ranks.largest(maximum.value) for name, maximum in sorted(self.maxima.items())},
            "policy/learning_rate": rates.policy,
            "critic/learning_rate": rates.critic,
            "update/optimizer_steps": float(steps),
        }

    def _step(self, rows: list[int], rates: Rates) -> bool:
        """One optimizer step of both networks; False where nothing in the minibatch was scored."""
        normalizer = int(self.experience.response_mask[rows].sum())
        if normalizer == 0:
            return False
        for part in microbatches(self.ranks.share(rows), self.lengths, self.job.training.microbatch_size):
            self._microbatch(part, normalizer)
        for name, trainable, rate in (("policy", self.policy, rates.policy), ("critic", self.critic, rates.critic)):
            norm = trainable.step(rate)
            if not math.isfinite(norm):
                raise FloatingPointError(
                    f"{name}: the gradient norm is {norm}: lower update.learning_rate or the scores"
                )
            self._add(f"{name}/gradient_norm", Mean(norm, 1.0))
        return True

    def _microbatch(self, rows: list[int], normalizer: int) -> None:
        spec, world = self.job.update, self.ranks.world_size
        batch = [self.sequences[row] for row in rows]
        width = max(len(response) for _, response in batch)
        device = device_of(self.policy.module)

        def of(tensor: Tensor) -> Tensor:
            return tensor[rows, :width].to(device)

        data, mask = self.experience, of(self.experience.response_mask)
        old_logprobs, advantages = of(data.old_logprobs), of(data.advantages)
        logprobs, entropy = response_logprobs(
            self.policy.engine,
            batch,
            temperature=self.job.temperature,
            with_entropy=True,
            detach_entropy=spec.entropy_coef == 0,
        )
        loss = policy_loss(
            logprobs,
            old_logprobs,
            advantages,
            mask,
            clip_low=spec.clip_low,
            clip_high=spec.clip_high,
            dual_clip=spec.dual_clip,
            normalizer=normalizer,
        )
        entropy_sum = torch.where(mask, entropy, 0.0).sum()
        self.policy.backward((loss - spec.entropy_coef * entropy_sum / normalizer) * world)

        values, old_values, returns = (
            response_values(self.critic.engine, batch).values,
            of(data.values),
            of(data.returns),
        )
        critic_loss = value_loss(values, old_values, returns, mask, clip=spec.value_clip, normalizer=normalizer)
        self.critic.backward(critic_loss * world)
        with torch.no_grad():
            self._add("policy/loss", Mean(float(loss) * normalizer, float(mask.sum())))
            self._add("critic/loss", Mean(float(critic_loss) * normalizer, float(mask.sum())))
            self._add("policy/entropy", Mean.over(entropy, mask))
            self._observe(logprobs, old_logprobs, advantages, mask)
            if spec.value_clip is not None:
                clipped = value_clip_fraction(values, old_values, returns, mask, clip=spec.value_clip)
                self._add("critic/clip_fraction", clipped)

    def _observe(self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> None:
        spec = self.job.update
        clipped = clip_fraction(
            logprobs, old_logprobs, advantages, mask, clip_low=spec.clip_low, clip_high=spec.clip_high
        )
        self._add("policy/clip_fraction", clipped)
        self._add("policy/approximate_kl", approximate_kl(logprobs, old_logprobs, mask))
        largest = ratio_maximum(logprobs, old_logprobs, mask)
        self.maxima["policy/ratio_max"] = self.maxima.get("policy/ratio_max", Maximum()) + largest

    def _add(self, name: str, mean: Mean) -> None:
        self.means[name] = self.means.get(name, Mean()) + mean

    def _left_trust_region(self, before: Mean) -> bool:
        """Whether the KL to the old policy in the epoch just done passed `update.max_kl`, on all ranks together."""
        limit = self.job.update.max_kl
        if limit is None:
            return False
        now = self.means.get("policy/approximate_kl", Mean())
        return self._over_ranks(Mean(now.total - before.total, now.count - before.count)).value > limit

    def _over_ranks(self, mean: Mean) -> Mean:
        return Mean(*self.ranks.sum(torch.tensor([mean.total, mean.count], dtype=torch.float64)).tolist())
