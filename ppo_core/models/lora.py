"""Low-rank adapters (LoRA): a layer's weight W stays, and beside it two small factors learn.

    y = x W' + scale * (x A') B'        A [r, in]        B [out, r], zero at the start        scale = alpha / r

Source: Hu et al. 2021 (arXiv:2106.09685), section 4.1; initial values as in PEFT. The adapter is a module inside its
layer, whose weight keeps its name: what runs, names or saves the model goes on as before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ppo_core.models.loading import Critic
from ppo_core.records import InputError
from ppo_core.spec import LoraSpec

INSIDE = "adapter"


class Adapter(nn.Module):
    """The factors of one layer: `down` is A, `up` is B. Of Conv1D layers the weight is W', `[in, out]`."""

    def __init__(self, layer: Any, spec: LoraSpec) -> None:
        super().__init__()
        self.spec, self.on, self.transposed = spec, True, isinstance(layer, Conv1D)
        outputs, inputs = layer.weight.t().shape if self.transposed else layer.weight.shape
        like = {"dtype": layer.weight.dtype, "device": layer.weight.device}
        self.down = nn.Parameter(torch.zeros((spec.rank, inputs), **like))
        self.up = nn.Parameter(torch.zeros((outputs, spec.rank), **like))
        self.scale = spec.alpha / spec.rank

    def forward(self, inputs: Tensor) -> Tensor:
        """What is added to the layer's output for `inputs` `[..., in]`."""
        return self.scale * nn.functional.linear(nn.functional.linear(inputs, self.down), self.up)

    def product(self, down: Tensor, up: Tensor) -> Tensor:
        """What is added to the layer's weight by these values of the factors, in fp32."""
        product = self.scale * (up.float() @ down.float())
        return product.t() if self.transposed else product


def target_layers(model: Any, spec: LoraSpec) -> Mapping[str, nn.Module]:
    """The layers of a transformers model that get an adapter, by name. Raises InputError where `spec` does not fit."""
    head, wanted = model.get_output_embeddings(), spec.target_modules
    linear = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D) and m is not head}
    there = {name.rpartition(".")[2] for name in linear}
    unknown = set() if wanted == "all-linear" else set(wanted) - there
    if unknown or not linear:
        raise InputError(
            f"model.lora.target_modules: {', '.join(sorted(unknown)) or wanted} names no linear layer of this model; "
            f"there are {', '.join(sorted(there)) or 'none'} (the output embedding gets no adapter): name some of "
            "these, or set all-linear"
        )
    found = {n: m for n, m in linear.items() if wanted == "all-linear" or n.rpartition(".")[2] in wanted}
    narrowest = min(found, key=lambda name: min(found[name].weight.shape))
    side = min(found[narrowest].weight.shape)
    if spec.rank > side:
        raise InputError(
            f"model.lora.rank={spec.rank} is above {side}, the smaller side of {narrowest}: lower it to {side} or "
            "less, or leave that layer out of model.lora.target_modules"
        )
    return found


def adapt(network: Any, spec: LoraSpec, *, seed: int | None = None) -> None:
    """Freeze a policy, or a critic's trunk, and add adapters to its layers; A is random by `seed`, else zero too."""
    trunk = network.backbone if isinstance(network, Critic) else network
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    layers = target_layers(trunk, spec)
    trunk.requires_grad_(False)
    for layer in layers.values():
        adapter = Adapter(layer, spec)
        if generator is not None:
            random = torch.empty(adapter.down.shape, dtype=torch.float32)
            nn.init.kaiming_uniform_(random, a=math.sqrt(5), generator=generator)
            adapter.down.data.copy_(random)
        layer.add_module(INSIDE, adapter)
        layer.register_forward_hook(_added)


def _added(layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
    adapter: Any = layer.get_submodule(INSIDE)
    return output + adapter(inputs[0]) if adapter.on else output


def adapters_of(network: nn.Module) -> dict[str, Adapter]:
    """By name; none where all weights are trained."""
    return {name: module for name, module in network.named_modules() if isinstance(module, Adapter)}


@contextmanager
def without_adapters(network: nn.Module) -> Iterator[None]:
    """Inside, a policy with adapters is the one that it was before any of them learned."""
    adapters = adapters_of(network).values()
    if not adapters:
        raise ValueError("this network has no adapters to leave out: give its reference as a model of its own")
    for adapter in adapters:
        adapter.on = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.on = True


def merged(network: nn.Module, frozen: Mapping[str, Tensor], trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All weights of a network without adapters that computes the same; `frozen` and `trained` are all that it has."""
    dtype = next(iter(trained.values())).dtype
    weights = {**{name: weight.to(dtype) for name, weight in frozen.items()}, **trained}
    for name, adapter in adapters_of(network).items():
        layer, down, up = name.removesuffix(INSIDE), weights.pop(f"{name}.down"), weights.pop(f"{name}.up")
        whole = weights[f"{layer}weight"].float() + adapter.product(down, up)
        weights[f"{layer}weight"] = whole.to(dtype).contiguous()
    return weights
