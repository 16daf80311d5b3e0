"""What of a repository of the hub is wanted: a model without copies of its weights, or certain files of rows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Literal

from infra.artifacts.manifest import MANIFEST_NAME

Kind = Literal["model", "tokenizer", "dataset"]
TEXTS = ("*.json", "*.txt", "*.model", "*.tiktoken", "vocab.bpe", "*.jinja")
FILES: Mapping[str, tuple[str, ...]] = {"model": (*TEXTS, "*.safetensors"), "tokenizer": TEXTS}
CODE = "*.py"
COPIES = ("consolidated*", "pytorch_model*", "tf_model*", "flax_model*")
"""The same weights in other forms, and their indices."""
TEMPLATES = "additional_chat_templates"
ROWS = (".parquet", ".jsonl", ".json", ".csv", ".tsv", ".arrow", ".feather")
NO_ROWS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
PART = re.compile(r"-\d{5}-of-\d{5}(?=\.\w+$)")
SHOWN = 6
DATA = "data"
"""Below this folder of a download lie its rows."""


class HubError(RuntimeError):
    """What is asked for cannot be had; the message says what helps."""


class HubUnavailable(RuntimeError):
    """The hub does not answer, or not as it should: that may pass."""


@dataclass(frozen=True)
class HubSource:
    """What a spec's `name` means: files of a repository for use as a `kind`; of rows, those at `path` in it.

    `revision` None is the main branch. `code`: with the Python files that lie beside a model.
    """

    name: str
    repository: str
    kind: Kind
    revision: str | None = None
    path: str | None = None
    code: bool = False

    @property
    def repository_type(self) -> str:
        """What the hub calls it."""
        return "dataset" if self.kind == "dataset" else "model"


@dataclass(frozen=True)
class HubFile:
    """A file's size in bytes, and its sha256 where the hub tells it."""

    size: int
    sha256: str | None = None


def chosen(source: HubSource, files: Mapping[str, HubFile]) -> dict[str, HubFile]:
    """Those of a repository's files that are wanted of it. Raises HubError where that is none, or not clear.

    A model's manifest.json is none: loading reads no such file, and the store has its own of that name.
    """
    if source.kind == "dataset":
        return {name: files[name] for name in _rows(source, files)}
    patterns = (*FILES[source.kind], *([CODE] if source.code else []))
    return {
        name: file
        for name, file in files.items()
        if PurePosixPath(name).parent.as_posix() in (".", TEMPLATES)
        and any(fnmatchcase(name, pattern) for pattern in patterns)
        and not any(fnmatchcase(name, pattern) for pattern in (*COPIES, MANIFEST_NAME))
    }


def _rows(source: HubSource, files: Mapping[str, HubFile]) -> list[str]:
    """A file, a folder's files, those of a pattern; without a path the only file, in one part or several."""
    if source.path in files:
        return [str(source.path)]
    rows = sorted(
        name for name in files if PurePosixPath(name).suffix in ROWS and PurePosixPath(name).name not in NO_ROWS
    )
    groups = sorted({PART.sub("-*", name) for name in rows})
    listed = ", ".join(groups[:SHOWN]) + (f" and {len(groups) - SHOWN} more" if len(groups) > SHOWN else "")
    bare = source.name.removesuffix(f":{source.path}")
    if source.path is not None:
        folder = source.path.rstrip("/") + "/"
        found = [name for name in rows if name.startswith(folder) or fnmatchcase(name, source.path)]
        if not found:
            raise HubError(f"{bare} has no data file {source.path}: it has {listed or 'no data file at all'}")
        return found
    if not groups:
        raise HubError(f"{bare} has no data file ({', '.join(ROWS)}): use another repository")
    if len(groups) > 1:
        raise HubError(f"{bare} has several data files, {listed}: name one, as in {bare}:{groups[0]}")
    return rows


def place_of(download: Path, kind: Kind) -> Path:
    """What a spec's name stands for in a folder that has the download: a model's folder, a file or folder of rows."""
    if kind != "dataset":
        return download
    files = [path for path in (download / DATA).rglob("*") if path.is_file()]
    return files[0] if len(files) == 1 else download / DATA
