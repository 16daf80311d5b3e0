"""The one way to run the models on responses: say what you need, get it as `[B, R]`.

Behind it are padding, logits at response positions only, which network gives what, and whatever wraps a module for
training (DeepSpeed): callers see token sequences and tensors aligned with the response tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from ppo_core.logprobs import (
    LaidOut,
    aligned_values,
    device_of,
    reference_head,
    response_logprobs,
    response_statistics,
    response_values,
)
from ppo_core.models.head import values_beside
from ppo_core.models.lora import without_adapters
from ppo_core.models.packing import packs

T = TypeVar("T")


class Need(NamedTuple):
    """What a caller wants of a forward pass; nothing else is computed. `entropy` with or without its gradient.

    `kl` is the policy's to the reference, over the whole vocabulary, with its gradient; it needs a pass of both.
    """

    logprobs: bool = False
    entropy: Literal["detached", "differentiable"] | None = None
    values: bool = False
    reference_logprobs: bool = False
    kl: bool = False


class Outputs(NamedTuple):
    """What the models say, in fp32, None where it was not asked for.

    `logprobs`, `entropy`, `values` (of the state before each token), `reference_logprobs` and `kl` are `[B, R]`, zeros
    past each response's end; `final_values` `[B]` is of the state after the last token. In nats, but for values.
    """

    logprobs: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None
    final_values: Tensor | None = None
    reference_logprobs: Tensor | None = None
    kl: Tensor | None = None

    def nan_unless(self, finite: Tensor) -> None:
        """Have the gradient of what depends on trained weights be NaN where `finite`, a scalar, is False.

        Decided where `finite` is: nobody waits for a GPU to say it.
        """
        for part in (self.logprobs, self.values):
            if part is not None and part.requires_grad:
                part.register_hook(lambda gradient: torch.where(finite, gradient, math.nan))


@dataclass(frozen=True)
class Models:
    """Trained networks by name (`policy`, `critic`), and the frozen `reference` where there is one.

    Without one it is the policy without its adapters. Each is a module, or what runs it for training. Logits are
    divided by `temperature`.
    """

    networks: Mapping[str, Any]
    temperature: float
    reference: Any = None

    def forward(self, batch: Sequence[Any] | LaidOut, need: Need, temperatures: Tensor | None = None) -> Outputs:
        """Run what `need` asks for on B pairs of token ids, prompt and response. The reference gets no gradient.

        `temperatures` `[B]` are those of responses that were not all sampled at one.
        """
        batch = batch if isinstance(batch, LaidOut) else LaidOut(batch)
        temperature = self.temperature if temperatures is None else temperatures
        said, values, final_values, reference_logprobs = None, None, None, None
        policy, critic = self.networks["policy"], self.networks.get("critic")
        compared = self._of_reference(reference_head, batch) if need.kl else None
        beside = values_beside(policy) if need.values and critic is None else nullcontext(list[Tensor]())
        with beside as found:
            if need.logprobs or need.entropy is not None or need.kl:
                said = response_statistics(
                    policy, batch, temperature=temperature, entropy=need.entropy, reference=compared
                )
        if need.reference_logprobs:
            reference_logprobs = self._of_reference(partial(response_logprobs, temperature=temperature), batch)
        if need.values:
            values, final_values = (
                aligned_values(policy, batch, found[0]) if critic is None else response_values(critic, batch)
            )
        logprobs, entropy, kl = (None, None, None) if said is None else said
        return Outputs(logprobs, entropy, values, final_values, reference_logprobs, kl)

    def _of_reference(self, ask: Callable[[Any, LaidOut], T], batch: LaidOut) -> T:
        alone = self.reference is None
        model = self.networks["policy"] if alone else self.reference
        with torch.no_grad(), without_adapters(model) if alone else nullcontext():
            return ask(model, batch)

    @property
    def packed(self) -> bool:
        """Whether every network computes on real tokens alone."""
        return all(packs(network) for network in self.networks.values())

    @property
    def device(self) -> torch.device:
        """Where the policy computes, and everything that goes with its outputs belongs."""
        return device_of(self.networks["policy"])
