"""DPO: the loss against loops from the paper's equation, its limits, and what a spec and rows may say."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ppo_core.algorithms.dpo import dpo_loss, implicit_rewards
from ppo_core.algorithms.preferences import pairs_of
from ppo_core.data.preferences import read_preferences
from ppo_core.data.rankings import RankingMaker, read_rankings
from ppo_core.data.rows import PLAIN, Columns
from ppo_core.processes.plugins import Sources
from ppo_core.records import InputError, TokenSequence
from ppo_core.spec import DpoSpec, SpecError
from tests.ppo_core.scoring.scoring_jobs import write_lines
from tests.ppo_core.tiny_models import EOS, tiny_tokenizer
from tests.ppo_core.written_tables import write_rankings

POLICY = [[-3.0, -4.5], [-10.0, -9.5, -11.0], [-0.5, -0.2]]
REFERENCE = [[-3.5, -4.0], [-9.0, -9.75, -10.5], [-2.0, -0.1]]
MARGINS = [0.0, 0.0, 0.3]
Rows = list[list[float]]


def by_the_equation(policy: Rows, reference: Rows, margins: list[float], beta: float, smoothing: float) -> float:
    """Equation 7 in float64, summed over rows, each the mean over its pairs; of two responses there is one pair."""
    total = 0.0
    for pi, ref, margin in zip(policy, reference, margins, strict=True):
        terms = []
        for w in range(len(pi)):
            for l in range(w + 1, len(pi)):  # noqa: E741 (the paper's letter)
                h = beta * (pi[w] - ref[w]) - beta * (pi[l] - ref[l])
                right, wrong = (math.log(1 / (1 + math.exp(-x))) for x in (h - margin, -h - margin))
                terms.append(-(1 - smoothing) * right - smoothing * wrong)
        total += sum(terms) / len(terms)
    return total


def flat(rows: Rows) -> torch.Tensor:
    return torch.tensor([number for row in rows for number in row])


def ours(beta: float, smoothing: float = 0.0, policy: torch.Tensor | None = None, margins: Any = MARGINS) -> Any:
    rewards = implicit_rewards(flat(POLICY) if policy is None else policy, flat(REFERENCE), beta)
    pairs = pairs_of([len(row) for row in POLICY])
    return dpo_loss(rewards, torch.tensor(margins), pairs, label_smoothing=smoothing)


@pytest.mark.parametrize(("beta", "smoothing"), [(0.1, 0.0), (1.0, 0.0), (0.5, 0.2), (5.0, 0.0)])
def test_the_loss_is_that_of_the_paper(beta: float, smoothing: float) -> None:
    expected = by_the_equation(POLICY, REFERENCE, MARGINS, beta, smoothing)
    assert float(ours(beta, smoothing).total) == pytest.approx(expected, abs=1e-5)


MUTANTS: dict[str, Callable[[], float]] = {
    "no reference": lambda: by_the_equation(POLICY, [[0.0] * len(row) for row in REFERENCE], MARGINS, 0.5, 0.0),
    "roles swapped": lambda: by_the_equation(REFERENCE, POLICY, MARGINS, 0.5, 0.0),
    "beta outside": lambda: 0.5 * by_the_equation(POLICY, REFERENCE, MARGINS, 1.0, 0.0),
    "margin added": lambda: by_the_equation(POLICY, REFERENCE, [-margin for margin in MARGINS], 0.5, 0.0),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_oracle_tells_a_wrong_loss(mutant: str) -> None:
    assert abs(float(ours(0.5).total) - MUTANTS[mutant]()) > 0.05


def test_the_gradient_is_that_of_finite_differences() -> None:
    logprobs = flat(POLICY).requires_grad_()
    ours(0.7, 0.1, logprobs).total.backward()
    assert logprobs.grad is not None

    def at(index: int, step: float) -> float:
        numbers = iter(enumerate(number for row in POLICY for number in row))
        moved = [[number + (step if place == index else 0.0) for place, number in row] for row in _cut(numbers)]
        return by_the_equation(moved, REFERENCE, MARGINS, 0.7, 0.1)

    for index, found in enumerate(logprobs.grad.tolist()):
        assert found == pytest.approx((at(index, 1e-5) - at(index, -1e-5)) / 2e-5, abs=1e-5)


def _cut(numbers: Any) -> list[list[tuple[int, float]]]:
    return [[next(numbers) for _ in row] for row in POLICY]


def test_what_is_measured_was_worked_out_by_hand() -> None:
    """Implicit rewards at beta 2: [1, -1], [-2, 0.5, -1], [3, -0.2]; of the second row's three pairs one is right."""
    found = dict(zip(("chosen", "rejected", "margins", "accuracies"), ours(2.0).measured, strict=True))
    expected = {
        "chosen": 1 + (-2 - 2 + 0.5) / 3 + 3,
        "rejected": -1 + (0.5 - 1 - 1) / 3 - 0.2,
        "margins": 2 + (-2.5 - 1 + 1.5) / 3 + 3.2,
        "accuracies": 1 + 1 / 3 + 1,
    }
    assert {name: float(total) for name, total in found.items()} == pytest.approx(expected, abs=1e-5)


NONE = [0.0, 0.0, 0.0]


def test_at_its_start_the_loss_is_that_of_a_coin_whatever_beta_is() -> None:
    for beta in (0.01, 1.0, 100.0):
        found = ours(beta, policy=flat(REFERENCE), margins=NONE)
        assert float(found.total) == pytest.approx(3 * math.log(2), abs=1e-5)
        assert [float(total) for total in found.measured] == [0.0, 0.0, 0.0, 0.0]  # a tie is no hit


def test_a_beta_near_zero_pushes_every_pair_alike() -> None:
    logprobs, beta = flat(POLICY).requires_grad_(), 1e-4
    found = ours(beta, policy=logprobs, margins=NONE)
    found.total.backward()
    assert float(found.total.detach()) == pytest.approx(3 * math.log(2), abs=1e-3)
    assert logprobs.grad is not None
    expected = [-1 / 2, 1 / 2, -1 / 3, 0.0, 1 / 3, -1 / 2, 1 / 2]
    assert (logprobs.grad / beta).tolist() == pytest.approx(expected, abs=1e-3)


def test_a_large_beta_counts_only_the_pairs_that_are_wrong_by_how_much() -> None:
    """-log sigmoid(beta h) / beta goes to -h where h < 0, and to 0 elsewhere."""
    wrong = (1.25 + 0.5) / 3  # h of the second row's pairs: -1.25, -0.5, 0.75
    assert float(ours(1e4, margins=NONE).total) / 1e4 == pytest.approx(wrong, abs=1e-5)


def test_what_all_responses_to_a_prompt_share_changes_nothing() -> None:
    shift = torch.tensor([4.0, 4.0, -7.0, -7.0, -7.0, 0.5, 0.5])
    assert float(ours(0.5, policy=flat(POLICY) + shift).total) == pytest.approx(float(ours(0.5).total), abs=1e-5)


ROW = {"prompt": "w2 w3", "chosen": "w4 w5", "rejected": "w6"}


def prepared(folder: Path, row: dict[str, Any], columns: Columns = PLAIN, *, chat: bool = False, most: int = 20) -> Any:
    write_lines(folder / "pairs.jsonl", [row])
    given = read_preferences("pairs.jsonl", Sources(folder), columns)
    maker = RankingMaker(tiny_tokenizer(chat=chat), "it", most, None, by_policy=True)
    return [ranking for _, ranking in maker.rankings(given)]


def test_prompt_and_response_are_told_apart_and_a_response_ends(tmp_path: Path) -> None:
    found = prepared(tmp_path, ROW)
    assert found[0].answers() == [TokenSequence([2, 3], [4, 5, EOS]), TokenSequence([2, 3], [6, EOS])]
    write_rankings(tmp_path / "train.parquet", found)
    assert list(read_rankings(tmp_path / "train.parquet")) == found


def test_prompts_have_the_form_of_those_that_are_answered(tmp_path: Path) -> None:
    columns = Columns(chat=True, system_prompt="w9")
    assert prepared(tmp_path, ROW, columns, chat=True)[0].answers()[1] == TokenSequence([9, 2, 3, 7], [6, EOS])


@pytest.mark.parametrize(
    ("row", "columns", "message"),
    [
        ({**ROW, "prompt": " "}, PLAIN, "row 1 has an empty prompt .no tokens.: give it some"),
        ({**ROW, "chosen": "w4 " * 20}, PLAIN, r"row 1 has a text of 23 tokens, but preferences.max_tokens=20"),
        ({**ROW, "chosen": "odd", "rejected": "even"}, PLAIN, "1: chosen and rejected become the same tokens"),
        ({**ROW, "rejected": "w4 w5"}, PLAIN, "row 1 has chosen == rejected"),
        (ROW, Columns(chat=True), "row 1: prompts are lists of messages, but the tokenizer has no chat template"),
        (ROW, Columns(system_prompt="w9"), "set dataset.chat=true, or remove the system prompt"),
    ],
)
def test_a_row_that_cannot_be_learned_from_is_refused(
    tmp_path: Path, row: dict[str, Any], columns: Columns, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        prepared(tmp_path, row, columns)


GIVEN: dict[str, Any] = {
    "preferences": {"train": "a.jsonl", "evaluation": "b.jsonl"},
    "dataset": {"train": "c.jsonl", "evaluation": "d.jsonl"},
    "model": {"path": "m"},
    "reward": {"function": "r.py:score"},
}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("dpo.beta=0", r"dpo.beta=0: must be greater than 0"),
        ("dpo.beta=-0.1", r"dpo.beta=-0.1: must be greater than 0"),
        ("dpo.label_smoothing=0.5", r"dpo.label_smoothing=0.5: must be less than 0.5"),
        ("training.num_ranks=3", r"num_ranks=3 does not divide the 32 sequences of a batch \(dpo.batch_size\)"),
        ("training.microbatch_size=4", r"microbatch_size=4 would separate responses .* set training.microbatch_tokens"),
        ("model.dtype=bfloat16", r"set zero_stage to 1"),
        ("rollout.samples_per_prompt=2", r"rollout.samples_per_prompt=2 applies to iterations .* leave it out"),
        ("evaluation.every=2", r"evaluation.every=2 applies to iterations that train on sampled responses"),
        ("engines.offload_reference=true", r"offload_reference=True is of a reference that is held, .*: leave it out"),
        ("dpo.centring=0.1", r"dpo.centring: unknown key"),
        ("iterations=3", r"iterations: unknown key"),
        ("registry.alias=champion", r"where `ppoflow promote` puts policies that passed .*\(by default candidate\)"),
        (
            "dataset.train=[{path: a.jsonl, weight: 3}, {path: b.jsonl, weight: 1}]",
            "a weight of dataset.train sets the order of prompts .* but DPO trains on preferences: leave them all out",
        ),
    ],
)
def test_a_spec_that_cannot_be_meant_is_refused(override: str, message: str) -> None:
    spec = DpoSpec.model_validate(GIVEN)
    with pytest.raises(SpecError, match=message):
        spec.with_overrides([override])


def test_without_held_out_prompts_nothing_is_sampled() -> None:
    spec = DpoSpec.model_validate(GIVEN)
    assert "rollout" in spec.roles
    assert "rollout" not in spec.with_overrides(["dataset.evaluation=null"]).roles


def test_what_has_no_effect_is_told() -> None:
    overrides = ["dataset.evaluation=null", "evaluation.num_prompts=3", "engines.placement_timeout_s=5"]
    overrides += ["rollout.max_response_tokens=9"]
    told = " ".join(DpoSpec.model_validate(GIVEN).with_overrides(overrides).notes())
    assert "evaluation.num_prompts=3" in told
    assert "engines.placement_timeout_s" in told
    assert "nothing is sampled, so without effect: rollout.max_response_tokens" in told
