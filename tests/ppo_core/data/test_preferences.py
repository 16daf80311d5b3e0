"""Preferences: the loss against loops from the papers' equations, rows and their complaints, and what is measured."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ppo_core.algorithms.preferences import pairs_of, preference_loss
from ppo_core.data.preferences import held_out_trained, read_preferences, read_rankings, tokenized, write_rankings
from ppo_core.data.rows import Columns
from ppo_core.processes.plugins import Sources
from ppo_core.records import InputError
from ppo_core.scoring.preferences import CALIBRATION_BINS, calibration, distribution, pair_metrics
from ppo_core.spec import PreferencesSpec, RewardModelSpec, SpecError
from tests.ppo_core.scoring.scoring_jobs import write_lines
from tests.ppo_core.tiny_models import tiny_tokenizer

ROWS = [[0.3, -1.2], [2.0, 0.1, 0.4, -3.0], [-0.5, 0.5], [1.0, 0.0, -0.7]]
MARGINS = [0.0, 0.0, 0.25, 0.0]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def by_the_equations(rows: list[list[float]], margins: list[float], smoothing: float, centring: float) -> float:
    """The sum over rows of -1/(K over 2) sum_{i<j} …, in float64 (see the module of the loss)."""
    total = 0.0
    for scores, margin in zip(rows, margins, strict=True):
        size, row = len(scores), 0.0
        for i in range(size):
            for j in range(i + 1, size):
                better, worse = scores[i], scores[j]
                row -= (1 - smoothing) * math.log(sigmoid(better - worse - margin))
                row -= smoothing * math.log(sigmoid(worse - better - margin))
                row += centring * (better + worse) ** 2
        total += row / (size * (size - 1) / 2)
    return total


def ours(smoothing: float, centring: float, scores: torch.Tensor | None = None) -> torch.Tensor:
    flat = torch.tensor([score for row in ROWS for score in row]) if scores is None else scores
    pairs = pairs_of([len(row) for row in ROWS])
    return preference_loss(flat, torch.tensor(MARGINS), pairs, label_smoothing=smoothing, centring=centring)


@pytest.mark.parametrize(("smoothing", "centring"), [(0.0, 0.0), (0.2, 0.0), (0.0, 0.01), (0.1, 0.3)])
def test_the_loss_is_that_of_the_papers(smoothing: float, centring: float) -> None:
    expected = by_the_equations(ROWS, MARGINS, smoothing, centring)
    assert float(ours(smoothing, centring)) == pytest.approx(expected, abs=1e-5)


def wrong_way_round(rows: list[list[float]], *rest: Any) -> float:
    return by_the_equations([row[::-1] for row in rows], *rest)


def sum_over_pairs(rows: list[list[float]], margins: list[float], *rest: float) -> float:
    """InstructGPT's equation without its 1/(K over 2)."""
    counts = [math.comb(len(row), 2) for row in rows]
    each = [by_the_equations([row], [margin], *rest) for row, margin in zip(rows, margins, strict=True)]
    return sum(count * loss for count, loss in zip(counts, each, strict=True))


def added_margin(rows: list[list[float]], margins: list[float], *rest: float) -> float:
    return by_the_equations(rows, [-margin for margin in margins], *rest)


@pytest.mark.parametrize("mutant", [wrong_way_round, sum_over_pairs, added_margin])
def test_the_oracle_tells_a_wrong_loss(mutant: Callable[..., float]) -> None:
    assert abs(float(ours(0.1, 0.01)) - mutant(ROWS, MARGINS, 0.1, 0.01)) > 0.05


def test_the_gradient_is_that_of_finite_differences() -> None:
    flat = [score for row in ROWS for score in row]
    scores = torch.tensor(flat, requires_grad=True)
    ours(0.1, 0.05, scores).backward()
    assert scores.grad is not None

    def at(values: list[float]) -> float:
        parts = iter(values)
        return by_the_equations([[next(parts) for _ in row] for row in ROWS], MARGINS, 0.1, 0.05)

    for index, found in enumerate(scores.grad.tolist()):
        up, down = ([v + (step if n == index else 0) for n, v in enumerate(flat)] for step in (1e-5, -1e-5))
        assert found == pytest.approx((at(up) - at(down)) / 2e-5, abs=1e-5)


def test_metrics_are_those_worked_out_by_hand() -> None:
    scores = [[1.0, 0.0], [0.0, 2.0], [1.0, 0.5, 1.0]]
    found = pair_metrics(scores)
    differences = [1.0, -2.0, 0.5, 0.0, -0.5]
    assert found["reward_model/accuracy"] == pytest.approx(2 / 5)  # a tie is no hit
    assert found["reward_model/margin"] == pytest.approx(-1 / 5)
    assert found["reward_model/log_loss"] == pytest.approx(sum(-math.log(sigmoid(d)) for d in differences) / 5)
    assert found["reward_model/score_mean"] == pytest.approx(5.5 / 7)
    bins = calibration(scores)
    expected = {
        (1, sigmoid(0.0), 0.0),
        (2, sigmoid(0.5), 0.5),
        (1, sigmoid(1.0), 1.0),
        (1, sigmoid(2.0), 0.0),
    }
    assert {(b["count"], round(b["confidence"], 9), b["accuracy"]) for b in bins} == {
        (count, round(sure, 9), right) for count, sure, right in expected
    }
    error = sum(count * abs(right - sure) for count, sure, right in expected) / 5
    assert found["reward_model/calibration_error"] == pytest.approx(error)


def test_a_score_that_is_not_finite_is_refused() -> None:
    with pytest.raises(InputError, match=r"held-out row 2 with \[1.0, nan\], which is not finite: .* lower fit"):
        pair_metrics([[1.0, 0.0], [1.0, math.nan]])


def test_calibrated_scores_have_no_error_and_certain_ones_fit_into_the_last_bin() -> None:
    right = math.log(0.75 / 0.25)
    rows = [[right, 0.0]] * 3 + [[0.0, right]]
    assert pair_metrics(rows)["reward_model/calibration_error"] == pytest.approx(0.0, abs=1e-12)
    assert [b["count"] for b in calibration([[1000.0, 0.0]])] == [1]
    assert len(calibration([[x / 10, 0.0] for x in range(100)])) == CALIBRATION_BINS


def test_the_distribution_counts_every_response_once() -> None:
    spread = distribution(ROWS)
    assert (sum(spread["best"]), sum(spread["others"])) == (4, 7)
    assert (spread["edges"][0], spread["edges"][-1]) == (-3.0, 2.0)


def read(folder: Path, rows: list[Any]) -> Any:
    write_lines(folder / "pairs.jsonl", rows)
    return read_preferences("pairs.jsonl", Sources(folder))


def test_pairs_and_rankings_become_token_ids(tmp_path: Path) -> None:
    rows = [
        {"prompt": "w2 ", "chosen": "w3", "rejected": "w4 w5", "margin": 2, "id": 7},
        {"prompt": "w2 ", "responses": ["w5", "w6", "w7"]},
        {"prompt": "w2 ", "chosen": [{"role": "assistant", "content": "w3"}], "rejected": ""},
    ]
    found = tokenized(read(tmp_path, rows), tiny_tokenizer(), "it", max_tokens=9, context_length=None)
    assert [row.responses for row in found] == [[[2, 3], [2, 4, 5]], [[2, 5], [2, 6], [2, 7]], [[2, 3], [2]]]
    assert [row.margin for row in found] == [2.0, 0.0, 0.0]
    write_rankings(tmp_path / "train.parquet", found)
    assert read_rankings(tmp_path / "train.parquet") == found


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


TALK = [said("user", "w5"), said("assistant", "w6"), said("user", "w2"), said("assistant", "w3")]
OTHER = [*TALK[:3], said("assistant", "w4")]


@pytest.mark.parametrize("prompt", [{}, {"prompt": "w2"}, {"prompt": TALK[:3]}], ids=["in them", "a text", "messages"])
def test_conversations_begin_with_their_prompt(tmp_path: Path, prompt: dict[str, Any]) -> None:
    (found,) = read(tmp_path, [{**prompt, "chosen": TALK, "rejected": OTHER}])
    assert found[:3] == (TALK[:3], {"chosen": "w3", "rejected": "w4"}, 0.0)


def test_a_table_of_text_has_margins_as_text_and_wrong_rows_are_counted(tmp_path: Path) -> None:
    (tmp_path / "pairs.csv").write_text("prompt,chosen,rejected,margin\nw2,w3,w4,1.5\nw2,w4,w5,\n")
    assert [row.margin for row in read_preferences("pairs.csv", Sources(tmp_path))] == [1.5, 0.0]
    with pytest.raises(InputError, match=r"row 2 has margin='nan'.* \(2 more rows cannot be used either\)$"):
        read(tmp_path, [GOOD, {**GOOD, "margin": "nan"}, {**GOOD, "chosen": 5}, {**GOOD, "rejected": "w3"}])


def test_held_out_prompts_that_are_trained_on_are_counted_and_not_all_of_them_may_be(tmp_path: Path) -> None:
    spec = PreferencesSpec(train="a", evaluation="b")
    chats = [{**GOOD, "prompt": [{**said("user", "w5"), **more}]} for more in ({}, {"name": None}, {"name": "w6"})]
    train = read(tmp_path, [GOOD, chats[0], GOOD])
    held_out = read(tmp_path, [{**GOOD, "chosen": "w9"}, *chats[1:], GOOD])
    assert held_out_trained(train, held_out, spec) == 3
    with pytest.raises(InputError, match=r"^b: all 3 held-out rows .2 prompts. .* among the 2 prompts of a: accuracy"):
        held_out_trained(train, [*held_out[:2], held_out[3]], spec)


NAMES = Columns("question", chosen="better")


def test_columns_have_the_names_that_the_spec_gives_them(tmp_path: Path) -> None:
    rows: list[Any] = [
        {"question": "w2", "better": "w3", "rejected": "w4", "margin": 1, "prompt": "of something else", "chosen": 7},
        {"question": "w5", "responses": ["w6", "w7"]},
    ]
    write_lines(tmp_path / "pairs.jsonl", rows)
    one, other = read_preferences("pairs.jsonl", Sources(tmp_path), NAMES)
    assert one[:3] == ("w2", {"chosen": "w3", "rejected": "w4"}, 1.0)
    assert other[:3] == ("w5", {"responses[0]": "w6", "responses[1]": "w7"}, 0.0)
    write_lines(tmp_path / "pairs.jsonl", [*rows, {"question": "w2", "chosen": "w3", "rejected": "w4"}])
    with pytest.raises(InputError, match=r"row 3 has no column better \(its columns: chosen, .* in chosen_column"):
        read_preferences("pairs.jsonl", Sources(tmp_path), NAMES)


GOOD = {"prompt": "w2 ", "chosen": "w3", "rejected": "w4"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "w2", "chosen": "w3"}, r"row 2 has no column rejected \(its columns: chosen, prompt\)"),
        ({**GOOD, "chosen": 5}, r"pairs.jsonl: row 2 has chosen=5: give a text, or a list of one message"),
        ({**GOOD, "rejected": None}, r"pairs.jsonl: row 2 has rejected=None: give a text"),
        (
            {**GOOD, "rejected": "w3"},
            r"pairs.jsonl: row 2 has chosen == rejected \('w3'\): neither is better; drop the row",
        ),
        ({**GOOD, "responses": ["w3", "w4"]}, r"pairs.jsonl: row 2 has both responses and chosen or rejected"),
        ({"prompt": "w2", "responses": ["w3"]}, r"row 2 has responses=\['w3'\]: give a list of two or more"),
        ({"prompt": "w2", "responses": ["w3", "w4", "w3"]}, r"row 2 has responses\[0\] == responses\[2\] \('w3'\)"),
        ({"prompt": "w2", "responses": ["w3", 4]}, r"pairs.jsonl: row 2 has responses\[1\]=4: give a text"),
        ({**GOOD, "margin": -1}, r"pairs.jsonl: row 2 has margin=-1: give a number of 0 or more, or leave it out"),
        ({**GOOD, "margin": "much"}, r"pairs.jsonl: row 2 has margin='much': give a number"),
        ({"prompt": "w2", "responses": ["w3", "w4"], "margin": 1}, r"pairs.jsonl: row 2 has margin and responses"),
        ({**GOOD, "chosen": "a\ud800"}, r"row 2 has chosen with '\\ud800' at character 2, a lone surrogate"),
        ({"chosen": "w3", "rejected": "w4"}, r"row 2 has no column prompt .its columns: chosen, rejected.: add it, or"),
        (
            {"chosen": TALK, "rejected": [*TALK[:1], TALK[2]]},
            r"row 2 has chosen and rejected conversations that differ",
        ),
        ({"prompt": "w9", "chosen": TALK, "rejected": OTHER}, r"row 2 has prompt='w9', but its conversations ask 'w2'"),
    ],
)
def test_a_row_that_is_no_preference_is_refused(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read(tmp_path, [GOOD, row])


def test_empty_lines_are_counted_where_a_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n\n\n{"prompt": "a"}\n')
    with pytest.raises(InputError, match=r"pairs.jsonl: row 2 \(line 4\) has no column chosen"):
        read_preferences("pairs.jsonl", Sources(tmp_path))


@pytest.mark.parametrize(
    ("row", "limits", "message"),
    [
        ({**GOOD, "chosen": "w3 " * 9}, (9, None), r"row 2 has a text of 10 tokens, but dataset.max_tokens=9"),
        ({**GOOD, "chosen": "w3 " * 9}, (99, 8), r"row 2 has a text of 10 tokens, beyond the model's context 8"),
        ({**GOOD, "chosen": "odd", "rejected": "even"}, (9, None), r"2: chosen and rejected become the same"),
        ({**GOOD, "prompt": " ", "rejected": ""}, (9, None), r"row 2 has an empty text .no tokens.*text$"),
    ],
)
def test_a_text_that_cannot_be_read_is_refused(
    tmp_path: Path, row: dict[str, Any], limits: tuple[int, int | None], message: str
) -> None:
    given = read(tmp_path, [GOOD, row])
    with pytest.raises(InputError, match=message):
        tokenized(given, tiny_tokenizer(), "it", max_tokens=limits[0], context_length=limits[1])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.num_ranks=3", r"num_ranks=3 does not divide the 32 sequences of a batch \(fit.batch_size\)"),
        ("fit.label_smoothing=0.5", r"fit.label_smoothing=0.5: must be less than 0.5"),
        (
            "model.lora={rank: 4}",
            "model.lora works with PPO and DPO only, and a reward model trains all weights: leave it out",
        ),
        ("training.microbatch_size=4", r"microbatch_size=4 would separate responses .* set training.microbatch_tokens"),
        ("engines.rollout_engines=2", r"engines.rollout_engines=2 configures the rollout engine, .*: leave it out"),
        ("dataset.evaluation=a.jsonl", "train and evaluation are both a.jsonl: accuracy would be measured on what was"),
        ("dataset.prompt_column=chosen", "prompt_column and chosen_column are both 'chosen': give each its own column"),
        ("registry.alias=latest", r"MLflow reserves latest"),
        ("rollout.temperature=1", r"rollout: unknown key"),
        ("model.dtype=bfloat16", r"set zero_stage to 1"),
    ],
)
def test_a_spec_that_cannot_be_meant_is_refused(override: str, message: str) -> None:
    given = {"dataset": {"train": "a.jsonl", "evaluation": "b.jsonl"}, "model": {"path": "m"}}
    spec = RewardModelSpec.model_validate(given)
    with pytest.raises(SpecError, match=message):
        spec.with_overrides([override])
