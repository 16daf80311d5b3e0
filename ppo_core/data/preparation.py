"""Puts the rows of all sources where they belong: tokenized into the tables of a dataset."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from ppo_core.data.dataset import Limits, Longest, PromptMaker, in_parts, supervised_rows
from ppo_core.data.rows import Row
from ppo_core.data.shares import shares_of
from ppo_core.data.tables import EXAMPLES, PROMPTS, TableBuilder, prompt_document
from ppo_core.records import InputError
from ppo_core.spec import DatasetSpec

ROWS_AT_ONCE = 1000
PROMPT_SPLITS = ("train", "eval")


@dataclass
class Tally:
    """What became of the rows of one source: how many were `read`, and how many are in the table of its split."""

    source: str
    split: str
    read: int = 0
    rows: int = 0


@dataclass
class Preparation:
    """The tables that grow, and what became of each source so far."""

    spec: DatasetSpec
    tokenizer: Any
    limits: Limits
    tallies: list[Tally] = field(default_factory=list)
    makers: dict[str, PromptMaker] = field(default_factory=dict)
    tables: dict[str, TableBuilder] = field(default_factory=dict)

    def add_prompts(self, split: str, source: str, rows: Iterable[Row]) -> None:
        """The prompts of one source. Raises InputError naming a row."""
        tally = self._tally(source, split)
        maker = self.makers.setdefault(split, PromptMaker(self.tokenizer, self.spec.answer_column, self.limits))
        table = self.tables.setdefault(split, TableBuilder(PROMPTS))
        for part in in_parts(rows, ROWS_AT_ONCE):
            tally.read += len(part)
            for prompt in maker.prompts(part):
                table.add(prompt_document(prompt))
                tally.rows += 1

    def add_examples(self, source: str, rows: Iterable[Row]) -> None:
        """The SFT examples of one source."""
        tally = self._tally(source, "sft")
        table = self.tables.setdefault("sft", TableBuilder(EXAMPLES))
        for part in in_parts(rows, ROWS_AT_ONCE):
            tally.read += len(part)
            for example in supervised_rows(part, self.tokenizer, context_length=self.limits.context_length):
                table.add(example)
                tally.rows += 1

    def finished(self) -> dict[str, pa.Table]:
        """The table of each split."""
        return {split: table.table() for split, table in self.tables.items()}

    def longest(self) -> Longest:
        """The longest prompt of all splits."""
        return max((maker.longest for maker in self.makers.values()), key=lambda longest: longest.tokens)

    def sources(self) -> list[dict[str, Any]]:
        """What `sources.json` says: of each source its rows and, where sources have weights, its draws in an epoch.

        Empty where there is nothing to tell: one source, of which every row counts. Raises InputError for a source
        that would never be drawn from.
        """
        if len(self.spec.sources) == 1:
            return []
        documents = [vars(tally).copy() for tally in self.tallies]
        train = [document for document in documents if document["split"] == "train"]
        weights = [source.weight for source in self.spec.sources if source.weight is not None]
        if weights:
            for document, share in zip(train, shares_of([one["rows"] for one in train], weights), strict=True):
                if not share.draws:
                    raise InputError(
                        f"{document['source']} has so little weight that no epoch would draw from it: raise its "
                        "weight, or take it out of dataset.train"
                    )
                document["draws"] = share.draws
        return documents

    def _tally(self, source: str, split: str) -> Tally:
        self.tallies.append(Tally(source, split))
        return self.tallies[-1]
