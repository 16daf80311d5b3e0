"""The journal of a registered model's aliases: every move of one, numbered, written once. It is the truth of them.

MLflow moves an alias for whoever asks last, and cannot be asked to move it only if it still points somewhere. A journal
can: its pages are created, never changed, so of all that want to write page 7 exactly one does, and the others must
look at what it says. MLflow's alias follows the journal; see `infra.mlflow.alias`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any, Literal
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from infra.artifacts.manifest import ArtifactRef
from infra.backend import open_log
from infra.runs.checksummed_json import CHECKSUM, RecordCorrupted, encode
from infra.storage.write_once import WriteOnceLog

PROMOTIONS = "promotions"
NONCE = "nonce"
_PAGE = re.compile(r"\d{6}\.json")
_WRITTEN = re.compile(r"(\d{6})\.(json|followed)")
Action = Literal["promote", "rollback", "found"]


class Move(BaseModel):
    """One move of an alias: from which version (None: it did not exist) to which, who, when, why, and on what evidence.

    `found` is a move that somebody made in MLflow itself, written down when it was noticed. `artifacts` is what the
    evidence consists of, and the checkpoint of the version.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    number: int = Field(ge=1)
    model: str
    alias: str
    action: Action
    version: str | None
    before: str | None
    by: str
    at_ms: int
    reason: str = ""
    evidence: dict[str, JsonValue] = {}
    artifacts: tuple[ArtifactRef, ...] = ()


class Journal:
    """The journal of one registered model."""

    def __init__(self, pages: WriteOnceLog, model: str) -> None:
        self.model = model
        self._pages = pages
        self._known: dict[str, Move] = {}

    def moves(self) -> list[Move]:
        """Every move of every alias of the model, in order.

        Raises RecordCorrupted where a page is damaged, missing, of another model, or does not go on where the last one
        of its alias ended.
        """
        names = self._pages.names()
        if _missing(names) is not None:
            names = self._pages.names()  # what was written while they were listed need not have been listed
        if (number := _missing(names)) is not None:
            raise self._corrupted(number, "is missing, and later ones are there")
        pages = [name for name in names if _PAGE.fullmatch(name)]
        for name in pages:
            if name not in self._known:  # pages never change
                self._known[name] = self._read(name)
        moves = [self._known[name] for name in pages]
        at: dict[str, str | None] = {}
        for number, move in enumerate(moves, 1):
            if (move.number, move.model) != (number, self.model):
                raise self._corrupted(number, f"is page {move.number} of model {move.model!r}")
            if move.before != at.get(move.alias, move.before):
                raise self._corrupted(
                    number,
                    f"moves {move.alias} from version {move.before}, and the one before it had moved it to "
                    f"{at[move.alias]}: one of the two is not what was written",
                )
            at[move.alias] = move.version
        return moves

    def moves_of(self, alias: str) -> list[Move]:
        """Those of one alias."""
        return [move for move in self.moves() if move.alias == alias]

    def append(self, move: Move) -> bool:
        """Write the move's page; False if another one has this number."""
        name = _page(move.number)
        # Two that write the same must still be told apart.
        return self._pages.create(name, encode(name, {**move.model_dump(mode="json"), NONCE: uuid4().hex}))

    def applied(self, move: Move) -> bool:
        """Whether MLflow's alias is known to have followed this move."""
        return self._pages.read(_applied(move), bytes, ValueError) is not None

    def note_applied(self, move: Move) -> None:
        """Note that MLflow's alias has followed."""
        self._pages.create(_applied(move), json.dumps({NONCE: uuid4().hex}).encode())

    def _read(self, name: str) -> Move:
        def parse(content: bytes) -> Move:
            document = _read_checksummed(name, content) or {}
            try:
                return Move.model_validate({key: value for key, value in document.items() if key != NONCE})
            except ValidationError as error:
                raise self._corrupted(int(name[:6]), "is damaged") from error

        move = self._pages.read(name, parse, RecordCorrupted)
        if move is None:
            raise self._corrupted(int(name[:6]), "is gone")
        return move

    def _corrupted(self, number: int, complaint: str) -> RecordCorrupted:
        return RecordCorrupted(
            f"page {_page(number)} of the promotions of {self.model!r} {complaint}: bring it back from a copy of the "
            "store; until then no alias of this model is moved"
        )


class Journals:
    """The journals of a store's models, by one connection."""

    def __init__(self, root: str) -> None:
        self._pages = open_log(root, PROMOTIONS)
        self._journals: dict[str, Journal] = {}

    def models(self) -> list[str]:
        """The models of which aliases were moved. Raises RecordCorrupted where a folder bears no model's name."""
        return [model_name(name) for name in self._pages.folders()]

    def of(self, model: str) -> Journal:
        """The journal of one of them, or of one without any move so far."""
        if model not in self._journals:
            self._journals[model] = Journal(self._pages.below(folder_name(model)), model)
        return self._journals[model]


def folder_name(model: str) -> str:
    """A model's name as one that every store can have: `=` and two hexadecimal digits for each unusual byte."""
    return "".join(chr(byte) if _plain(byte) else f"={byte:02X}" for byte in model.encode())


def model_name(folder: str) -> str:
    """The model whose folder has this name. Raises RecordCorrupted where it is none's."""
    with suppress(UnicodeError):
        model = re.sub(rb"=([0-9A-F]{2})", lambda match: bytes([int(match[1], 16)]), folder.encode()).decode()
        if folder_name(model) == folder:
            return model
    raise RecordCorrupted(
        f"folder {folder!a} among the promotions bears the name of no model: give it back the one it had, or move it "
        "out of the store"
    )


def _plain(byte: int) -> bool:
    return re.fullmatch(rb"[A-Za-z0-9_-]", bytes([byte])) is not None


def _missing(names: Collection[str]) -> int | None:
    """The first page that is not there although a later one is, or the note that the alias has followed it."""
    there = {*names}
    last = max((int(match[1]) for name in there if (match := _WRITTEN.fullmatch(name))), default=0)
    return next((number for number in range(1, last + 1) if _page(number) not in there), None)


def _page(number: int) -> str:
    return f"{number:06d}.json"


def _applied(move: Move) -> str:
    return f"{move.number:06d}.followed"


def _read_checksummed(name: str, content: bytes) -> Mapping[str, Any] | None:
    """The document written under this name; None where its checksum does not hold."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict) or document.pop(CHECKSUM, None) is None or encode(name, document) != content:
        return None
    return document
