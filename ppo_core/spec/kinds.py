"""Which spec a file holds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ppo_core.spec.dpo import DpoSpec
from ppo_core.spec.loading import read_yaml
from ppo_core.spec.reward_model import RewardModelSpec
from ppo_core.spec.rlhf import RlhfSpec
from ppo_core.spec.run_spec import RunSpec

AnySpec = RunSpec | RewardModelSpec | DpoSpec | RlhfSpec
KINDS: tuple[type[AnySpec], ...] = (RunSpec, RewardModelSpec, DpoSpec, RlhfSpec)


def load_any(path: Path, overrides: Sequence[str] = ()) -> AnySpec:
    """The spec in a file, as its sections tell: of the kinds that know most of them, one that misses none.

    Raises SpecError, one line per problem.
    """
    there = read_yaml(path).keys() | {text.partition("=")[0].strip().partition(".")[0] for text in overrides}

    def fits(kind: type[AnySpec]) -> tuple[int, bool]:
        needed = {name for name, field in kind.model_fields.items() if field.is_required()}
        return len(there & kind.model_fields.keys()), needed <= there

    return max(KINDS, key=fits).from_yaml(path, list(overrides))
