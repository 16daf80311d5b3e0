"""Which spec a file holds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from ppo_core.spec.dpo import DpoSpec
from ppo_core.spec.loading import SpecError, read_yaml
from ppo_core.spec.reward_model import RewardModelSpec
from ppo_core.spec.rlhf import RlhfSpec
from ppo_core.spec.run_spec import RunSpec

AnySpec = RunSpec | RewardModelSpec | DpoSpec | RlhfSpec
COMMANDS: dict[type[AnySpec], str] = {
    RunSpec: "ppoflow train",
    RewardModelSpec: "ppoflow reward-model",
    DpoSpec: "ppoflow dpo",
    RlhfSpec: "ppoflow rlhf",
}
"""Each kind, and what trains by it."""
Known = TypeVar("Known", RunSpec, RewardModelSpec, DpoSpec, RlhfSpec)


def load_any(path: Path, overrides: Sequence[str] = ()) -> AnySpec:
    """The spec in a file, as its sections tell: of the kinds that know most of them, one that misses none.

    Raises SpecError, one line per problem.
    """
    return _kind_of(_sections(path, overrides)).from_yaml(path, list(overrides))


def load_as(kind: type[Known], path: Path, overrides: Sequence[str] = ()) -> Known:
    """The spec of this kind in a file. Raises SpecError, one line per problem; where the sections are those of another
    kind, the one line says which command takes it.
    """
    try:
        return kind.from_yaml(path, list(overrides))
    except SpecError:
        there = _sections(path, overrides)
        meant = _kind_of(there)
        known, complete = _fit(meant, there)
        if not complete or known <= _fit(kind, there)[0]:
            raise
        raise SpecError(f"{path} is a spec for another command: {COMMANDS[meant]} {path}") from None


def _sections(path: Path, overrides: Sequence[str]) -> set[str]:
    """The keys of a spec's file, with those that are set besides."""
    return read_yaml(path).keys() | {text.partition("=")[0].strip().partition(".")[0] for text in overrides}


def _kind_of(there: set[str]) -> type[AnySpec]:
    return max(COMMANDS, key=lambda kind: _fit(kind, there))


def _fit(kind: type[AnySpec], there: set[str]) -> tuple[int, bool]:
    """How many of the keys it knows, and whether all that it needs are there."""
    needed = {name for name, field in kind.model_fields.items() if field.is_required()}
    return len(there & kind.model_fields.keys()), needed <= there
