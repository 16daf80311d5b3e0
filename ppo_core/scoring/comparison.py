"""Whether one policy answers the same prompts better than another: paired differences and their bootstrap.

Pairing takes the difficulty of the prompts out of the comparison: what varies is the difference on each of them.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ppo_core.data.tables import read_prompts, read_rollouts, read_scores
from ppo_core.records import CompareJob, InputError, PromptRow, RolloutRow, ScoreRow, derive_seed
from ppo_core.spec.promotion import OF_THE_SCORE, fewest_pairs

if TYPE_CHECKING:
    from ppo_core.processes.protocol import Job

CHUNK = 2**22
SHOWN = 5
SIDES = ("candidate", "champion")


@dataclass(frozen=True)
class Gain:
    """The mean of paired differences (candidate minus champion) and its confidence interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Pair:
    """Both answers to one prompt, with the value of the compared metric; None where one could not be scored."""

    candidate: tuple[RolloutRow, float | None]
    champion: tuple[RolloutRow, float | None]

    @property
    def difference(self) -> float | None:
        """Candidate minus champion."""
        left, right = self.candidate[1], self.champion[1]
        return None if left is None or right is None else left - right


def paired_bootstrap(differences: Sequence[float], *, confidence: float, resamples: int, seed: int) -> Gain:
    """The percentile interval of the mean of `differences` over resamples of the pairs.

    Source: Efron and Tibshirani, An Introduction to the Bootstrap (1993), sections 13.3 and 15.
    Raises: InputError for fewer differences than `fewest_pairs`.
    """
    if len(differences) < (fewest := fewest_pairs(confidence)):
        raise InputError(
            f"{len(differences)} prompts with a score from both policies are too few to compare with promotion."
            f"confidence={confidence:g}, at least {fewest} are needed: raise evaluation.num_prompts"
        )
    values = np.asarray(differences, dtype=np.float64)
    generator = np.random.default_rng(seed)
    rows = max(1, CHUNK // len(values))
    means = [
        values[generator.integers(0, len(values), size=(min(rows, resamples - start), len(values)))].mean(axis=1)
        for start in range(0, resamples, rows)
    ]
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(np.concatenate(means), [tail, 1.0 - tail])
    return Gain(float(values.mean()), float(low), float(high))


def compare_evaluations(job: Job) -> dict[str, Any]:
    """Write `comparison.json`: gain and interval, both means and lengths, and the prompts that got worse most."""
    spec = CompareJob.model_validate(job.spec)
    sides = {name: _evaluation(job.inputs[name].path, spec) for name in SIDES}
    pairs = pair(sides["candidate"], sides["champion"])
    differences = [found.difference for found in pairs]
    known = [difference for difference in differences if difference is not None]
    if (lost := len(pairs) - len(known)) > spec.max_failed_fraction * len(pairs):
        raise InputError(
            f"{lost} of {len(pairs)} held-out prompts have no {spec.metric} from both policies, more than "
            f"reward.max_failed_fraction={spec.max_failed_fraction:g} allows: see why in the column error of both "
            "evaluations' sampled_scores.parquet, or raise it, which has both scored again"
        )
    seed = derive_seed("comparison", *(job.inputs[name].digest for name in SIDES))
    gain = paired_bootstrap(known, confidence=spec.confidence, resamples=spec.resamples, seed=seed)
    metrics = {"promotion/gain": gain.mean, "promotion/gain_low": gain.low, "promotion/gain_high": gain.high}
    for name, rows in sides.items():
        given = [value for _, value in rows if value is not None]
        metrics[f"promotion/{name}_{spec.metric}"] = statistics.fmean(given)
        metrics[f"promotion/{name}_length"] = statistics.fmean(len(row.response_token_ids) for row, _ in rows)
    prompts = {row.prompt_id: row for row in read_prompts(job.inputs["dataset"].path / "eval.parquet")}
    result = {
        "metrics": metrics,
        "pairs": len(known),
        "unscored": len(pairs) - len(known),
        "better": sum(difference > 0 for difference in known),
        "worse": sum(difference < 0 for difference in known),
        "setbacks": setbacks(pairs, prompts),
    }
    (job.output / "comparison.json").write_text(json.dumps(result, indent=2, sort_keys=True) + "\n")
    return result


def pair(
    candidate: Sequence[tuple[RolloutRow, float | None]], champion: Sequence[tuple[RolloutRow, float | None]]
) -> list[Pair]:
    """The answers to the same prompts side by side. Raises InputError unless both answered the same ones."""
    right = {(row.prompt_id, row.sample_index): (row, value) for row, value in champion}
    names = [(row.prompt_id, row.sample_index) for row, _ in candidate]
    alone = set(names) ^ set(right)
    if alone:
        raise InputError(
            f"{len(alone)} of the held-out prompts were answered by one of the two policies only (for example "
            f"{min(alone)[0]}): evaluate both on one held-out set; where dataset.too_long=drop left out other prompts "
            "because their tokenizers differ, raise dataset.max_prompt_tokens"
        )
    return [Pair(left, right[name]) for name, left in zip(names, candidate, strict=True)]


def setbacks(pairs: Sequence[Pair], prompts: dict[str, PromptRow]) -> list[dict[str, Any]]:
    """The prompts on which the candidate loses most, as people look at them."""
    lost = [(found.difference, number, found) for number, found in enumerate(pairs) if (found.difference or 0.0) < 0]
    return [
        {
            "prompt": prompts[found.candidate[0].prompt_id].prompt,
            **{side: answer[0].response for side, answer in zip(SIDES, (found.candidate, found.champion), strict=True)},
            "difference": difference,
        }
        for difference, _, found in sorted(lost, key=lambda item: item[:2])[:SHOWN]
    ]


def _evaluation(folder: Path, spec: CompareJob) -> list[tuple[RolloutRow, float | None]]:
    """The sampled answers of an evaluation, each with its value of the metric."""
    rows, scores = read_rollouts(folder / "responses.parquet"), read_scores(folder / "sampled_scores.parquet")
    return [(row, _value(score, spec)) for row, score in zip(rows, scores, strict=True)]


def _value(row: ScoreRow, spec: CompareJob) -> float | None:
    if spec.metric not in OF_THE_SCORE:
        return row.components[spec.metric]
    if row.score is None or spec.metric == "score":
        return row.score
    return float(row.score >= spec.pass_score)
