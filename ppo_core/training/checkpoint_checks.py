"""Whether a checkpoint's files are there, and its optimizers' fit its networks: asked before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open

from ppo_core.models.loading import VALUE_HEAD
from ppo_core.records import InputError

Shape = tuple[int, ...]


def require_network(folder: Path, name: str) -> None:
    """Raise InputError where a checkpoint lacks a file of its network `name`."""
    files = ("config.json", "model*.safetensors", *([VALUE_HEAD] if name == "critic" else []))
    for pattern in files:
        if not list((folder / name).glob(pattern)):
            raise InputError(f"{folder}/{name}/{pattern.replace('*', '')} is missing: the checkpoint is incomplete")


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
