"""Moving a model's alias only if it still points where the mover believes, with every move on record.

    standing ──► (evaluate, compare, ask) ──► move: page n+1 of the journal ──► MLflow's alias follows ──► noted

The page decides: of several movers that saw page n, one creates page n+1, and the others read what it says. Whoever
dies between page and alias has moved it all the same: the next one that looks lets the alias follow.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from infra.artifacts.manifest import ArtifactRef
from infra.mlflow.alias_journal import Action, Journal, Move
from infra.mlflow.registry import RegistryError, aliases_of, is_there, point_alias

SECOND_LOOK_S = 2.0
FOUND = "moved by the registration of a run, or in MLflow itself"


class AliasMoved(RegistryError):
    """The alias no longer points where it did."""


class NothingBefore(RegistryError):
    """There is no version to go back to."""


@dataclass(frozen=True)
class Standing:
    """Where an alias points (None: it does not exist), as of the journal's last page `number` (0: no page yet)."""

    version: str | None
    number: int


@dataclass(frozen=True)
class Reason:
    """Who moves an alias, why, and on what evidence."""

    by: str
    why: str = ""
    evidence: Mapping[str, Any] | None = None
    artifacts: Sequence[ArtifactRef] = ()


class Alias:
    """One alias of a registered model."""

    def __init__(
        self,
        uri: str,
        journal: Journal,
        alias: str,
        *,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._uri = uri
        self._journal = journal
        self._pause = pause
        self.model = journal.model
        self.name = alias

    def standing(self) -> Standing:
        """Where the alias points now. What a mover that died left undone is done first.

        A move that a run's registration or somebody in MLflow itself made is written down as found.
        """
        while True:
            page, last = self._last()
            # In this order: once it is known to be applied, any other place that is read after is somebody's doing.
            applied = last is not None and self._journal.applied(last)
            recorded, found = (last.version if last is not None else None), self._in_mlflow()
            if found == recorded:
                if last is not None and not applied:  # it has followed, and its mover died before that was noted
                    self._journal.note_applied(last)
                return Standing(found, page)
            if last is not None and not applied:
                self._follow()
            elif self._still(page, found):
                self._write("found", found, Standing(recorded, page), Reason("unknown", FOUND))

    def move(self, standing: Standing, version: str, action: Action, reason: Reason) -> Move:
        """Point the alias to a version, if it still stands as it did; else AliasMoved, which says what has happened.

        RegistryError where the version was deleted, or MLflow does not answer: where it did not after the move was put
        on record, the alias follows at the next look.
        """
        page = standing.number
        self._require(version)
        while True:
            last_page, last = self._last()
            recorded = last.version if last is not None else None
            if recorded != standing.version or (last is not None and last.number > standing.number):
                raise self._moved(standing, last)
            page = max(page, last_page)
            found = self._in_mlflow()
            if found != standing.version:
                if not self._still(last_page, found):
                    continue  # it was another mover's doing, or one that was held up has put it right
                raise AliasMoved(
                    f"{self.name} of {self.model!r} pointed to {_named(standing.version)} when the comparison started, "
                    f"and was moved to {_named(found)} in MLflow itself since: compare again with what it points to now"
                )
            written = self._write(action, version, Standing(standing.version, page), reason)
            if written is not None:
                self._require(version)  # else the alias has not followed
                return written

    def before(self) -> str:
        """The version that the alias pointed to before the present one took its place, and that nobody has deleted;
        NothingBefore without one."""
        stack = self.stack()
        for version in reversed(stack[:-1]):
            if version is not None and is_there(self._uri, self.model, version):
                return version
        there = stack and stack[-1] is not None
        see = f"see ppoflow lineage models:/{self.model}@{self.name}, or " if there else ""
        raise NothingBefore(
            f"{self.name} of {self.model!r} has no version to go back to: its history has {len(stack)} step(s); "
            f"{see}name one: {self.rollback_to('VERSION')}"
        )

    def rollback_to(self, version: str) -> str:
        """The command that points this alias to a version."""
        return f"ppoflow rollback {self.model} --alias {self.name} --to {version}"

    def stack(self) -> list[str | None]:
        """The versions that led to the present one, without those that were rolled back, here or in MLflow itself."""
        stack: list[str | None] = []
        for move in self._journal.moves_of(self.name):
            if not stack and move.before is not None:
                stack.append(move.before)
            if move.action != "promote" and move.version in stack:
                while stack[-1] != move.version:  # it may have been there more than once
                    stack.pop()
            else:
                stack.append(move.version)
        return stack

    def _require(self, version: str) -> None:
        if not is_there(self._uri, self.model, version):
            raise RegistryError(
                f"{self.model!r} has no version {version} in MLflow any more, so {self.name} is not moved to it: "
                f"choose another version, as by {self.rollback_to('VERSION')}"
            )

    def _write(self, action: Action, version: str | None, standing: Standing, reason: Reason) -> Move | None:
        """Write the next page and let the alias follow; None if another mover has written that page."""
        move = self._append(action, version, standing, reason)
        if move is not None:
            self._follow()
        return move

    def _append(self, action: Action, version: str | None, standing: Standing, reason: Reason) -> Move | None:
        move = Move(
            number=standing.number + 1,
            model=self.model,
            alias=self.name,
            action=action,
            version=version,
            before=standing.version,
            by=reason.by,
            at_ms=int(time.time() * 1000),
            reason=reason.why,
            evidence=dict(reason.evidence or {}),
            artifacts=tuple(reason.artifacts),
        )
        return move if self._journal.append(move) else None

    def _follow(self) -> None:
        """Let MLflow's alias point where the last page says; again, if there is a newer page by then.

        Where the version of that page was deleted meanwhile, what MLflow says is written down.
        """
        page, last = self._last()
        while last is not None:
            found = self._in_mlflow()
            if found != last.version:
                if last.version is not None and not is_there(self._uri, self.model, last.version):
                    deleted = Reason("unknown", f"version {last.version} was deleted in MLflow before it followed")
                    self._append("found", found, Standing(last.version, page), deleted)
                    page, last = self._last()
                    continue
                point_alias(self._uri, self.model, self.name, last.version)
            self._journal.note_applied(last)
            before, (page, last) = page, self._last()
            if page == before:
                return

    def _still(self, page: int, found: str | None) -> bool:
        """Whether it stays so: a mover that was held up may be about to put the alias right."""
        self._pause(SECOND_LOOK_S)
        return (self._last()[0], self._in_mlflow()) == (page, found)

    def _last(self) -> tuple[int, Move | None]:
        """The number of the journal's last page, and the alias's last move."""
        moves = self._journal.moves()
        of_alias = [move for move in moves if move.alias == self.name]
        return (moves[-1].number if moves else 0), (of_alias[-1] if of_alias else None)

    def _in_mlflow(self) -> str | None:
        return aliases_of(self._uri, self.model).get(self.name)

    def _moved(self, standing: Standing, last: Move | None) -> AliasMoved:
        what = "it does not exist any more" if last is None else f"move {last.number}: {describe_move(last)}"
        return AliasMoved(
            f"{self.name} of {self.model!r} pointed to {_named(standing.version)} when the comparison started, and no "
            f"longer does ({what}): compare again with what it points to now"
        )


def describe_move(move: Move) -> str:
    """A move in a line."""
    at = datetime.fromtimestamp(move.at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    why = f": {move.reason}" if move.reason else ""
    return f"{move.action} of {_named(move.version)} in place of {_named(move.before)} by {move.by} at {at}{why}"


def _named(version: str | None) -> str:
    return "no version" if version is None else f"version {version}"
