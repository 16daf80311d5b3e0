"""Columns of the prompts with numbers that a run reads: how hard a prompt is, how it is sampled."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ppo_core.data.rows import shown
from ppo_core.records import InputError, PrepareDatasetJob
from ppo_core.spec import HIGHEST_TEMPERATURE, LOWEST_TEMPERATURE


@dataclass(frozen=True)
class NumberColumn:
    """The column `name`, as the spec's `setting` names it; texts of numbers count as numbers, as in a CSV file.

    >>> NumberColumn("dataset.curriculum.column", "level").of({"level": "3"})
    3.0
    """

    setting: str
    name: str
    lowest: float = -math.inf
    highest: float = math.inf
    whole: bool = False
    required: bool = False

    def of(self, metadata: Mapping[str, Any]) -> float | None:
        """What a row has there; None where it has nothing.

        Raises ValueError (or OverflowError) for what is no number within bounds.
        """
        value = metadata.get(self.name)
        if value is None or value == "":
            return None
        number = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else math.nan
        if not (math.isfinite(number) and self.lowest <= number <= self.highest) or (self.whole and number % 1):
            raise ValueError(value)
        return number

    def check(self, where: str, metadata: Mapping[str, Any]) -> None:
        """Raise InputError naming the row where it has something else."""
        kind = "a whole number" if self.whole else "a number"
        bounds = f" from {self.lowest:g} to {self.highest:g}" if math.isfinite(self.highest) else ""
        try:
            missing = self.of(metadata) is None
        except (ValueError, OverflowError):
            value = shown(metadata[self.name])
            raise InputError(f"{where} has {self.name}={value}: {self.setting} needs {kind}{bounds}") from None
        if missing and self.required:
            raise InputError(f"{where} has no {self.name}: {self.setting} needs {kind}{bounds} in each row")

    def idle(self, named: Iterable[str]) -> str:
        """What to say where no row has a value there; `named` are the columns that there are."""
        there = ", ".join(sorted(named)) or "none but prompt and answer"
        return (
            f"{self.setting}={self.name}: no row to train on has a value there (columns: {there}): name one that has, "
            "or leave the key out (of a run that exists: `ppoflow fork` it with that key set to null)"
        )


def columns_of(spec: PrepareDatasetJob) -> list[NumberColumn]:
    """Those that a run's prompts to train on are checked for."""
    curriculum, limit = spec.dataset.curriculum, spec.max_response_tokens
    hard = None if curriculum is None else NumberColumn("dataset.curriculum.column", curriculum.column, required=True)
    own = temperature_column(spec.temperature_column), limit_column(spec.max_response_tokens_column, limit)
    return [column for column in (hard, *own) if column is not None]


def temperature_column(name: str | None) -> NumberColumn | None:
    """That of `rollout.temperature_column`, where there is one."""
    if name is None:
        return None
    return NumberColumn("rollout.temperature_column", name, LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE)


def limit_column(name: str | None, most: int) -> NumberColumn | None:
    """That of `rollout.max_response_tokens_column`, where there is one: at most the spec's own limit."""
    return None if name is None else NumberColumn("rollout.max_response_tokens_column", name, 1, most, whole=True)
