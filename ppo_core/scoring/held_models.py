"""The reward models that this process holds: loaded when they are first asked, and kept for the next job."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from ppo_core.processes.lean_imports import quick_imports
from ppo_core.processes.plugins import Sources
from ppo_core.records import InputError, content_digest
from ppo_core.spec.reward.kinds import ModelRewardSpec

MOST = 4
EXPORTED = "manifest.json"
"""Of a folder that was exported: it tells when, and does not count."""
Loading = Callable[[int], None]


class RewardModel(Protocol):
    """A model that scores tokens: in this process, or in several that share it."""

    @property
    def context(self) -> int | None:
        """How many tokens it reads; None where nothing limits it."""

    def tokens(self, prompt: Any, response: str) -> list[int]:
        """What it reads of a prompt and the response to it."""
        ...

    def scores(self, sequences: Sequence[Sequence[int]], budget: int, progress: Callable[[int], None]) -> list[float]:
        """One number for each sequence; a pass has at most `budget` tokens, or one sequence."""
        ...

    def make_room(self) -> int:
        """Leave the GPU to other engines, until the next scores; returns the bytes that it has more of now."""
        ...

    def close(self) -> None:
        """Free all that it holds."""


class HeldModels:
    """At most `MOST`, those that were asked last; of one folder, that of its files as they are now."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, ...], tuple[str, RewardModel]] = {}
        self._digests: dict[Path, str] = {}

    def compare(self, digests: Mapping[Path, str]) -> None:
        """Refuse from now on to load one of these folders where its files have another digest."""
        self._digests = dict(digests)

    def of(self, spec: ModelRewardSpec, sources: Sources, loading: Loading = lambda _: None) -> RewardModel:
        """The model of a reward, which calls `loading` while it is loaded. Raises InputError where its folder has none,
        or has other files than `compare` was told.

        The sources' digest tells whether the files of the folder are those that were read.
        """
        folder, digest = sources.place(spec.path), sources.digest
        key = (str(folder), spec.dtype, spec.device, str(spec.num_ranks), str(sources.trust_remote_code))
        read, model = self._held.pop(key, (digest, None))
        if model is not None and read != digest:
            model.close()
            model = None
        while len(self._held) >= MOST:
            _, oldest = self._held.pop(next(iter(self._held)))
            oldest.close()
        model = model or self._loaded(folder, spec, loading, trust_remote_code=sources.trust_remote_code)
        self._held[key] = digest, model
        return model

    def _loaded(self, folder: Path, spec: ModelRewardSpec, loading: Loading, *, trust_remote_code: bool) -> RewardModel:
        digest = self._digests.get(folder)
        if digest is None:
            return _loaded(folder, spec, loading, trust_remote_code=trust_remote_code)
        before = _stamps(folder)
        if digest not in _digests(folder, loading):
            raise _changed(folder)
        model = _loaded(folder, spec, loading, trust_remote_code=trust_remote_code)
        if _stamps(folder) != before:  # while it was hashed or loaded
            model.close()
            raise _changed(folder)
        return model

    def drop(self, model: RewardModel) -> None:
        """Forget one that failed, and load it again when it is next asked."""
        self._held = {key: held for key, held in self._held.items() if held[1] is not model}
        model.close()

    def close(self) -> None:
        """Forget all of them."""
        for _, model in list(self._held.values()):
            self.drop(model)

    def make_room(self) -> int:
        """Have all of them leave the GPU; returns the bytes that it has more of now."""
        return sum(model.make_room() for _, model in self._held.values())


@cache
def held_models() -> HeldModels:
    """Those of this process."""
    return HeldModels()


def _changed(folder: Path) -> InputError:
    return InputError(
        f"{folder} changed after this run had read it, and the scoring engine has to load it anew: give the run's "
        "command again, which goes on with what is there now"
    )


def _files(folder: Path) -> dict[str, Path]:
    files = {path.relative_to(folder): path for path in folder.rglob("*") if path.is_file()}
    hidden = {name for name in files if any(part.startswith(".") for part in name.parts)}
    return {name.as_posix(): path for name, path in files.items() if name not in hidden}


def _stamps(folder: Path) -> dict[str, tuple[int, int, int]]:
    found = {name: path.stat() for name, path in _files(folder).items()}
    return {name: (stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in found.items()}


def _digests(folder: Path, loading: Loading) -> set[str]:
    """Of the files as they are, and, were the folder an exported one, without what does not count there."""
    files = {}
    for name, path in _files(folder).items():
        loading(0)
        with path.open("rb") as file:
            files[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return {content_digest(files), content_digest({name: files[name] for name in files.keys() - {EXPORTED}})}


def _loaded(folder: Path, spec: ModelRewardSpec, loading: Loading, *, trust_remote_code: bool) -> RewardModel:
    if spec.num_ranks > 1:
        from ppo_core.scoring.ranked_model import RankedModel

        return RankedModel(folder, spec, trust_remote_code=trust_remote_code, loading=loading)
    with quick_imports():
        from ppo_core.models.classifier import Classifier  # torch: seconds

    return Classifier(folder, dtype=spec.dtype, device=spec.device, trust_remote_code=trust_remote_code)
