"""The reward models that this process holds: loaded when they are first asked, and kept for the next job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from ppo_core.processes.plugins import Sources
from ppo_core.spec.reward.kinds import ModelRewardSpec

MOST = 4


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

    def of(
        self, spec: ModelRewardSpec, sources: Sources, loading: Callable[[int], None] = lambda _: None
    ) -> RewardModel:
        """The model of a reward, which calls `loading` while it is loaded. Raises InputError where its folder has none.

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
        model = model or _loaded(folder, spec, loading, trust_remote_code=sources.trust_remote_code)
        self._held[key] = digest, model
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


def _loaded(
    folder: Path, spec: ModelRewardSpec, loading: Callable[[int], None], *, trust_remote_code: bool
) -> RewardModel:
    if spec.num_ranks > 1:
        from ppo_core.scoring.ranked_model import RankedModel

        return RankedModel(folder, spec, trust_remote_code=trust_remote_code, loading=loading)
    from ppo_core.models.classifier import Classifier  # torch: seconds

    return Classifier(folder, dtype=spec.dtype, device=spec.device, trust_remote_code=trust_remote_code)
