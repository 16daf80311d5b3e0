"""All rewards of a spec together: a component per reward, and their weighted sum."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ppo_core.processes.plugins import Sources
from ppo_core.records import InputError, PromptRow, RolloutRow, ScoreRow, content_digest
from ppo_core.scoring.ahead import RememberedReward, ScoresAhead
from ppo_core.scoring.functions import FunctionReward
from ppo_core.scoring.model import ModelReward
from ppo_core.scoring.reward import (
    MeasuredScore,
    NotScored,
    Progress,
    Reward,
    RewardFailed,
    Sample,
    Score,
    SpanScores,
    exact_sum,
    ignore_progress,
    plain,
)
from ppo_core.scoring.rules import ExactMatch, Format, JsonSchema, Length, Number, Regex
from ppo_core.scoring.signatures import check_names, takes_option, unknown_option
from ppo_core.scoring.spans import Decode, tokens_of
from ppo_core.scoring.unit_tests import UnitTests
from ppo_core.spec import RewardSpec
from ppo_core.spec.reward.kinds import FunctionRewardSpec, HttpRewardSpec, JudgeSpec, ModelRewardSpec, RewardKind
from ppo_core.spec.reward.rules import (
    ExactMatchSpec,
    FormatSpec,
    JsonSchemaSpec,
    LengthSpec,
    NumberSpec,
    RegexSpec,
    UnitTestsSpec,
)

LARGEST_SCORE = 3e38
"""What float32, in which scores are trained on, can hold."""


@dataclass(frozen=True)
class Components:
    """A sample's score by each reward, None where there is none, with the reasons that are known.

    `parts` are those of the scores that came in parts, `measures` what rewards measured beside their scores, by
    `reward/measure`; None where a reward measured that of another sample alone.
    """

    scores: dict[str, float | None]
    reasons: dict[str, str]
    parts: dict[str, SpanScores] = field(default_factory=dict)
    measures: dict[str, float | None] = field(default_factory=dict)

    def error(self) -> str | None:
        """Which rewards gave no score, and why; None where all did."""
        missing = [name for name, value in self.scores.items() if value is None]
        failures = [f"{name}: {self.reasons[name]}" if name in self.reasons else name for name in missing]
        return f"not scored by {', '.join(failures)}" if failures else None


def make_reward(spec: RewardKind, sources: Sources, answer_column: str, progress: Progress) -> Reward:
    """A reward of the kind that the spec names. Raises InputError where it may not run here."""
    if isinstance(spec, HttpRewardSpec | JudgeSpec):
        sources.require_server(spec.component, spec.url)
    match spec:
        case FunctionRewardSpec():
            return FunctionReward(spec, sources, answer_column, progress)
        case ExactMatchSpec():
            return ExactMatch(spec, answer_column)
        case NumberSpec():
            return Number(spec, answer_column, progress)
        case RegexSpec():
            return Regex(spec, progress)
        case LengthSpec():
            return Length(spec)
        case FormatSpec():
            return Format(spec, progress)
        case JsonSchemaSpec():
            return JsonSchema(spec, progress)
        case UnitTestsSpec():
            return UnitTests(spec, sources, answer_column, progress)
        case HttpRewardSpec():
            from ppo_core.scoring.http import HttpReward  # aiohttp: a tenth of a second

            return HttpReward(spec, progress)
        case JudgeSpec():
            from ppo_core.scoring.judge import JudgeReward

            return JudgeReward(spec, answer_column, progress)
        case ModelRewardSpec():
            return ModelReward(spec, sources, progress)


def make_remembered(
    spec: RewardKind,
    sources: Sources,
    answer_column: str,
    progress: Progress,
    ahead: ScoresAhead,
    *,
    once: bool = False,
) -> RememberedReward:
    """The same, with what it said ahead. With `once` each sample is tried once."""
    name = content_digest([spec.model_dump(mode="json"), answer_column, sources.digest])
    if once and isinstance(spec, FunctionRewardSpec | HttpRewardSpec | JudgeSpec):
        spec = spec.model_copy(update={"retries": 0})
    return RememberedReward(make_reward(spec, sources, answer_column, progress), name, ahead)


class WeightedRewards:
    """The rewards of a spec's `reward` section with their weights. Raises InputError where one cannot be made.

    Where scores were given `ahead`, the rewards are asked for the rest.
    """

    def __init__(
        self,
        spec: RewardSpec,
        sources: Sources,
        answer_column: str,
        progress: Progress = ignore_progress,
        ahead: ScoresAhead | None = None,
    ) -> None:
        self._spec, rewards = spec, spec.rewards
        self.weights = {reward.component: reward.weight for reward in rewards}
        self.rewards: dict[str, Reward] = {
            reward.component: make_reward(reward, sources, answer_column, progress)
            if ahead is None or not reward.sample_by_sample
            else make_remembered(reward, sources, answer_column, progress, ahead)
            for reward in rewards
        }

    def check_options(self) -> None:
        """Raise InputError for an option that would replace what is scored, or that no function takes: one of
        `reward.options` is for any of them.

        For specs that begin a run: those of records may be older than this rule.
        """
        made = [reward for reward in self.rewards.values() if isinstance(reward, FunctionReward)]
        for reward in made:
            check_names(reward.name, reward.form, reward.options)
            reward.check_retries()
        functions = {reward.name: reward.parameters for reward in made}
        listed = [one for one in self._spec.sources if isinstance(one, FunctionRewardSpec)]
        own = [({one.function: functions[one.function]}, one.options) for one in listed]
        for takers, options in ((functions, self._spec.options), *own):
            for option in options if takers else ():
                if not any(takes_option(parameters, option) for parameters in takers.values()):
                    raise InputError(unknown_option(option, takers))

    def check_rows(self, rows: Sequence[PromptRow], first: int = 1) -> None:
        """Raise InputError where a row lacks what one of them needs."""
        for reward in self.rewards.values():
            reward.check_rows(rows, first)

    def score(self, samples: Sequence[Sample]) -> list[Components]:
        """What each reward says of each sample."""
        scored = {name: reward.score(samples) for name, reward in self.rewards.items()}
        rows = [{name: values[index] for name, values in scored.items()} for index in range(len(samples))]
        measured = [
            {f"{name}/{key}": number for name, value in row.items() for key, number in _measures(value).items()}
            for row in rows
        ]
        names = sorted({name for row in measured for name in row})
        return [
            Components(
                {name: _one_number(value) for name, value in row.items()},
                {name: value.reason for name, value in row.items() if isinstance(value, NotScored)},
                {name: value for name, score in row.items() if isinstance(value := plain(score), SpanScores)},
                {name: measures.get(name) for name in names},
            )
            for row, measures in zip(rows, measured, strict=True)
        ]

    def total(self, components: Mapping[str, float | None]) -> float | None:
        """Weighted sum; None when any component with a weight could not be scored.

        Raises InputError where the sum does not fit into float32.
        """
        scores = {name: components[name] for name, weight in self.weights.items() if weight}
        known = {name: score for name, score in scores.items() if score is not None}
        # Not `sum`: 0.7 + 0.2 + 0.1 would be less than 1, and a right answer below evaluation.pass_score.
        total = exact_sum(self.weights[name] * score for name, score in known.items())
        if not abs(total) <= LARGEST_SCORE:
            raise self._too_large(max(known.items(), key=lambda one: abs(self.weights[one[0]] * one[1])))
        return total if len(known) == len(scores) else None

    def token_scores(self, components: Components, rollout: RolloutRow, decode: Decode) -> dict[int, float] | None:
        """What `total` adds up, by the token where it is credited; None where there is no sum, or nothing in parts.

        A part is credited at the last token that it is for, a score in one piece at the response's last token.
        """
        counting = {name: weight for name, weight in self.weights.items() if weight}
        if self.total(components.scores) is None or not counting.keys() & components.parts.keys():
            return None
        found: defaultdict[int, float] = defaultdict(float)
        for name, weight in counting.items():
            parts, score = components.parts.get(name), components.scores[name]
            if parts is not None:
                for token, span in zip(tokens_of(parts, rollout, decode), parts.spans, strict=True):
                    found[token] += weight * span.score
                    if not abs(found[token]) <= LARGEST_SCORE:
                        raise self._too_large((name, span.score))
            elif score is not None:
                found[len(rollout.response_token_ids) - 1] += weight * score
        return dict(found)

    def _too_large(self, found: tuple[str, float]) -> InputError:
        name, score = found
        return InputError(
            f"a weighted sum of scores is beyond {LARGEST_SCORE:g}, the limit of float32, in which it is trained on: "
            f"the reward {name} gave {score:g} and has weight={self.weights[name]:g}: lower that, or let the reward "
            "give smaller numbers"
        )

    def score_rollouts(
        self, rows: Sequence[PromptRow], rollouts: Sequence[RolloutRow], decode: Decode | None = None
    ) -> list[ScoreRow]:
        """Scores of rollouts, row for row; `rows` are those of their prompts. None is kept and named in `error`.

        Without `decode` only the sums of scores in parts are given.
        """
        samples = [
            Sample(row, rollout.response, rollout.response_token_ids, rollout.sample_index)
            for row, rollout in zip(rows, rollouts, strict=True)
        ]
        return [
            ScoreRow(
                prompt_id=rollout.prompt_id,
                sample_index=rollout.sample_index,
                score=self.total(parts.scores),
                components={**parts.scores, **parts.measures},
                truncated=not rollout.finished,
                error=parts.error(),
                token_scores=None if decode is None else self.token_scores(parts, rollout, decode),
            )
            for rollout, parts in zip(rollouts, self.score(samples), strict=True)
        ]


def check_enough(scores: Sequence[ScoreRow], reward: RewardSpec, what: str = "responses") -> None:
    """Raise RewardFailed where more of them than the spec allows have no score, in all or of one reward.

    A reward of weight 0 is not in the score, but guards may look at it. `what` says which responses they are.
    """
    missing = {"": [row for row in scores if row.score is None]}
    for one in reward.rewards:
        missing[f" of {one.component}"] = [row for row in scores if row.components[one.component] is None]
    for whose, failed in missing.items():
        if len(failed) > reward.max_failed_fraction * len(scores):
            raise RewardFailed(
                f"{len(failed)} of {len(scores)} {what} have no score{whose} (the first: {failed[0].error}), more than "
                f"reward.max_failed_fraction={reward.max_failed_fraction:g} allows: see why, or raise it"
            )


def _one_number(score: Score) -> float | None:
    score = plain(score)
    if isinstance(score, SpanScores):
        return score.total
    return None if isinstance(score, NotScored) else score


def _measures(score: Score) -> Mapping[str, float]:
    return score.measures if isinstance(score, MeasuredScore) else {}
