"""Responses as they are finished, in any order: how many there are and, where the job's sender wants them, which."""

from __future__ import annotations

import time
from typing import Any

from ppo_core.processes.protocol import Job
from ppo_core.records import RolloutRow

TELL_EVERY_S = 0.5
MOST_TOKENS = 2**18
"""Of the responses in one message, so that its line stays far below what a reader takes."""


class FinishedResponses:
    """Those of one job, of which there will be `total`."""

    def __init__(self, job: Job, total: int) -> None:
        self._job = job
        self._total = total
        self._rows: dict[int, RolloutRow] = {}
        self._untold: list[RolloutRow] = []
        self._told = time.perf_counter()

    def add(self, number: int, row: RolloutRow) -> None:
        """The response to request `number`, from 0."""
        self._rows[number] = row
        if self._job.report is not None:
            self._untold.append(row)

    def tell(self) -> None:
        """Say how far the job is, every half second."""
        if time.perf_counter() - self._told > TELL_EVERY_S:
            if not self._untold:
                self._job.progress(len(self._rows), self._total, "responses")
            self._report()
            self._told = time.perf_counter()

    def all(self) -> list[RolloutRow]:
        """All of them in the order of their requests. The last ones are reported too, which Ray may not pass on."""
        self._report()
        return [self._rows[number] for number in range(self._total)]

    def _report(self) -> None:
        while self._untold and self._job.report is not None:
            part, tokens = list[dict[str, Any]](), 0
            while self._untold and (not part or tokens + len(self._untold[0].response_token_ids) <= MOST_TOKENS):
                row = self._untold.pop(0)
                part.append(as_document(row))
                tokens += len(row.response_token_ids)
            self._job.report(len(self._rows), self._total, "responses", part)


def as_document(row: RolloutRow) -> dict[str, Any]:
    """What a reward needs of a response; see `FinishedResponse`."""
    return {
        "prompt_id": row.prompt_id,
        "sample_index": row.sample_index,
        "response": row.response,
        "response_token_ids": row.response_token_ids,
    }
