"""The reward `correct` behind HTTP: a server as the reward kind `http` asks it.

uvicorn --app-dir examples/arithmetic --port 8100 reward_server:app
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from reward import correct

app = FastAPI(title="rewards of the arithmetic task")


class Sample(BaseModel):
    """A response to a prompt: text, or messages, of which some may only call tools; with its tokens, if it has any."""

    prompt: str | list[dict[str, Any]]
    response: str
    token_ids: list[int] | None = None
    reference_answer: Any = None
    metadata: dict[str, Any] = {}


class Batch(BaseModel):
    """Some samples."""

    samples: list[Sample]


class Scores(BaseModel):
    """One number for each sample, in their order; null where a sample has no score."""

    scores: list[float | None]


@app.post("/score")
def score(batch: Batch) -> Scores:
    """1.0 for the right answer, plus 0.1 for the form; none where there is no answer to compare with."""
    prompts = [str(sample.prompt) for sample in batch.samples]
    answers = [str(sample.reference_answer) for sample in batch.samples]
    found = correct(prompts, [sample.response for sample in batch.samples], answers)
    known = [sample.reference_answer is not None for sample in batch.samples]
    return Scores(scores=[score if there else None for score, there in zip(found, known, strict=True)])
