"""A user's rows, whatever they lie in, one after the other: each an object with a `prompt`, checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from ppo_core.data.files import array_named_lines, rows_of_file
from ppo_core.data.text_files import Found
from ppo_core.processes.plugins import RAISED, Sources, load_function, place_of
from ppo_core.records import InputError
from ppo_core.spec.paths import is_function

SHOWN = 200


class Row(NamedTuple):
    """A row of a user's under our names, where it is, and its prompt as it is written there."""

    where: str
    content: dict[str, Any]
    prompt: Any = None


@dataclass(frozen=True)
class Columns:
    """What the user calls the columns that have these names here, which he drops, and how his prompts become messages.

    Texts stay texts, unless they go through the chat template (`chat`); `system_prompt` comes first, unless the prompt
    has one of its own. `met` are the names that rows had so far.
    """

    prompt: str = "prompt"
    completion: str = "completion"
    chosen: str = "chosen"
    rejected: str = "rejected"
    dropped: tuple[str, ...] = ()
    chat: bool = False
    system_prompt: str | None = None
    met: set[str] = field(default_factory=set, compare=False)

    def renamed(self, where: str, row: Mapping[str, Any]) -> dict[str, Any]:
        """The row under our names. Raises InputError where a system prompt would stand before a bare text."""
        self.met.update(row)
        if self.dropped:
            row = {name: value for name, value in row.items() if name not in self.dropped}
        prompt: Any = row[self.prompt]
        if self.chat and isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        if self.system_prompt is not None:
            if isinstance(prompt, str):
                raise InputError(
                    f"{where} has a text prompt, which gets no chat template and so no dataset.system_prompt: set "
                    "dataset.chat=true, or remove the system prompt"
                )
            if prompt[0]["role"] != "system":
                prompt = [{"role": "system", "content": self.system_prompt}, *prompt]
        ours = {self.prompt, self.completion, "completion"}
        others = {name: value for name, value in row.items() if name not in ours}
        completion = {"completion": row[self.completion]} if self.completion in row else {}
        return {**others, "prompt": prompt, **completion}


class Refusals:
    """Rows that cannot be used: what is said of the first, and how many there are.

    Inside a `with`, an InputError is such a row, and what comes after goes on.

    >>> refusals = Refusals()
    >>> for where in ("row 2", "row 5"):
    ...     with refusals:
    ...         raise InputError(f"{where} is empty")
    >>> refusals.tell()
    Traceback (most recent call last):
    ppo_core.records.errors.InputError: row 2 is empty (1 more row cannot be used either)
    """

    def __init__(self) -> None:
        self._count, self._first = 0, ""

    def __enter__(self) -> None:
        """Nothing yet."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        if not isinstance(error, InputError):
            return False
        self._count, self._first = self._count + 1, self._first or str(error)
        return True

    def tell(self) -> None:
        """Raise InputError where one was noted since the last time."""
        others, first, self._count, self._first = self._count - 1, self._first, 0, ""
        if first:
            more = f" ({others} more row{'s' if others > 1 else ''} cannot be used either)" if others else ""
            raise InputError(f"{first}{more}")


PLAIN = Columns()
Shape = Callable[[str, Mapping[str, Any]], Mapping[str, Any]]
"""Makes a row, of which the text says where it is, one that has a prompt. Raises InputError where it cannot."""


@dataclass(frozen=True)
class Rows:
    """The rows of a source. A file is read anew each time, so that only a few of its rows are in memory."""

    source: str
    path: Path
    generated: list[Any] | None
    columns: Columns = PLAIN
    shape: Shape | None = None

    def __iter__(self) -> Iterator[Row]:
        """The rows that can be used; after the last, InputError for the first that cannot be, and how many more."""
        count, file, refusals = 0, "", Refusals()
        with refusals:  # what ends the file counts as a row, too
            for found in self._found():
                count = count + 1 if found.file == file else 1
                file = found.file
                with refusals:
                    yield self._checked(count, found)
        refusals.tell()
        if not count:
            raise InputError(f"{self.source} holds no rows: give at least one prompt")

    def _found(self) -> Iterator[Found]:
        return rows_of_file(self.path) if self.generated is None else (Found(None, row) for row in self.generated)

    def _checked(self, number: int, found: Found) -> Row:
        if isinstance(found.content, InputError):
            raise found.content
        file = f" of {found.file}" if found.file else ""
        line = "" if found.line in (None, number) else f" (line {found.line})"
        where, row = f"{self.source}: row {number}{file}{line}", found.content
        if not isinstance(row, Mapping):
            path = self.path / found.file
            lines = found.line is not None and path.suffix.lower() != ".json"
            remedy = f": {array_named_lines(path)}" if isinstance(row, list) and lines else ""
            raise InputError(
                f"{where} is of type {type(row).__name__}, not an object with a `{self.columns.prompt}`{remedy}"
            )
        row = row if self.shape is None else self.shape(where, row)
        _check_prompt(where, row, self.columns.prompt)
        return Row(where, self.columns.renamed(where, row), row[self.columns.prompt])


def read_rows(source: str, sources: Sources, columns: Columns = PLAIN, shape: Shape | None = None) -> Rows:
    """The rows of a file, a saved dataset or a `file.py:function` of the user, which is called here, once.

    Raises InputError for a function that gives none; what is wrong with a file, iterating says.
    """
    generated = _generated(source, sources) if is_function(source) else None
    return Rows(source, sources.place(source), generated, columns, shape)


def value_in(row: Mapping[str, Any], column: str) -> Any:
    """What a row has under a name, or under `outer.inner` in an object that it has under `outer`; None for nothing.

    >>> value_in({"reward_model": {"style": "rule", "ground_truth": "72"}}, "reward_model.ground_truth")
    '72'
    """
    outer, _, inner = column.partition(".")
    if column not in row and isinstance(within := row.get(outer), Mapping):
        return within.get(inner)
    return row.get(column)


def check_text(what: str, text: str) -> None:
    """Raise InputError for a text that is no Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{what} with {text[error.start]!r} at character {error.start + 1}, a lone surrogate (half of a "
            "character): remove it, or write both halves"
        ) from None


def shown(value: Any) -> str:
    """A value as a message shows it."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"


def _generated(source: str, sources: Sources) -> list[Any]:
    function = load_function(source, sources)
    try:
        return list(function())
    except RAISED as error:
        place = place_of(error, sources)
        raise InputError(f"{source} gave no rows: it raised {type(error).__name__}: {error}{place}") from error


def _check_prompt(where: str, row: Mapping[str, Any], column: str) -> None:
    prompt = row.get(column)
    if isinstance(prompt, str) and prompt:
        check_text(f"{where} has a prompt", prompt)
        return
    messages = isinstance(prompt, list) and prompt and all(isinstance(m, Mapping) and "role" in m for m in prompt)
    if not messages:
        names = ", ".join(sorted(map(str, row))) or "none"
        found = "" if column in row else f"; the row has the columns {names}: name the right one in prompt_column"
        raise InputError(
            f"{where} has {column}={shown(prompt)}: it must be text, or a list of messages with roles{found}"
        )
    for count, message in enumerate(prompt or [], 1):
        _check_message(f"{where}: message {count} of the prompt", message)


def check_question(row: Row) -> None:
    """Raise InputError for a prompt that has its answer."""
    prompt = row.content["prompt"]
    if not isinstance(prompt, str) and prompt[-1]["role"] == "assistant":
        raise InputError(
            f"{row.where} has a prompt that ends with a message of the assistant, which the policy would answer: leave "
            "that message out (as a completion of sft.data it can be learned)"
        )


def _check_message(where: str, message: Mapping[str, Any]) -> None:
    content = message.get("content")
    if isinstance(content, str):
        check_text(f"{where} has a content", content)
    elif isinstance(content, list):
        raise InputError(f"{where} has a list of parts as its content: join their texts into one text")
    elif not message.get("tool_calls"):
        lack = f"content={content!r}" if "content" in message else "no content"
        raise InputError(f"{where} has {lack}: give it a text, as in {{'role': 'user', 'content': 'What is 1+1?'}}")
