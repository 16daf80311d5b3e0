"""Adapters in files as PEFT has them: `adapter_model.safetensors` and `adapter_config.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ppo_core.models.loading import Critic
from ppo_core.models.lora import INSIDE, adapters_of
from ppo_core.records import InputError

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
DOWN, UP = f".{INSIDE}.down", f".{INSIDE}.up"


def save_adapters(network: nn.Module, trained: Mapping[str, Tensor], folder: Path) -> None:
    """Write all that is `trained` as PEFT does."""
    folder.mkdir(parents=True)
    adapters = adapters_of(network)
    first = next(iter(adapters.values()))
    document = {
        "peft_type": "LORA",
        "task_type": "FEATURE_EXTRACTION" if isinstance(network, Critic) else "CAUSAL_LM",
        "r": first.spec.rank,
        "lora_alpha": first.spec.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": first.transposed,
        "target_modules": sorted({name.split(".")[-2] for name in adapters}),
        "inference_mode": True,
    }
    (folder / CONFIG).write_text(json.dumps(document, indent=2, sort_keys=True) + "\n")
    save_file({_peft_name(name): tensor for name, tensor in trained.items()}, folder / WEIGHTS)


def load_adapters(network: nn.Module, folder: Path) -> None:
    """Put what `save_adapters` wrote into a network that `adapt` made. Raises InputError where it does not fit."""
    try:
        stored = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"{folder / WEIGHTS} cannot be read ({error}): the checkpoint was made without model.lora, or is incomplete"
        ) from error
    wanted = {_peft_name(name): p for name, p in network.named_parameters() if p.requires_grad}
    other = {name for name in wanted.keys() | stored.keys() if name not in wanted or name not in stored}
    other |= {name for name in wanted.keys() & stored.keys() if wanted[name].shape != stored[name].shape}
    if other:
        raise InputError(
            f"{folder}: {min(other)} is not as model.lora has it ({len(other)} tensors): another rank, or other layers?"
        )
    for name, parameter in wanted.items():
        parameter.data.copy_(stored[name])


def _peft_name(name: str) -> str:
    for ours, theirs in ((DOWN, ".lora_A.weight"), (UP, ".lora_B.weight")):
        if name.endswith(ours):
            name = name.removesuffix(ours) + theirs
    return f"base_model.model.{name}"
