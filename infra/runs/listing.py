"""What a run has, without what is in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class RunListing:
    """The iterations of a run, and its notes by kind, each with a mark that no other record of the run ever bears.

    So whoever has read what a mark stands for need not read it again. `last` is that of a document that names the last
    committed record by its `iteration` and `digest`; None where the store has none, or cannot lose a record unnoticed:
    only stores that can are `naming_last`.
    """

    iterations: Mapping[int, str]
    notes: Mapping[str, tuple[str, ...]]
    last: str | None = None
    naming_last: bool = False
