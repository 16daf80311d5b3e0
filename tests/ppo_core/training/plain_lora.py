"""Low-rank adapters in plain torch: a model of the weights W + alpha / r * B A, and the files that hold A and B."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor, nn
from torch.func import functional_call

from ppo_core.spec import LoraSpec

PREFIX = "base_model.model."
A, B = ".lora_A.weight", ".lora_B.weight"


def stored(folder: Path, network: str) -> dict[str, Tensor]:
    """What learned, as PEFT names it, without the prefix."""
    tensors = load_file(folder / f"adapters/{network}/adapter_model.safetensors")
    assert all(key.startswith(PREFIX) for key in tensors)
    return {key.removeprefix(PREFIX): tensor for key, tensor in tensors.items()}


def with_products(
    weights: dict[str, Tensor], factors: dict[str, Tensor], name: str, spec: LoraSpec
) -> dict[str, Tensor]:
    """W + alpha / r * B A, or its transpose where the layer keeps W transposed."""
    whole = dict(weights)
    for layer in (key.removesuffix(A) for key in factors if key.endswith(A)):
        product = spec.alpha / spec.rank * (factors[layer + B] @ factors[layer + A])
        whole[f"{layer}.weight"] = weights[f"{layer}.weight"] + (product.t() if name == "gpt2" else product)
    return whole


class PlainAdapted:
    """A model of the weights W + scale * B A, for whoever calls it; only A, B and what is `beside` them learn."""

    def __init__(self, model: nn.Module, factors: dict[str, Tensor], name: str, spec: LoraSpec) -> None:
        self.model, self.name, self.spec = model, name, spec
        self.weights = {key: parameter.detach() for key, parameter in model.named_parameters()}
        self.factors = {key: factor.clone().requires_grad_() for key, factor in factors.items()}

    def __call__(self, **inputs: Any) -> Any:
        whole = with_products(self.weights, self.factors, self.name, self.spec)
        return functional_call(self.model, whole, kwargs=inputs, tie_weights=True)
