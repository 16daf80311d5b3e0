"""Which prompts of an iteration are learned from: those whose responses got different scores.

    batch 0: rollouts, scores ─┐
    batch 1: rollouts, scores ─┼─► select_rollouts ─► rollouts, with the scores that chose them ─► score_rollouts
    ...                        ┘

Where all responses to a prompt got one score, none of them is better than the others, and a baseline over the group
leaves an advantage of 0. Source: Yu et al. 2025, DAPO (arXiv:2503.14476), section 3.2.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from ctypes import c_float
from dataclasses import replace
from math import inf
from typing import Any

from ppo_core.data.tables import check_aligned, read_rollouts, read_scores, rollout_facts, write_rollouts, write_scores
from ppo_core.processes.protocol import Job, JobInput
from ppo_core.records import RolloutRow, ScoreRow, SelectJob, content_digest
from ppo_core.spec import RewardSpec

SCORES, SCORED_BY = "scores.parquet", "scored_by.txt"


def has_signal(scores: Sequence[float | None]) -> bool:
    """Whether two of the responses to a prompt got different scores in float32, in which they are trained on; None is a
    response without one.

    >>> has_signal([1.0, None, 0.0]), has_signal([1.0, None, 1.0]), has_signal([1.0, None])
    (True, False, False)
    """
    return len({c_float(score).value for score in scores if score is not None}) > 1


def signals(
    rollouts: Sequence[RolloutRow],
    scores: Sequence[ScoreRow],
    samples_per_prompt: int,
    *,
    truncated_count: bool,
    score_clip: float | None = None,
) -> list[bool]:
    """The same of each prompt; so many rows after one another are of one.

    Without `truncated_count` (advantages.truncated=mask), responses cut at the length limit are not learned from, and
    say nothing. Scores that `score_clip` makes one are one.
    """
    limit = inf if score_clip is None else score_clip
    learned = [
        max(-limit, min(limit, score.score))
        if score.score is not None and (rollout.finished or truncated_count)
        else None
        for rollout, score in zip(rollouts, scores, strict=True)
    ]
    firsts = range(0, len(learned), samples_per_prompt)
    return [has_signal(learned[first : first + samples_per_prompt]) for first in firsts]


def choose(signal: Sequence[bool], count: int) -> list[int]:
    """The first `count` prompts with a signal, in the order of drawing; where there are fewer, the first others too.

    >>> choose([False, True, False, True, True], 2), choose([False, True, False], 2)
    ([1, 3], [0, 1])
    """
    by_use = sorted(range(len(signal)), key=lambda number: (not signal[number], number))
    return sorted(by_use[:count])


def select_rollouts(job: Job) -> dict[str, Any]:
    """Write `rollouts.parquet` and the `scores.parquet` of the chosen, and what scored them; see `SelectJob`."""
    spec, rollouts, scores = SelectJob.model_validate(job.spec), [], []
    for number in range(spec.num_batches):
        sampled = read_rollouts(job.inputs[f"rollouts_{number}"].path / "rollouts.parquet")
        scored = read_scores(job.inputs[f"scores_{number}"].path / SCORES)
        check_aligned(sampled, scored)
        rollouts += sampled
        scores += scored
    size = spec.samples_per_prompt
    signal = signals(rollouts, scores, size, truncated_count=spec.truncated_count, score_clip=spec.score_clip)
    chosen = choose(signal, spec.num_prompts)
    rows = [row for prompt in chosen for row in range(prompt * size, (prompt + 1) * size)]
    seen: Counter[str] = Counter()  # a prompt that came in two batches has twice as many samples
    kept = []
    for row in rows:
        name = rollouts[row].prompt_id
        kept.append((replace(rollouts[row], sample_index=seen[name]), replace(scores[row], sample_index=seen[name])))
        seen[name] += 1
    write_rollouts(job.output / "rollouts.parquet", [rollout for rollout, _ in kept])
    write_scores(job.output / SCORES, [score for _, score in kept])
    (job.output / SCORED_BY).write_text(_scorer(spec.reward, spec.answer_column, job.inputs["sources"]))
    facts = rollout_facts([rollout for rollout, _ in kept])
    given = [row.score for row in scores if row.score is not None]
    facts["metrics"] |= {
        "rollout/batches": float(spec.num_batches),
        "rollout/dropped_prompts": float(len(signal) - len(chosen)),
        "rollout/prompts_without_signal": float(sum(not signal[prompt] for prompt in chosen)),
        **({"rollout/score": statistics.fmean(given)} if given else {}),
    }
    return facts


def scores_beside(rollouts: JobInput, reward: RewardSpec, answer_column: str, sources: JobInput) -> list[ScoreRow]:
    """The scores that came with selected rollouts; none where there are none, or the reward is another one now."""
    scored_by = rollouts.path / SCORED_BY
    if not scored_by.is_file() or scored_by.read_text() != _scorer(reward, answer_column, sources):
        return []
    return read_scores(rollouts.path / SCORES)


def _scorer(reward: RewardSpec, answer_column: str, sources: JobInput) -> str:
    return content_digest([reward.model_dump(mode="json"), answer_column, sources.digest])
