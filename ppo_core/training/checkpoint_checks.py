"""Whether a checkpoint's files are there and fit each other: asked before anything is loaded and computed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from safetensors import SafetensorError, safe_open

from ppo_core.models.loading import BAD_FOLDER, VALUE_HEAD
from ppo_core.records import InputError

Shape = tuple[int, ...]


def check_policy(folder: Path, *, trust_remote_code: bool = False) -> None:
    """Raise InputError where a checkpoint's policy is missing, or is not what its config.json says."""
    _check_weights(folder / "policy", transformers.AutoModelForCausalLM, trust_remote_code)


def check_critic(folder: Path, *, trust_remote_code: bool = False) -> None:
    """The same for the critic of a full checkpoint."""
    _check_weights(folder / "critic", transformers.AutoModel, trust_remote_code)
    if not (folder / "critic" / VALUE_HEAD).is_file():
        raise InputError(f"{folder}/critic/{VALUE_HEAD} is missing: the checkpoint is incomplete")


def optimizer_shards(folder: Path, part: str, wanted: Mapping[str, Shape]) -> list[Path]:
    """The files of `part`'s optimizer. Raises InputError unless together they hold `wanted`, and masters at most.

    `wanted` has the shape of every tensor, by its name in the files.
    """
    shards = sorted((folder / "optimizer").glob(f"{part}-*.safetensors"))
    expected = [folder / "optimizer" / f"{part}-{number:05d}.safetensors" for number in range(max(len(shards), 1))]
    missing = [path for path in expected if path not in shards]
    if missing:
        raise InputError(f"{missing[0]} is missing: the checkpoint is incomplete")
    found = {key: shape for shard in shards for key, shape in _shapes(shard).items()}
    for key, shape in found.items():
        moment = key.replace("master/", "exp_avg/", 1)
        if moment not in wanted:
            raise InputError(f"{folder}/optimizer holds {key}, which this {part} does not have: another architecture?")
        if shape != wanted[moment]:
            raise InputError(
                f"{folder}/optimizer: {key} has the shape {list(shape)}, in this {part} it is {list(wanted[moment])}: "
                "another architecture?"
            )
    lacking = sorted(wanted.keys() - found.keys())
    if lacking:
        raise InputError(f"{folder}/optimizer lacks {lacking[0]} and {len(lacking) - 1} more: it is incomplete")
    return shards


def _shapes(shard: Path) -> dict[str, Shape]:
    try:
        with safe_open(shard, framework="pt") as tensors:
            return {key: tuple(tensors.get_slice(key).get_shape()) for key in tensors.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise InputError(f"{shard} is damaged ({error}): take the checkpoint from a copy, or an earlier one") from error


def _check_weights(folder: Path, kind: Any, trust_remote_code: bool) -> None:
    """Left alone, transformers fills what a file lacks with random numbers, and says so in its log only."""
    for pattern in ("config.json", "model*.safetensors"):
        if not list(folder.glob(pattern)):
            raise InputError(f"{folder}/{pattern.replace('*', '')} is missing: the checkpoint is incomplete")
    try:
        _, report = kind.from_pretrained(
            str(folder),
            dtype="auto",
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
        )
    except BAD_FOLDER as error:
        raise InputError(f"{folder} cannot be loaded ({type(error).__name__}: {error}): it is damaged") from error
    for name, stored, needed in sorted(report["mismatched_keys"]):
        raise InputError(
            f"{folder}: {name} has the shape {list(stored)}, by its config.json it is {list(needed)}: another "
            "architecture?"
        )
    for name in sorted(report["missing_keys"]):
        raise InputError(f"{folder}: by its config.json there is a weight {name}, its files lack it: they do not fit")
    for name in sorted(report["unexpected_keys"]):
        raise InputError(f"{folder}: its files hold {name}, by its config.json there is none: they do not fit")
