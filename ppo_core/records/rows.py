"""The rows of the tables that stages make."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


class TokenSequence(NamedTuple):
    """One prompt with one response, as token ids; batches of them are ragged lists.

    >>> TokenSequence(prompt_ids=[5, 6], response_ids=[7, 8, 2])
    TokenSequence(prompt_ids=[5, 6], response_ids=[7, 8, 2])

    In a batch of this and ``([5], [9])`` everything per token is ``[B=2, R=3]`` with the response mask
    ``[[True, True, True], [True, False, False]]``.
    """

    prompt_ids: list[int]
    response_ids: list[int]


Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class PromptRow:
    """One prompt of a dataset.

    >>> PromptRow("3f1c", "7+5=", [10, 20, 8], "2", {"level": 1}).reference_answer
    '2'

    `prompt` is text or a list of chat messages; `reference_answer` is any JSON value, just as the user's row has it, or
    None; `metadata` holds every other column of the row.
    """

    prompt_id: str
    prompt: str | Messages
    prompt_token_ids: list[int]
    reference_answer: Any
    metadata: dict[str, Any]


@dataclass(frozen=True)
class RolloutRow:
    """One sampled response.

    >>> RolloutRow("3f1c", 0, [10, 20], [8, 2], "2", [-0.5, -0.1], "stop").finished
    True

    `response_token_ids` includes what ended it (EOS, or a stop that the spec names) when `finish_reason` is "stop";
    `sampler_logprobs` has one entry per response token, of the distribution that was really sampled; `response` is the
    text without special tokens at its end. `temperature` is the prompt's own, where prompts have one (None: the run's).
    """

    prompt_id: str
    sample_index: int
    prompt_token_ids: list[int]
    response_token_ids: list[int]
    response: str
    sampler_logprobs: list[float]
    finish_reason: str
    temperature: float | None = None

    @property
    def finished(self) -> bool:
        """Whether the policy ended the response by itself (EOS, or a stop of the spec), not the length limit."""
        return self.finish_reason == "stop"


@dataclass(frozen=True)
class ScoreRow:
    """The score of one response: the weighted sum of its components, or None where it could not be scored.

    >>> ScoreRow("3f1c", 0, 1.1, {"correct": 1.0, "format": 0.1}, False, None).score
    1.1

    `token_scores` has the parts of the score by the response's token (from 0) that each is credited at, where a reward
    gave it in parts; they add up to it. None: all of it is credited at the last token.
    """

    prompt_id: str
    sample_index: int
    score: float | None
    components: dict[str, float | None]
    truncated: bool
    error: str | None
    token_scores: dict[int, float] | None = None
