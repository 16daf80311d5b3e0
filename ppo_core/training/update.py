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

from ppo_core.data.batches import lengths_of, microbatches, minibatches
from ppo_core.losses import policy_loss, value_loss
from ppo_core.metrics import Maximum, Mean, approximate_kl, clip_fraction, ratio_maximum, value_clip_fraction
from ppo_core.models.forward import Need, Outputs
from ppo_core.records import TokenSequence, UpdatePolicyJob
from ppo_core.schedules import learning_rate
from ppo_core.training.deepspeed_engine import Trainable, models_of
from ppo_core.training.experience import Experience
from ppo_core.training.ranks import Ranks


@dataclass(frozen=True)
class Rates:
    """Learning rates of one iteration."""

    policy: float
    critic: float


def rates_at(job: UpdatePolicyJob) -> Rates:
    """The schedule at the job's iteration, times the job's factor. A warm-up that is longer is cut to it."""
    spec = job.update
    decay_iterations = spec.decay_iterations
    assert decay_iterations is not None

    def at(base: float) -> float:
        return job.rate_factor * learning_rate(
            base,
            iteration=job.iteration,
            warmup_iterations=min(spec.warmup_iterations, decay_iterations),
            decay_iterations=decay_iterations,
            final_fraction=spec.final_lr_fraction,
        )

    return Rates(at(spec.learning_rate), at(spec.critic_learning_rate))


class PPOUpdate:
    """One iteration's update of `policy` and `critic` on `experience`."""

    def __init__(
        self, policy: Trainable, critic: Trainable, experience: Experience, job: UpdatePolicyJob, ranks: Ranks
    ) -> None:
        self.networks = {"policy": policy, "critic": critic}
        self.models = models_of(self.networks, temperature=job.temperature)
        self.experience, self.job, self.ranks = experience, job, ranks
        self.sequences: list[TokenSequence] = experience.sequences()
        self.lengths = lengths_of(self.sequences)
        self.measured: dict[str, Mean | Maximum] = {}
        self.losses: dict[str, float] = {}
        self.skipped = dict.fromkeys(self.networks, 0)

    def run(self, tick: Callable[[int, int, str], None]) -> dict[str, float]:
        """All epochs; returns the metrics, to which a skipped step of a network adds nothing but its count.

        Raises FloatingPointError after `max_skipped_steps` skipped steps of a network in a row.
        """
        spec, rates = self.job.update, rates_at(self.job)
        total, done, steps = spec.num_ppo_epochs * spec.num_minibatches, 0, 0
        for epoch in range(spec.num_ppo_epochs):
            before = self._mean("policy/approximate_kl")
            for rows in minibatches(
                len(self.sequences), spec.num_minibatches, self.job.seed, self.job.iteration, "update", epoch
            ):
                steps += self._step(rows, rates)
                done += 1
                tick(done, total, f"epoch {epoch + 1} of {spec.num_ppo_epochs}")
            if self._left_trust_region(before):
                break
        return {
            **{name: self._over_ranks(part) for name, part in sorted(self.measured.items())},
            **{f"{name}/skipped_steps": float(count) for name, count in self.skipped.items()},
            "policy/learning_rate": rates.policy,
            "critic/learning_rate": rates.critic,
            "update/optimizer_steps": float(steps),
        }

    def _step(self, rows: list[int], rates: Rates) -> bool:
        """One optimizer step of both networks; False where nothing in the minibatch was scored."""
        normalizer = int(self.experience.response_mask[rows].sum())
        if normalizer == 0:
            return False
        before = dict(self.measured)
        self.losses = dict.fromkeys(self.networks, 0.0)
        for part in microbatches(self.ranks.share(rows), self.lengths, self.job.training.microbatch_size):
            self._microbatch(part, normalizer)
        for name, rate in (("policy", rates.policy), ("critic", rates.critic)):
            norm = self.networks[name].step(rate)
            if math.isfinite(norm):
                self._add(f"{name}/gradient_norm", Mean(norm, 1.0))
            else:
                self._skip(name, norm, before)
        return True

    def _skip(self, name: str, norm: float, before: dict[str, Mean | Maximum]) -> None:
        """Count a skipped step, and forget what was measured in it: the numbers need not be finite."""
        self.skipped[name] += 1
        others = {key: part for key, part in self.measured.items() if not key.startswith(f"{name}/")}
        self.measured = others | {key: part for key, part in before.items() if key.startswith(f"{name}/")}
        loss = float(self.ranks.sum(torch.tensor(self.losses[name], dtype=torch.float64)))
        in_a_row, limit = self.networks[name].skipped_in_a_row, self.job.max_skipped_steps
        if in_a_row >= limit:
            rate = "update.critic_learning_rate" if name == "critic" else "update.learning_rate"
            steps = "step" if in_a_row == 1 else "steps in a row"
            raise FloatingPointError(
                f"{name}: {in_a_row} optimizer {steps} had no finite loss and gradient norm (in the last the "
                f"loss is {loss} and the norm {norm}), and guards.max_skipped_steps={limit} ends the run there: lower "
                f"{rate}, and look at the scores"
            )

    def _microbatch(self, rows: list[int], normalizer: int) -> None:
        spec = self.job.update
        batch = [self.sequences[row] for row in rows]
        width = max(len(response) for _, response in batch)
        device = self.models.device

        def of(tensor: Tensor) -> Tensor:
            return tensor[rows, :width].to(device)

        data, mask = self.experience, of(self.experience.response_mask)
        old_logprobs, advantages = of(data.old_logprobs), of(data.advantages)
        outputs = self.models.forward(batch, Need(entropy="differentiable" if spec.entropy_coef else "detached"))
        logprobs, entropy = outputs.logprobs, outputs.entropy
        assert logprobs is not None
        assert entropy is not None
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
        self._backward("policy", loss - spec.entropy_coef * entropy_sum / normalizer, outputs)

        outputs = self.models.forward(batch, Need(values=True))
        values, old_values, returns = outputs.values, of(data.values), of(data.returns)
        assert values is not None
        critic_loss = value_loss(values, old_values, returns, mask, clip=spec.value_clip, normalizer=normalizer)
        self._backward("critic", critic_loss, outputs)
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
        self._add("policy/ratio_max", ratio_maximum(logprobs, old_logprobs, mask))

    def _backward(self, name: str, loss: Tensor, outputs: Outputs) -> None:
        """Add the gradient of `loss`; one of NaN where it is not finite, so that every rank skips the step.

        By itself the gradient of an infinite loss may well be finite.
        """
        value = float(loss.detach())
        self.losses[name] += value
        scale = self.ranks.world_size
        self.networks[name].backward(loss * scale if math.isfinite(value) else outputs.total() * math.nan)

    def _add(self, name: str, part: Mean | Maximum) -> None:
        so_far = self.measured.get(name, type(part)())
        self.measured[name] = so_far + part  # type: ignore[operator]

    def _mean(self, name: str) -> Mean:
        mean = self.measured.get(name, Mean())
        assert isinstance(mean, Mean)
        return mean

    def _left_trust_region(self, before: Mean) -> bool:
        """Whether the KL to the old policy in the epoch just done passed `update.max_kl`, on all ranks together."""
        limit = self.job.update.max_kl
        if limit is None:
            return False
        now = self._mean("policy/approximate_kl")
        return self._over_ranks(Mean(now.total - before.total, now.count - before.count)) > limit

    def _over_ranks(self, part: Mean | Maximum) -> float:
        if isinstance(part, Maximum):
            return self.ranks.largest(part.value)
        return Mean(*self.ranks.sum(torch.tensor([part.total, part.count], dtype=torch.float64)).tolist()).value
