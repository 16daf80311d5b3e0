"""Preferences as token ids: made of texts, written and read with only a few rows as Python's objects at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from ppo_core.data.preferences import Preference, first_equal
from ppo_core.data.rows import Refusals
from ppo_core.data.tables import ROWS_AT_ONCE, TOKENS, StoredRows
from ppo_core.data.tallies import TOO_LONG
from ppo_core.records import InputError, TokenSequence

RANKINGS = pa.schema([("responses", pa.list_(TOKENS)), ("margin", pa.float64()), ("prompt_tokens", pa.int32())])


class Ranking(NamedTuple):
    """A preference as token ids, each a prompt with a response, the best first.

    `prompt_tokens` of each are the prompt's; a reward model reads both as one, and does not ask.

    >>> Ranking([[5, 6, 7], [5, 6, 8]], 0.0, prompt_tokens=2).answers()[1]
    TokenSequence(prompt_ids=[5, 6], response_ids=[8])
    """

    responses: list[list[int]]
    margin: float
    prompt_tokens: int = 0

    @property
    def size(self) -> int:
        """Tokens of all responses, the prompt counted with each."""
        return sum(map(len, self.responses))

    def cost(self, *, padded: bool) -> int:
        """Tokens that a pass over all of them computes on, `padded` to the longest."""
        return len(self.responses) * max(map(len, self.responses)) if padded else self.size

    def answers(self) -> list[TokenSequence]:
        """Prompt and response of each."""
        return [TokenSequence(ids[: self.prompt_tokens], ids[self.prompt_tokens :]) for ids in self.responses]


class RankingsWriter:
    """A table of rankings that grows in a file: of all rows at most a few are in memory. Without a path: nowhere."""

    def __init__(self, path: Path | None) -> None:
        self._writer = None if path is None else pq.ParquetWriter(path, RANKINGS)
        self._waiting: list[dict[str, Any]] = []

    def add(self, ranking: Ranking) -> None:
        """One more row."""
        if self._writer is not None:
            self._waiting.append(ranking._asdict())
            if len(self._waiting) == ROWS_AT_ONCE:
                self._settle(self._writer)

    def close(self) -> None:
        """The file is whole then."""
        if self._writer is not None:
            self._settle(self._writer)
            self._writer.close()

    def _settle(self, writer: pq.ParquetWriter) -> None:
        if self._waiting:
            writer.write_table(pa.Table.from_pylist(self._waiting, schema=RANKINGS))
            self._waiting = []


def read_rankings(path: Path) -> StoredRows[Ranking]:
    """The rows of a preference dataset's `train.parquet` or `eval.parquet`, in file order."""
    return StoredRows(pq.read_table(path), Ranking)


@dataclass(frozen=True)
class RankingMaker:
    """Makes rankings as a reward model will read them, or `by_policy` as a policy reads prompts and writes responses,
    EOS at the end. `name` is what the tokenizer is called there. With `drop_too_long` long ones are left out."""

    tokenizer: Any
    name: str
    max_tokens: int
    context_length: int | None
    by_policy: bool = False
    drop_too_long: bool = False

    def rankings(self, preferences: Iterable[Preference]) -> Iterator[tuple[Preference, Ranking | None]]:
        """Of each preference; None where it is left out, also for its length, which it says then.

        Raises InputError after the last for texts that are too long, or alike as tokens.
        """
        refusals = Refusals()
        for preference in preferences:
            if not preference.split:
                yield preference, None
                continue
            with refusals:
                ranking = _ranking(preference, self.tokenizer, self.name, by_policy=self.by_policy)
                if too_long := self._too_long(max(map(len, ranking.responses))):
                    if not self.drop_too_long:
                        raise InputError(f"{preference.where} has a text of {too_long}")
                    yield preference._replace(split="", left_out=TOO_LONG), None
                    continue
                _check_texts(preference, ranking, by_policy=self.by_policy)
                yield preference, ranking
        refusals.tell()

    def _too_long(self, length: int) -> str:
        """What is wrong with a text of so many tokens; empty: nothing."""
        section = "preferences" if self.by_policy else "dataset"
        if length > self.max_tokens:
            limit = f"{section}.max_tokens={self.max_tokens}: raise the limit"
            return f"{length} tokens, but {limit}, or set {section}.too_long=drop"
        if self.context_length is not None and length > self.context_length:
            limit = f"the model's context {self.context_length}: shorten it"
            return f"{length} tokens, beyond {limit}, or set {section}.too_long=drop"
        return ""


def _ranking(preference: Preference, tokenizer: Any, name: str, *, by_policy: bool) -> Ranking:
    from ppo_core.data.tokenization import encode_completions, encode_prompt, scored_tokens  # transformers: 0.7 s

    prompt, texts, margin, where, *_ = preference
    try:
        asked = encode_prompt(tokenizer, prompt) if by_policy else []
        if by_policy:
            responses = [[*asked, *answer] for answer in encode_completions(tokenizer, list(texts.values()))]
        else:
            responses = [scored_tokens(tokenizer, prompt, text, name) for text in texts.values()]
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    return Ranking(responses, margin, len(asked))


def _check_texts(preference: Preference, ranking: Ranking, *, by_policy: bool) -> None:
    where = preference.where
    if not all(ranking.responses) or (by_policy and not ranking.prompt_tokens):
        raise InputError(f"{where} has an empty {'prompt' if by_policy else 'text'} (no tokens): give it some text")
    if twins := first_equal(ranking.responses):
        names = " and ".join(list(preference.responses)[index] for index in twins)
        raise InputError(
            f"{where}: {names} become the same tokens: drop the row, or use a tokenizer that tells them apart"
        )
