"""Whether what a run's dataset was made of is as it was then, without reading it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from infra.artifacts import ArtifactError, ArtifactStore
from ppo_core.spec import RunSpec
from ppo_core.spec.hub import is_hub_name
from tasks.stages.references import DatasetRef


def made_of_these_files(store: ArtifactStore, dataset: DatasetRef, spec: RunSpec) -> bool:
    """Whether none of the files was changed, replaced or put there since the dataset was stored.

    By the time that the kernel notes with every change, which no copy brings along. Of a function, its file and what
    lies beside it count. Where a file is missing, or a function comes from a package, nothing is known to be the same.
    """
    try:
        stored = datetime.fromisoformat(store.manifest(dataset.bare()).created_at).timestamp()
        return all(changed < stored for path in _files(spec) for changed in _changes(path))
    except (ArtifactError, OSError):
        return False


def _files(spec: RunSpec) -> Iterator[Path]:
    """The user's rows, functions, tokenizer and models."""
    folder = Path(spec.folder)
    for name in (*spec.data, *spec.reward.code):
        if is_hub_name(name):  # of a commit, which does not change
            continue
        source = folder / name.partition(":")[0]
        yield source
        if source.is_dir():
            yield from source.rglob("*")
        if ":" in name:
            yield from source.parent.glob("*.py")
            yield from source.parent.glob("*/*.py")
    model = spec.model
    for place in {str(model.tokenizer or model.path), str(model.path or model.tokenizer), *spec.model_folders}:
        if not is_hub_name(place):
            yield folder / place
            yield from (folder / place).rglob("*")


def _changes(path: Path) -> tuple[float, float]:
    """When the file was changed, and when the link to it, where it is one."""
    return path.stat().st_ctime, path.lstat().st_ctime
