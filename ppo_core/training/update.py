"""The update: epochs over shuffled minibatches, each one optimizer step of every network that the algorithm trains.

Losses are weighted sums over tokens divided by a number of the whole minibatch (`ppo_core.aggregation`), so neither the
microbatch size nor the number of ranks changes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ppo_core.aggregation import divisor, token_weights
from ppo_core.algorithms.algorithm import Minibatch
from ppo_core.algorithms.registry import algorithm_of
from ppo_core.data.batches import lengths_of, minibatches
from ppo_core.logprobs import LaidOut
from ppo_core.masking import scale, whiten
from ppo_core.metrics import Maximum, Mean, approximate_kl
from ppo_core.models.forward import Need, Outputs
from ppo_core.models.packing import to_device
from ppo_core.off_policy import importance
from ppo_core.processes.ranks import Ranks
from ppo_core.records import TokenSequence, UpdatePolicyJob
from ppo_core.schedules import coefficient, cosine_learning_rate, learning_rate
from ppo_core.spec import UpdateSpec
from ppo_core.training.deepspeed_engine import Trainable, models_of
from ppo_core.training.experience import Experience
from ppo_core.training.microbatches import share_of
from ppo_core.training.networks import NETWORKS

Measured = Mapping[str, Mean | Maximum]
Part = tuple[list[int], LaidOut]
"""A microbatch: its rows, and what every network computes on."""

KL_TO_OLD = "policy/kl_to_old"


def rates_at(job: UpdatePolicyJob) -> dict[str, float]:
    """Of each network that the job's iteration trains: its schedule there, times the job's factor.

    The policy's begins after `update.critic_warmup_iterations`. A warm-up longer than the schedule is cut to it.
    """
    spec = job.update
    decay_iterations = spec.decay_iterations
    assert decay_iterations is not None
    final = 1.0 if spec.schedule == "constant" else spec.final_lr_fraction

    def at(base: float, begin: int) -> float:
        iteration, end = job.iteration - begin, decay_iterations - begin
        warmup = min(spec.warmup_iterations, end)
        if spec.schedule == "cosine":
            return cosine_learning_rate(
                base, step=iteration, warmup_steps=warmup, total_steps=end, final_fraction=final
            )
        return learning_rate(
            base, iteration=iteration, warmup_iterations=warmup, decay_iterations=end, final_fraction=final
        )

    begins = dict.fromkeys(algorithm_of(job.algorithm).networks, 0) | {"policy": spec.critic_warmup_iterations}
    return {
        name: job.rate_factor * at(vars(spec)[NETWORKS[name].rate], begin)
        for name, begin in begins.items()
        if job.iteration >= begin
    }


def settings_at(job: UpdatePolicyJob) -> UpdateSpec:
    """The update's settings with the coefficients that they have at the job's iteration.

    Their schedules begin with the policy's, after `update.critic_warmup_iterations`.
    """
    spec = job.update
    assert spec.decay_iterations is not None
    begin = spec.critic_warmup_iterations
    at = partial(coefficient, iteration=max(job.iteration - begin, 0), decay_iterations=spec.decay_iterations - begin)
    entropy = at(spec.entropy_coef, schedule=spec.entropy_schedule, final_fraction=spec.final_entropy_fraction)
    kl = at(spec.kl_loss_coef, schedule=spec.kl_loss_schedule, final_fraction=spec.final_kl_loss_fraction)
    return spec.model_copy(update={"entropy_coef": entropy, "kl_loss_coef": kl})


class Update:
    """One iteration's update of the networks on `experience`; with a frozen `reference` where the loss needs it."""

    def __init__(
        self,
        networks: Mapping[str, Trainable],
        experience: Experience,
        job: UpdatePolicyJob,
        ranks: Ranks,
        reference: Any = None,
    ) -> None:
        self.algorithm, self.networks = algorithm_of(job.algorithm), networks
        self.models = models_of(self.networks, ranks.threads, temperature=job.temperature, reference=reference)
        self.experience, self.job, self.ranks, self.rates = experience, job, ranks, rates_at(job)
        self.sequences: list[TokenSequence] = experience.sequences()
        self.lengths = lengths_of(self.sequences)
        self.spec = settings_at(job)
        self.advantages = experience.advantages.clone()
        self.imitation = None if experience.imitated is None else torch.zeros_like(self.advantages)
        self.measured: dict[str, Mean | Maximum] = {}
        self.skipped = dict.fromkeys(self.networks, 0)

    def run(self, tick: Callable[[int, int, str], None]) -> dict[str, float]:
        """All epochs; returns the metrics, to which a skipped step of a network adds nothing but its count.

        Raises FloatingPointError after `max_skipped_steps` skipped steps of a network in a row.
        """
        spec = self.job.update
        total, done, steps = spec.num_ppo_epochs * spec.num_minibatches, 0, 0
        for epoch in range(spec.num_ppo_epochs):
            before = self._mean("policy/approximate_kl")
            for rows in minibatches(
                len(self.sequences), spec.num_minibatches, self.job.seed, self.job.iteration, "update", epoch
            ):
                steps += self._step(rows)
                done += 1
                tick(done, total, f"epoch {epoch + 1} of {spec.num_ppo_epochs}")
            if self._left_trust_region(before):
                break
        asked = self.algorithm.carry is not None and "policy/gradient_norm" in self.measured  # of a step that was taken
        return {
            **({KL_TO_OLD: self._kl_to_old(tick)} if asked else {}),
            **{name: self._over_ranks(part) for name, part in sorted(self.measured.items())},
            **{f"{name}/skipped_steps": float(count) for name, count in self.skipped.items()},
            **self._coefficients(),
            **{f"{name}/learning_rate": rate for name, rate in self.rates.items()},
            "update/optimizer_steps": float(steps),
        }

    def _step(self, rows: list[int]) -> bool:
        """One optimizer step of each network; whether any took it: none does where nothing in the minibatch counts."""
        mask = self.experience.response_mask[rows]
        normalizer = self._divisor(mask)
        if normalizer == 0:
            return False
        if self.job.whitening != "none":
            whitened = whiten if self.job.whitening == "centred" else scale
            self.advantages[rows] = whitened(self.experience.advantages[rows], mask)
        if self.imitation is not None and self.experience.imitated is not None:
            chosen = mask & self.experience.imitated[rows, None]
            self.imitation[rows] = chosen / chosen.sum().clamp(min=1)
        shares = [[(part, self._laid_out(part)) for part in share] for share in self._shares(rows)]
        # One after the other: the gradients of one at a time are in memory.
        taken = [self._step_of(name, rate, shares, normalizer) for name, rate in self.rates.items()]
        return any(taken)

    def _step_of(self, name: str, rate: float, shares: list[list[Part]], normalizer: int) -> bool:
        """Whether the step was taken, and not skipped."""
        before, total = dict(self.measured), torch.zeros((), dtype=torch.float64)
        microbatch = partial(self._microbatch, name=name, normalizer=normalizer)
        for loss, measured in self.ranks.threads.each(microbatch, shares):
            total = total + loss
            for key, part in measured.items():
                self._add(f"{name}/{key}", part)
        norm = self.networks[name].step(rate)
        taken = math.isfinite(norm)
        if taken:
            self._add(f"{name}/gradient_norm", Mean(norm, 1.0))
        else:
            self.measured = before
            self._skip(name, norm, total)
        return taken

    def _skip(self, name: str, norm: float, total: Tensor) -> None:
        """Count a skipped step; what was measured in it is forgotten: the numbers need not be finite."""
        self.skipped[name] += 1
        loss = float(self.ranks.sum(total.cpu()))
        in_a_row, limit = self.networks[name].skipped_in_a_row, self.job.max_skipped_steps
        if in_a_row >= limit:
            steps = "step" if in_a_row == 1 else "steps in a row"
            raise FloatingPointError(
                f"{name}: {in_a_row} optimizer {steps} had no finite loss and gradient norm (in the last the "
                f"loss is {loss} and the norm {norm}), and guards.max_skipped_steps={limit} ends the run there: lower "
                f"update.{NETWORKS[name].rate}, and look at the scores"
            )

    def _shares(self, rows: Sequence[int]) -> list[list[list[int]]]:
        """This rank's microbatches of the rows, of each of its threads."""
        padded = not self.models[0].packed
        return share_of(self.ranks, rows, self.lengths, self.job.training, len(self.models), padded=padded)

    def _laid_out(self, rows: list[int]) -> LaidOut:
        return LaidOut([self.sequences[row] for row in rows])

    def _microbatch(self, thread: int, part: Part, name: str, normalizer: int) -> tuple[Tensor, Measured]:
        """The gradient of network `name`; returns its loss and what was measured."""
        (rows, batch), objective = part, self.algorithm.objectives[name]
        minibatch = self._minibatch(rows, max(len(response) for _, response in batch.sequences))
        outputs = self.models[thread].forward(batch, objective.need(self.spec), self._temperatures(rows))
        loss = objective.loss(outputs, minibatch, self.spec, normalizer)
        return self._backward(name, loss.total, outputs, thread), loss.measured

    def _minibatch(self, rows: list[int], width: int) -> Minibatch:
        data, device = self.experience, self.models[0].device

        def of(tensor: Tensor) -> Tensor:
            return to_device(tensor[rows, :width], device)

        values, returns = (None if tensor is None else of(tensor) for tensor in (data.values, data.returns))
        mask, old_logprobs, advantages = of(data.response_mask), of(data.old_logprobs), of(self.advantages)
        update, aggregation = self.job.update, self.job.update.aggregation
        bounds = {"cap": update.importance_cap, "floor": update.importance_floor}
        corrected = update.importance_correction
        return Minibatch(
            mask,
            old_logprobs,
            advantages,
            values,
            returns,
            reference_logprobs=of(data.reference_logprobs),
            weights=token_weights(mask, aggregation),
            importance=None
            if corrected == "none"
            else importance(old_logprobs, of(data.sampler_logprobs), mask, corrected, **bounds),
            imitation=None if self.imitation is None else of(self.imitation),
            counted=self._divisor(data.response_mask[rows, :width]),  # not of a GPU's: that would wait for it
        )

    def _temperatures(self, rows: list[int]) -> Tensor | None:
        own = self.experience.temperatures
        return None if own is None else own[rows]

    def _divisor(self, mask: Tensor) -> int:
        return divisor(mask, self.job.update.aggregation, length=self.job.max_response_tokens)

    def _backward(self, name: str, loss: Tensor, outputs: Outputs, thread: int) -> Tensor:
        """Add the gradient of `loss`; one of NaN where it is not finite, so that every rank skips the step.

        By itself the gradient of an infinite loss may well be finite. Returns the loss, where it was computed: nothing
        here waits for a GPU.
        """
        value = loss.detach()
        outputs.nan_unless(torch.isfinite(value))
        self.networks[name].backward(loss * self.ranks.world_size, thread)
        return value.double()

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

    def _coefficients(self) -> dict[str, float]:
        """Those of the loss that have a schedule, as they were in this iteration."""
        update, found = self.job.update, dict[str, float]()
        if update.entropy_schedule != "constant":
            found["policy/entropy_coef"] = self.spec.entropy_coef
        if update.kl_loss_schedule != "constant":
            found["policy/kl_loss_coef"] = self.spec.kl_loss_coef
        return found

    def _kl_to_old(self, tick: Callable[[int, int, str], None]) -> float:
        """KL(old policy, policy) in nats per token, of the policy as it is now, over all responses."""

        def work(thread: int, rows: list[int]) -> Mean:
            tick(0, 1, "how far the policy went")
            batch, temperatures = self._laid_out(rows), self._temperatures(rows)
            logprobs = self.models[thread].forward(batch, Need(logprobs=True), temperatures).logprobs
            assert logprobs is not None
            minibatch = self._minibatch(rows, logprobs.shape[1])
            return approximate_kl(logprobs, minibatch.old_logprobs, minibatch.response_mask)

        with torch.no_grad():
            found = self.ranks.threads.each(work, self._shares(range(len(self.sequences))))
        return self._over_ranks(sum(found, Mean()))

    def _over_ranks(self, part: Mean | Maximum) -> float:
        if isinstance(part, Maximum):
            return self.ranks.largest(part.value)
        return Mean(*self.ranks.sum(torch.tensor([part.total, part.count], dtype=torch.float64)).tolist()).value
