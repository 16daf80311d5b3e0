"""A reward model whose weights two ranks share says of each text what it says whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from ppo_core.models.classifier import Classifier, passes
from tests.ppo_core.scoring.shared_rewards_program import CASES, texts
from tests.ppo_core.tiny_models import VOCABULARY, tiny_tokenizer


def facts(scored: Path, case: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((scored / "score-2.json").read_text())[case]
    return found


@torch.inference_mode()
def alone(folder: Path, name: str, dtype: str) -> list[float]:
    """By transformers, one text at a time: the head's number at the last token, of RoBERTa at the first."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=dtype).eval()
    found = []
    for text in texts():
        hidden = model.base_model(torch.tensor([text])).last_hidden_state
        scored = model.classifier(hidden)[0, 0] if name == "roberta" else model.score(hidden)[0, -1, 0]
        found.append(float(scored))
    return found


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_say_what_the_model_says_of_each_text_alone(scored: Path, case: str) -> None:
    name, dtype, _ = CASES[case]
    expected, found = alone(scored / name, name, dtype), facts(scored, case)["first"]
    assert len({round(score, 2) for score in expected}) == len(expected)
    # bfloat16 has 8 bits, and a batch rounds otherwise than a single text.
    assert found == pytest.approx(expected, abs=1e-5 if dtype == "float32" else 0.03)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_say_what_one_process_says_to_the_bit_where_weights_lie_alike(scored: Path, case: str) -> None:
    """Mapped from a file, weights may begin at any eighth byte, and MKL then rounds otherwise, by a last bit."""
    name, dtype, budget = CASES[case]
    tiny_tokenizer().save_pretrained(scored / name)
    whole = Classifier(scored / name, dtype=dtype, trust_remote_code=False)
    assert facts(scored, case)["first"] == pytest.approx(whole.scores(texts(), budget), abs=1e-6)
    for parameter in whole.model.parameters():
        parameter.data = parameter.data.clone()
    assert facts(scored, case)["first"] == whole.scores(texts(), budget)


@pytest.mark.parametrize("case", CASES)
def test_what_was_aside_for_a_while_is_the_same_afterwards(scored: Path, case: str) -> None:
    found = facts(scored, case)
    assert found["left"] == 0
    assert found["again"] == found["first"]


@pytest.mark.parametrize("case", CASES)
def test_each_rank_holds_about_half_of_the_weights_between_passes(scored: Path, case: str) -> None:
    found = facts(scored, case)
    for held in found["held"]:
        assert 0.5 * found["whole"] <= held < 0.57 * found["whole"]


def test_progress_counts_the_texts_of_all_ranks(scored: Path) -> None:
    assert facts(scored, "uneven")["told"] == [2, 4, 6, 8, 9]
    # In passes of up to 20 tokens, the longest text, each padded: 20, 20 | 20, 7+9 | 12, 1+3+3.
    assert facts(scored, "small")["told"] == [2, 5, 9]


def test_passes_have_all_texts_once_within_their_budget_and_pad_with_a_token_that_is_in_none_of_them() -> None:
    given = texts()
    for budget in (20, 24, 40, 4096):
        found = passes(given, budget, VOCABULARY)
        assert sorted(row for one in found for row in one.rows) == list(range(len(given)))
        for rows, pad in found:
            longest = max(len(given[row]) for row in rows)
            assert len(rows) == 1 or longest * len(rows) <= budget
            assert all(pad not in given[row] for row in rows)
            assert pad >= 0 or len({len(given[row]) for row in rows}) == 1
    assert passes([], 4096, VOCABULARY) == []
