"""The responses to one prompt as a group: their rewards, and sums over the group."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ppo_core.algorithms.algorithm import Batch, Estimate
from ppo_core.masking import zero_masked


class Groups(NamedTuple):
    """Of each response `[B]`: its `rewards` in float64, whether it `counts`, and how many of its group do (`sizes`).

    In float64 the sum of float32 rewards is so exact that responses of equal reward differ by exactly 0.
    """

    rewards: Tensor
    counts: Tensor
    sizes: Tensor
    prompts: Tensor

    @classmethod
    def of(cls, batch: Batch) -> Groups:
        """A response's reward is the sum over its tokens that count, and 0 where none does."""
        counts = batch.response_mask.any(1)
        rewards = torch.where(counts, zero_masked(batch.rewards, batch.response_mask).double().sum(1), 0.0)
        return cls(rewards, counts, group_sum(counts.double(), batch.prompts), batch.prompts)

    def sum(self, parts: Tensor) -> Tensor:
        """The sum of `parts` `[B]` over the responses of each one's group, `[B]`."""
        return group_sum(parts, self.prompts)

    def deviations(self) -> Tensor:
        """How far each response's reward is from the mean of its group, `[B]`; 0 for what does not count."""
        return torch.where(self.counts, self.rewards - self.sum(self.rewards) / self.sizes.clamp(min=1), 0.0)

    @property
    def compared(self) -> Tensor:
        """Which responses have another one to be compared with."""
        return self.counts & (self.sizes > 1)

    def estimate(self, advantages: Tensor, response_mask: Tensor) -> Estimate:
        """Every token that counts has its response's advantage `[B]`; a response that is alone in its group has 0."""
        kept = torch.where(self.compared, advantages, 0.0).float()
        alone = float((self.counts & ~self.compared).sum()) / max(int(self.counts.sum()), 1)
        tokens = zero_masked(kept[:, None].expand_as(response_mask), response_mask)
        return Estimate(tokens, None, {"advantage/alone": alone})


def group_sum(parts: Tensor, prompts: Tensor) -> Tensor:
    """The sum of `parts` `[B]` over all rows with the same number in `prompts` `[B]`.

    >>> group_sum(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 1, 0])).tolist()
    [5.0, 2.0, 5.0]
    """
    return torch.zeros(len(parts), dtype=parts.dtype).index_add_(0, prompts, parts)[prompts]
