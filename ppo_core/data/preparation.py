"""Puts the rows of all sources where they belong: tokenized into the tables of a dataset."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import pyarrow as pa

from ppo_core.data.dataset import (
    Encoded,
    Limits,
    Longest,
    PromptMaker,
    completion_text,
    encoded,
    in_parts,
    supervised_rows,
)
from ppo_core.data.number_columns import NumberColumn
from ppo_core.data.rows import Refusals, Row
from ppo_core.data.sieve import Sieve
from ppo_core.data.tables import EXAMPLES, PROMPTS, TableBuilder, prompt_document
from ppo_core.data.tallies import TOO_LONG, Tally, documents, in_words
from ppo_core.records import InputError
from ppo_core.spec import DatasetSpec

ROWS_AT_ONCE = 1000
PROMPT_SPLITS = ("train", "eval")


class Preparation:
    """The tables of a dataset as they grow, and what became of the rows of each source so far."""

    def __init__(self, spec: DatasetSpec, tokenizer: Any, limits: Limits, numbers: Sequence[NumberColumn] = ()) -> None:
        self.spec, self.tokenizer, self.limits = spec, tokenizer, limits
        self.tallies: list[Tally] = []
        self._sieve, self._refusals = Sieve.of(spec), Refusals()
        self._makers = {split: self._maker(numbers if split == "train" else ()) for split in PROMPT_SPLITS}
        self._tables: dict[str, TableBuilder] = {}

    def add_prompts(self, split: str, source: str, rows: Iterable[Row]) -> None:
        """The prompts of one source; some of those to train on may be held out. Raises InputError naming a row."""
        tally = self._tally(source, split)
        for goes_to, part, tokens in self._tokenized(split, rows, tally):
            table = self._tables.setdefault(goes_to, TableBuilder(PROMPTS))
            made = 0
            for prompt in self._makers[goes_to].prompts(part, tokens):
                table.add(prompt_document(prompt))
                made += 1
            tally.drop(TOO_LONG, len(part) - made)
            if goes_to == split:
                tally.rows += made
            else:
                tally.held_out += made
        self._refusals.tell()

    def add_examples(self, source: str, rows: Iterable[Row]) -> None:
        """The SFT examples of one source."""
        tally = self._tally(source, "sft")
        table = self._tables.setdefault("sft", TableBuilder(EXAMPLES))
        examples = partial(
            supervised_rows,
            context_length=self.limits.context_length,
            refusals=self._refusals,
            drop_too_long=self.spec.too_long == "drop",
        )
        for _, part, tokens in self._tokenized("sft", rows, tally):
            made = 0
            for example in examples(part, tokens, self.tokenizer):
                table.add(example)
                made += 1
            tally.rows += made
            tally.drop(TOO_LONG, len(part) - made)
        self._refusals.tell()

    def _tokenized(
        self, split: str, rows: Iterable[Row], tally: Tally
    ) -> Iterator[tuple[str, list[Row], list[Encoded]]]:
        """The sorted rows with their prompts' token ids. While one part is worked on, the next is tokenized beside."""
        waiting: deque[tuple[str, list[Row], Future[list[Encoded]]]] = deque()
        with ThreadPoolExecutor(1) as pool:
            for goes_to, part in self._sorted(split, rows, tally):
                waiting.append((goes_to, part, pool.submit(encoded, self.tokenizer, part)))
                if len(waiting) > 1:
                    ready_for, ready, tokens = waiting.popleft()
                    yield ready_for, ready, tokens.result()
            for ready_for, ready, tokens in waiting:
                yield ready_for, ready, tokens.result()

    def _sorted(self, split: str, rows: Iterable[Row], tally: Tally) -> Iterator[tuple[str, list[Row]]]:
        """The rows in parts, each with the split that it goes to."""
        for part in in_parts(rows, ROWS_AT_ONCE):
            tally.read += len(part)
            places: dict[str, list[Row]] = {}
            for row in part:
                answer = completion_text(row.content) if split == "sft" else None
                with self._refusals:
                    goes_to, reason = self._sieve.place(split, row, answer)
                    if goes_to:
                        places.setdefault(goes_to, []).append(row)
                    else:
                        tally.drop(reason, 1)
            yield from places.items()

    def finished(self) -> dict[str, pa.Table]:
        """The table of each split. Raises InputError where no row is left to train on, or to start from, or where none
        to train on has a value in a column of numbers."""
        tables = {split: table.table() for split, table in self._tables.items()}
        for split in ("train", "sft"):
            tallies = [tally for tally in self.tallies if tally.split == split]
            if tallies and not len(tables.get(split, ())):
                held_out = any(tally.held_out for tally in tallies) and not any(tally.dropped for tally in tallies)
                remedy = f"see dataset.duplicates, too_long and {self.limits.key}"
                remedy = "lower dataset.evaluation_fraction, or give more rows" if held_out else remedy
                raise InputError(f"no rows are left ({in_words(tallies)}): {remedy}")
        self._makers["train"].check_read()
        return tables

    def longest(self) -> Longest:
        """The longest prompt of all splits."""
        return max((maker.longest for maker in self._makers.values()), key=lambda longest: longest.tokens)

    def sources(self) -> list[dict[str, Any]]:
        """What `sources.json` says: of each source its rows and, where sources have weights, its draws in an epoch.

        Empty where there is nothing to tell: one source, of which every row counts by the spec. Raises InputError for
        a source that would never be drawn from.
        """
        if len(self.spec.sources) == 1 and not self.spec.selects:
            return []
        return documents(self.tallies, self.spec.weights, "dataset.train")

    def _maker(self, numbers: Sequence[NumberColumn]) -> PromptMaker:
        spec, drop = self.spec, self.spec.too_long == "drop"
        return PromptMaker(
            self.tokenizer,
            spec.answer_column,
            self.limits,
            spec.id_column,
            drop_too_long=drop,
            numbers=numbers,
            refusals=self._refusals,
        )

    def _tally(self, source: str, split: str) -> Tally:
        self.tallies.append(Tally(source, split))
        return self.tallies[-1]
