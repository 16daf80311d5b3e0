"""What the engine asks of an algorithm. It knows none by name, and none of them knows files, ranks or optimizers.

rollouts, scores ──► rewards ──► Batch ──► estimate ──► advantages, returns              once per iteration
Outputs (of the models), Minibatch ──► loss of each network ──► backward, optimizer step    many times
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ppo_core.metrics import Maximum, Mean
from ppo_core.models.forward import Need, Outputs
from ppo_core.off_policy import Importance
from ppo_core.spec import AdvantageSpec, UpdateSpec


class Batch(NamedTuple):
    """An iteration's responses, `B` rows of at most `R` tokens, before anything is learned from them.

    `rewards` `[B, R]` hold the price of divergence at each token, and the score at the last one that counts, or in
    parts; `credits` `[B, R]` are the same without that price (None: it is 0).
    `response_mask` `[B, R]` is True where a token counts; `finished` `[B]` where a response ended by itself. Rows with
    one number (0 to B - 1) in `prompts` `[B]` answer one prompt. `values` `[B, R]`, `final_values` `[B]`: the critic's.
    `scores` `[B]` are those that the reward gave, before anything is done to them; nan where there is none.
    """

    rewards: Tensor
    response_mask: Tensor
    finished: Tensor
    prompts: Tensor
    values: Tensor | None = None
    final_values: Tensor | None = None
    scores: Tensor | None = None
    credits: Tensor | None = None


class Estimate(NamedTuple):
    """`advantages` `[B, R]` before whitening, 0 outside the mask; `returns` `[B, R]`, a critic's targets; metrics."""

    advantages: Tensor
    returns: Tensor | None
    measured: Mapping[str, float]


class Minibatch(NamedTuple):
    """What a microbatch of responses is trained on, all `[B, R]`; `values` are those that the critic gave before.

    `weights` are those of `ppo_core.aggregation` (None: all 1); `counted` is this part's share of the divisor.
    `importance` is the correction for what sampler and trainer disagree on (`ppo_core.off_policy`; None: none).
    `imitation` are the weights of a mean over the tokens of the minibatch's responses that are imitated, 0 at others.
    `old_logprobs` are the policy's before the update, `reference_logprobs` those of the policy that the run began with.
    """

    response_mask: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    values: Tensor | None = None
    returns: Tensor | None = None
    reference_logprobs: Tensor | None = None
    weights: Tensor | None = None
    importance: Importance | None = None
    imitation: Tensor | None = None
    counted: int = 0


class Loss(NamedTuple):
    """A scalar to differentiate, and measurements by name, which get the network's name in front."""

    total: Tensor
    measured: Mapping[str, Mean | Maximum]


class Objective(NamedTuple):
    """How one network learns. `loss` gets what `need` asked for, and what weighted sums over tokens are divided by."""

    need: Callable[[UpdateSpec], Need]
    loss: Callable[[Outputs, Minibatch, UpdateSpec, int], Loss]


@dataclass(frozen=True)
class Algorithm:
    """Pure functions: `estimate` sees a batch with what `predictions` asks of the models; an objective per network.

    `carry` makes of KL(old policy, policy) in nats per token, after an update, new values of the algorithm's own
    settings for the next iteration, and of None, where the policy took no step, those that it has; without it they
    stay, and nobody measures the KL. `imitated` says of a batch which responses
    `[B]` the policy learns as examples too; None: none.
    With `value_head` the policy gives the values too, in the same pass. `whitens`: whether advantages are
    whitened where advantages.whiten does not say.
    """

    predictions: Need
    estimate: Callable[[Batch, AdvantageSpec], Estimate]
    objectives: Mapping[str, Objective]
    carry: Callable[[float | None], Mapping[str, float]] | None = None
    imitated: Callable[[Batch], Tensor] | None = None
    value_head: bool = False
    whitens: bool = True

    @property
    def networks(self) -> tuple[str, ...]:
        """The networks that are trained, in the order in which they step."""
        return tuple(self.objectives)
