"""What a model's folder holds, by the headers of its safetensors files: names and shapes, without reading a weight."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from ppo_core.records import InputError

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
LENGTH = struct.Struct("<Q")
REMEDY = "copy or download the model's folder again"


def weight_files(folder: Path) -> list[Path]:
    """The files that transformers reads. Raises InputError where there are none, or where one of them is missing."""
    if (folder / WHOLE).is_file():
        return [folder / WHOLE]
    if not (folder / INDEX).is_file():
        raise InputError(f"{folder} has neither {WHOLE} nor {INDEX}: give the folder of a model with its weights")
    try:
        named = set(json.loads((folder / INDEX).read_bytes())["weight_map"].values())
        if odd := [name for name in named if not isinstance(name, str)]:
            raise TypeError(f"its weight_map names {odd[0]!r} as a file")
        names = sorted(named)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InputError(f"{folder / INDEX} cannot be read ({type(error).__name__}: {error}): {REMEDY}") from None
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise InputError(
            f"{folder} lacks {len(missing)} of the {len(names)} files that its {INDEX} names "
            f"({', '.join(missing[:3])}): {REMEDY}"
        )
    return [folder / name for name in names]


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor by its name. Raises InputError for what is missing, cut short or no safetensors."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in weight_files(folder):
        shapes |= {name: tuple(entry["shape"]) for name, entry in _header(file).items()}
    return shapes


def _header(file: Path) -> dict[str, Any]:
    size = file.stat().st_size
    with file.open("rb") as content:
        start = content.read(LENGTH.size)
        length = LENGTH.unpack(start)[0] if len(start) == LENGTH.size else size
        if LENGTH.size + length > size:
            raise InputError(f"{file} is cut short, or not a safetensors file ({size} bytes): {REMEDY}")
        try:
            header = json.loads(content.read(length))
            header.pop("__metadata__", None)
            end = LENGTH.size + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        except (ValueError, TypeError, KeyError, AttributeError):
            raise InputError(f"{file} is not a safetensors file: {REMEDY}") from None
    if end != size:
        raise InputError(f"{file} has {size} bytes, but its header says {end}: {REMEDY}")
    return dict(header)
