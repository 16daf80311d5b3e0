"""What became of the rows of each source, in numbers and in lines for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ppo_core.data.shares import shares_of
from ppo_core.records import InputError

TOO_LONG = "too long"
"""Why a row is left out."""


@dataclass
class Tally:
    """What became of the rows of one source: `read` in all, `rows` in the table of its `split`, the rest elsewhere.

    `held_out` are those that went to the held-out rows, `dropped` those that are left out, by the reason.
    """

    source: str
    split: str
    read: int = 0
    rows: int = 0
    held_out: int = 0
    dropped: dict[str, int] = field(default_factory=dict)

    def in_words(self) -> str:
        """For a message."""
        parts = [f"{count} {reason}" for reason, count in sorted(self.dropped.items())]
        parts += [f"{self.held_out} held out"] if self.held_out else []
        return f"{self.source}: {', '.join([f'{self.read} rows', *parts])}"

    def drop(self, reason: str, count: int) -> None:
        """Note rows that are left out."""
        if count:
            self.dropped[reason] = self.dropped.get(reason, 0) + count

    def note(self, split: str, reason: str) -> None:
        """One row more, which went to this split, or to none for that reason."""
        self.read += 1
        if not split:
            self.drop(reason, 1)
        elif split == self.split:
            self.rows += 1
        else:
            self.held_out += 1


def in_words(tallies: Iterable[Tally]) -> str:
    """For a message."""
    return "; ".join(tally.in_words() for tally in tallies)


def documents(tallies: Sequence[Tally], weights: Sequence[float], key: str) -> list[dict[str, Any]]:
    """What `sources.json` says: of each source its rows and, where those to train on have weights, its draws in an
    epoch. Raises InputError naming the `key` of the sources where one would never be drawn from.
    """
    found = [vars(tally).copy() for tally in tallies]
    if not weights:
        return found
    if empty := [tally for tally in tallies if tally.split == "train" and not tally.rows]:
        raise InputError(f"a source with a weight has no rows left ({in_words(empty)}): remove it from {key}")
    train = [document for document in found if document["split"] == "train"]
    for document, share in zip(train, shares_of([one["rows"] for one in train], weights), strict=True):
        if not share.draws:
            raise InputError(
                f"{document['source']} has so little weight that no epoch would draw from it: raise its weight, or "
                f"remove it from {key}"
            )
        document["draws"] = share.draws
    return found


def left_out(sources: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Rows that count nowhere, by the reason, of such documents."""
    reasons = Counter[str]()
    for source in sources:
        reasons.update(source["dropped"])
    return dict(sorted(reasons.items()))
