"""What the promotions of a store's models rest on, and so must stay: evidence, and policies that one may go back to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from infra.mlflow.alias_journal import PROMOTIONS, Journals, Move
from infra.runs.records import RecordError
from infra.storage.rereading import ChangedOnTheWay

KEPT_VERSIONS = 5
"""So many versions that an alias pointed to keep their policies, whatever becomes of their runs."""


class Promoted:
    """Of all models of a store; remembers what it has read."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._journals: Journals | None = None

    def needs(self) -> set[tuple[str, str]]:
        """Kind and key of what they name: the evidence of every move, and the policies of the last ones."""
        needed: set[tuple[str, str]] = set()
        journals = self._journals = self._journals or Journals(self._root)
        for model in journals.models():
            moves = journals.of(model).moves()
            kept = {move.number for alias in {move.alias for move in moves} for move in last_moves(moves, alias)}
            refs = [(move.number, ref) for move in moves for ref in move.artifacts]
            needed |= {(ref.kind, ref.key) for number, ref in refs if ref.kind != "checkpoint" or number in kept}
        return needed


def last_moves(moves: Sequence[Move], alias: str) -> list[Move]:
    """The last moves of an alias to different versions: those that one would go back to."""
    by_version = {move.version: move for move in moves if move.alias == alias and move.artifacts}
    return sorted(by_version.values(), key=lambda move: move.number)[-KEPT_VERSIONS:]


def unreadable_promotions(root: str) -> Iterator[tuple[str, str]]:
    """Which journals of a store's models cannot be read, and why."""
    unreadable, journals = (RecordError, ChangedOnTheWay, OSError), Journals(root)
    try:
        models = journals.models()
    except unreadable as error:
        yield PROMOTIONS, str(error)
        return
    for model in models:
        try:
            journals.of(model).moves()
        except unreadable as error:
            yield f"{PROMOTIONS} of {model}", str(error)
