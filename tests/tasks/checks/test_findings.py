"""What a check says of the numbers that it found."""

from __future__ import annotations

from typing import Any

import pytest

from tasks.checks.findings import findings_of
from tests.tasks.run_contexts import smoke_spec


def found(train: int, sequences: int | None) -> dict[str, str]:
    """The smoke spec draws 32 prompts for as many responses."""
    facts: dict[str, Any] = {
        "counts": {"train": train, "sft": 1},
        "left_out": {},
        "scores": [1.0],
        "longest_prompt": 2,
        "context_length": 8,
        "model_type": "llama",
        "parameters": 10,
        "sequences": sequences,
    }
    return findings_of(smoke_spec(), facts, "r", None, "store")


@pytest.mark.parametrize(
    ("train", "said"),
    [
        (1, "1 prompt to train on (each drawn about 32 times per iteration), 1 SFT example"),
        (20, "20 prompts to train on (each drawn about 1.6 times per iteration), 1 SFT example"),
        (32, "32 prompts to train on, 1 SFT example"),
        (1000, "1,000 prompts to train on, 1 SFT example"),
    ],
)
def test_few_prompts_are_told_to_be_drawn_often(train: int, said: str) -> None:
    assert found(train, None)["data"] == said
    assert found(train, None)["reward"].endswith(" on 1 row: 1")


@pytest.mark.parametrize(
    ("sequences", "said"),
    [
        (32, "32 such sequences at once"),
        (31, "31 such sequences at once, of the 32 responses of an iteration; raise it where memory is free"),
        (1, "1 such sequence at once, of the 32 responses of an iteration; raise it where memory is free"),
    ],
)
def test_a_cache_is_told_beside_the_responses_of_an_iteration(sequences: int, said: str) -> None:
    assert found(40, sequences)["rollouts"].endswith(f" has room for {said}")
