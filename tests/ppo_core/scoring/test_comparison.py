"""Is one policy better than another on the same prompts? The interval against exact ones, and the job on tables."""

from __future__ import annotations

import itertools
import json
import math
import random
import statistics
from collections import Counter
from pathlib import Path

import pytest

from ppo_core.data.tables import write_rollouts, write_scores
from ppo_core.processes.protocol import Job, JobInput
from ppo_core.records import InputError, PromptRow, RolloutRow, ScoreRow
from ppo_core.scoring.comparison import compare_evaluations, paired_bootstrap
from tests.ppo_core.written_tables import write_prompts

JOB = {"metric": "score", "pass_score": 1.0, "max_failed_fraction": 0.5, "confidence": 0.5, "resamples": 2000}


def exact_interval(differences: list[float], confidence: float) -> tuple[float, float]:
    """The bootstrap distribution of the mean, by writing down every resample: n**n of them."""
    means = Counter(
        round(statistics.fmean(drawn), 12) for drawn in itertools.product(differences, repeat=len(differences))
    )
    total, tail = sum(means.values()), (1 - confidence) / 2
    ends = []
    for share in (tail, 1 - tail):
        below = 0
        for mean in sorted(means):
            below += means[mean]
            if below >= share * total:
                ends.append(mean)
                break
    return ends[0], ends[1]


@pytest.mark.parametrize(
    ("differences", "confidence"),
    [([0.0, 1.0, 3.0], 0.7), ([1.0, -1.0, 0.25, 0.5], 0.85), ([0.0, 0.0, 0.0, 0.0, 1.0], 0.9)],
)
def test_the_interval_is_that_of_all_resamples(differences: list[float], confidence: float) -> None:
    gain = paired_bootstrap(differences, confidence=confidence, resamples=200_000, seed=1)
    assert gain.mean == pytest.approx(statistics.fmean(differences), abs=1e-12)
    assert (gain.low, gain.high) == pytest.approx(exact_interval(differences, confidence), abs=1e-9)


def test_for_many_prompts_it_is_the_normal_interval() -> None:
    draw = random.Random(3)
    differences = [draw.gauss(0.02, 0.5) for _ in range(4000)]
    gain = paired_bootstrap(differences, confidence=0.95, resamples=20_000, seed=2)
    half = 1.959964 * statistics.stdev(differences) / math.sqrt(4000)
    # Resampling leaves about 1 % of the half width as noise.
    assert (gain.low, gain.high) == pytest.approx((gain.mean - half, gain.mean + half), abs=0.04 * half)


def test_equal_differences_leave_no_doubt_and_the_seed_decides_the_rest() -> None:
    gain = paired_bootstrap([0.5] * 9, confidence=0.95, resamples=100, seed=1)
    assert (gain.low, gain.mean, gain.high) == (0.5, 0.5, 0.5)
    values = [0.0, 1.0, 0.3, 0.7, 0.2]
    intervals = [paired_bootstrap(values, confidence=0.5, resamples=101, seed=seed) for seed in (1, 1, 2)]
    assert intervals[0] == intervals[1] != intervals[2]


@pytest.mark.parametrize(("confidence", "fewest"), [(0.5, 2), (0.9, 5), (0.95, 6), (0.99, 8)])
def test_of_too_few_prompts_all_may_be_better_by_chance(confidence: float, fewest: int) -> None:
    assert 0.5**fewest <= (1 - confidence) / 2 < 0.5 ** (fewest - 1)
    for count in (0, 1, fewest - 1):
        too_few = rf"^{count} prompts .*confidence={confidence:g}, at least {fewest} are needed: raise"
        with pytest.raises(InputError, match=too_few):
            paired_bootstrap([1.0] * count, confidence=confidence, resamples=100, seed=1)
    assert paired_bootstrap([1.0] * fewest, confidence=confidence, resamples=100, seed=1).low == 1.0


Scores = dict[str, float | None]


def evaluation(folder: Path, scores: Scores, length: int, gold: Scores) -> Path:
    """What an evaluation leaves of a policy whose answers have these scores and this length."""
    folder.mkdir()
    rows = [RolloutRow(name, 0, [1], [5] * length, f"{folder.name} {name}", [-1.0] * length, "stop") for name in scores]
    write_rollouts(folder / "responses.parquet", rows)
    table = [
        ScoreRow(name, 0, score, {"r": score, "gold": gold.get(name)}, False, None) for name, score in scores.items()
    ]
    write_scores(folder / "sampled_scores.parquet", table)
    return folder


def compare(
    tmp_path: Path, candidate: Scores, champion: Scores, gold: tuple[Scores, Scores] = ({}, {}), **spec: object
) -> dict:
    """The job on two such evaluations; `gold` are the scores of both by a reward of weight 0."""
    dataset, output = tmp_path / "dataset", tmp_path / "output"
    dataset.mkdir()
    output.mkdir()
    prompts = [PromptRow(name, f"prompt {name}", [1], None, {}) for name in {**candidate, **champion}]
    write_prompts(dataset / "eval.parquet", prompts)
    inputs = {
        "candidate": JobInput(evaluation(tmp_path / "new", candidate, 6, gold[0]), "aa"),
        "champion": JobInput(evaluation(tmp_path / "old", champion, 4, gold[1]), "bb"),
        "dataset": JobInput(dataset, "cc"),
    }
    result = compare_evaluations(Job("compare_evaluations", inputs, output, {**JOB, **spec}, lambda *_: None))
    assert json.loads((output / "comparison.json").read_text()) == result
    return result


def test_answers_are_paired_by_their_prompts(tmp_path: Path) -> None:
    candidate = {"a": 1.0, "b": 0.5, "c": None, "d": 0.0, "e": 1.0}
    champion = {"e": 1.0, "d": 1.0, "c": 0.5, "b": 0.75, "a": 0.0}
    result = compare(tmp_path, candidate, champion)
    assert (result["pairs"], result["unscored"], result["better"], result["worse"]) == (4, 1, 1, 2)
    metrics = result["metrics"]
    assert metrics["promotion/gain"] == pytest.approx((1.0 - 0.25 + 0.0 - 1.0) / 4)
    assert metrics["promotion/candidate_score"] == pytest.approx(2.5 / 4)
    assert metrics["promotion/champion_score"] == pytest.approx(3.25 / 5)
    assert (metrics["promotion/candidate_length"], metrics["promotion/champion_length"]) == (6.0, 4.0)
    assert result["setbacks"] == [
        {"prompt": "prompt d", "candidate": "new d", "champion": "old d", "difference": -1.0},
        {"prompt": "prompt b", "candidate": "new b", "champion": "old b", "difference": -0.25},
    ]


def test_accuracy_counts_what_passes(tmp_path: Path) -> None:
    result = compare(tmp_path, {"a": 1.1, "b": 0.9}, {"a": 0.99, "b": 1.0}, metric="accuracy")
    assert result["metrics"]["promotion/gain"] == 0.0
    assert (result["better"], result["worse"]) == (1, 1)


def test_one_reward_alone_may_be_compared(tmp_path: Path) -> None:
    """The candidate has the better score, and is worse by gold; a prompt without the score, but with gold, counts."""
    gold: tuple[Scores, Scores] = {"a": 1.0, "b": 2.0, "c": None}, {"a": 2.0, "b": 2.5, "c": 9.0}
    candidate: Scores = {"a": 5.0, "b": None, "c": 5.0}
    result = compare(tmp_path, candidate, {"a": 0.0, "b": 0.0, "c": 0.0}, gold, metric="gold")
    assert (result["pairs"], result["unscored"], result["better"], result["worse"]) == (2, 1, 0, 2)
    metrics = result["metrics"]
    assert metrics["promotion/gain"] == -0.75
    assert (metrics["promotion/candidate_gold"], metrics["promotion/champion_gold"]) == (1.5, 4.5)
    assert [one["difference"] for one in result["setbacks"]] == [-1.0, -0.5]


def test_pairing_takes_the_difficulty_of_the_prompts_out(tmp_path: Path) -> None:
    """Scores vary by 10 from prompt to prompt, the gain by 0.01: unpaired, nothing could be said of it."""
    hard = {str(number): float(number % 11) for number in range(200)}
    better = {name: score + 0.1 + (0.01 if int(name) % 2 else -0.01) for name, score in hard.items()}
    metrics = compare(tmp_path, better, hard, confidence=0.9)["metrics"]
    assert 0.098 < metrics["promotion/gain_low"] < 0.1 < metrics["promotion/gain_high"] < 0.102


def test_answers_to_other_prompts_cannot_be_compared(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"2 of the held-out prompts were answered by one .* \(for example b\)"):
        compare(tmp_path, {"a": 1.0, "b": 1.0}, {"a": 1.0, "c": 1.0})


def test_few_pairs_with_a_score_of_many_decide_nothing(tmp_path: Path) -> None:
    """Half of the prompts may lack a score: each policy lacks two others of five here, and so four pairs do."""
    names = "abcde"
    candidate = {name: None if name in "ab" else 1.0 for name in names}
    champion = {name: None if name in "cd" else 0.0 for name in names}
    with pytest.raises(
        InputError,
        match=r"4 of 5 held-out prompts have no score from both policies, more than reward\.max_failed_fraction=0\.5 "
        r"allows: see why .*, or raise it",
    ):
        compare(tmp_path, candidate, champion)
    (tmp_path / "again").mkdir()
    assert compare(tmp_path / "again", {**candidate, "a": 1.0, "b": 1.0}, champion)["unscored"] == 2
