"""Ways in which a full checkpoint can be damaged, each as a change of its folder; and what must be said of each."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file


def without(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return damage


def configured(part: str, **changes: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / part / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return damage


def reshaped(name: str, key: str) -> Callable[[Path], None]:
    """A tensor with one row more."""

    def damage(folder: Path) -> None:
        tensors = load_file(folder / name)
        tensors[key] = torch.cat([tensors[key], tensors[key][:1]])
        save_file(tensors, folder / name, {"format": "pt"})

    return damage


def renamed(name: str, key: str, other: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / name)
        tensors[other] = tensors.pop(key)
        save_file(tensors, folder / name, {"format": "pt"})

    return damage


def dropped(name: str, key: str) -> Callable[[Path], None]:
    """A tensor less."""

    def damage(folder: Path) -> None:
        tensors = load_file(folder / name)
        del tensors[key]
        save_file(tensors, folder / name, {"format": "pt"})

    return damage


def second_shard(folder: Path) -> None:
    """As if the first of two were lost."""
    (folder / "optimizer/critic-00000.safetensors").rename(folder / "optimizer/critic-00001.safetensors")


def cut(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / name
        path.write_bytes(path.read_bytes()[:-5])

    return damage


OPTIMIZER = "optimizer/policy-00000.safetensors"
DAMAGES: dict[str, Callable[[Path], None]] = {
    "no state": without("state.json"),
    "no policy": without("policy/model.safetensors"),
    "no policy folder": without("policy"),
    "no critic": without("critic"),
    "no critic weights": without("critic/model.safetensors"),
    "no value head": without("critic/value_head.safetensors"),
    "cut value head": cut("critic/value_head.safetensors"),
    "wider value head": reshaped("critic/value_head.safetensors", "weight"),
    "no optimizer": without("optimizer"),
    "no critic optimizer": without("optimizer/critic-00000.safetensors"),
    "no first shard": second_shard,
    "wider policy": configured("policy", intermediate_size=64),
    "deeper policy": configured("policy", num_hidden_layers=3),
    "shallower policy": configured("policy", num_hidden_layers=1),
    "wider critic": configured("critic", intermediate_size=64),
    "other moment shape": reshaped(OPTIMIZER, "exp_avg/model.norm.weight"),
    "other moment name": renamed(OPTIMIZER, "exp_avg/model.norm.weight", "exp_avg/model.norm.bias"),
    "a moment less": dropped(OPTIMIZER, "exp_avg/model.norm.weight"),
    "cut policy": cut("policy/model.safetensors"),
    "cut optimizer": cut(OPTIMIZER),
    "thin without policy": without("policy/model.safetensors"),
    "thin and wider": configured("policy", intermediate_size=64),
}
SAID: dict[str, list[str]] = {
    "no state": ["is no checkpoint: state.json is missing"],
    "no policy": ["policy/model.safetensors is missing: the checkpoint is incomplete"],
    "no policy folder": ["policy/config.json is missing"],
    "no critic": ["critic/config.json is missing"],
    "no critic weights": ["critic/model.safetensors is missing"],
    "no value head": ["critic/value_head.safetensors is missing"],
    "cut value head": ["critic/value_head.safetensors is damaged", "Take the checkpoint from a copy, or an earlier"],
    "wider value head": ["critic/value_head.safetensors is damaged", "Take the checkpoint from a copy"],
    "no optimizer": ["optimizer/policy-00000.safetensors is missing"],
    "no critic optimizer": ["optimizer/critic-00000.safetensors is missing"],
    "no first shard": ["optimizer/critic-00000.safetensors is missing"],
    "wider policy": [
        "/policy: config.json and",
        "model.layers.0.mlp.down_proj.weight is [32, 48] in",
        "[32, 64] by",
    ],
    "deeper policy": [
        "model.layers.2.input_layernorm.weight is not in the weights",
        "Take the checkpoint from a copy, or an earlier one",
    ],
    "shallower policy": [
        "model.layers.1.input_layernorm.weight is in the weights, and the model of config.json has none"
    ],
    "wider critic": [
        "/critic: config.json and",
        "layers.0.mlp.down_proj.weight is [32, 48] in",
        "[32, 64] by",
    ],
    "other moment shape": ["exp_avg/model.norm.weight has the shape [33], in this policy it is [32]"],
    "other moment name": ["holds exp_avg/model.norm.bias, which this policy does not have: another architecture?"],
    "a moment less": ["optimizer lacks exp_avg/model.norm.weight and 0 more: it is incomplete"],
    "cut policy": ["/policy cannot be loaded (SafetensorError", "it is damaged. Take the checkpoint from a copy"],
    "cut optimizer": ["optimizer/policy-00000.safetensors is damaged"],
    "thin without policy": ["policy/model.safetensors is missing"],
    "thin and wider": ["[32, 48]", "[32, 64]"],
}
