"""All rewards of a spec together: a component per reward, and their weighted sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ppo_core.records import PromptRow, RolloutRow, ScoreRow
from ppo_core.scoring.functions import FunctionReward
from ppo_core.scoring.plugins import Sources
from ppo_core.scoring.reward import Reward, Sample
from ppo_core.scoring.rules import ExactMatch, Number, Regex
from ppo_core.spec import RewardSpec
from ppo_core.spec.rewards import ExactMatchSpec, FunctionRewardSpec, NumberSpec, RegexSpec, RewardKind


def make_reward(spec: RewardKind, sources: Sources, answer_column: str) -> Reward:
    """A reward of the kind that the spec names."""
    match spec:
        case FunctionRewardSpec():
            return FunctionReward(spec, sources, answer_column)
        case ExactMatchSpec():
            return ExactMatch(spec, answer_column)
        case NumberSpec():
            return Number(spec, answer_column)
        case RegexSpec():
            return Regex(spec)


class WeightedRewards:
    """The rewards of a spec's `reward` section with their weights. Raises InputError where one cannot be made."""

    def __init__(self, spec: RewardSpec, sources: Sources, answer_column: str) -> None:
        rewards = spec.rewards
        self.weights = {reward.component: reward.weight for reward in rewards}
        self.rewards = {reward.component: make_reward(reward, sources, answer_column) for reward in rewards}

    def check_rows(self, rows: Sequence[PromptRow]) -> None:
        """Raise InputError where a row lacks what one of them needs."""
        for reward in self.rewards.values():
            reward.check_rows(rows)

    def score(self, samples: Sequence[Sample]) -> list[dict[str, float | None]]:
        """One mapping component -> score (or None) per sample."""
        scored = {name: reward.score(samples) for name, reward in self.rewards.items()}
        return [{name: values[index] for name, values in scored.items()} for index in range(len(samples))]

    def total(self, components: Mapping[str, float | None]) -> float | None:
        """Weighted sum; None when any component could not be scored."""
        terms = [(weight, components[name]) for name, weight in self.weights.items()]
        if any(value is None for _, value in terms):
            return None
        return float(sum(weight * value for weight, value in terms if value is not None))

    def score_rollouts(self, rows: Sequence[PromptRow], rollouts: Sequence[RolloutRow]) -> list[ScoreRow]:
        """Scores of rollouts, row for row; `rows` are those of their prompts. None is kept and named in `error`."""
        samples = [Sample(row, rollout.response) for row, rollout in zip(rows, rollouts, strict=True)]
        scored = []
        for rollout, parts in zip(rollouts, self.score(samples), strict=True):
            missing = [name for name, value in parts.items() if value is None]
            scored.append(
                ScoreRow(
                    prompt_id=rollout.prompt_id,
                    sample_index=rollout.sample_index,
                    score=self.total(parts),
                    components=parts,
                    truncated=not rollout.finished,
                    error=f"not scored by {', '.join(missing)}" if missing else None,
                )
            )
        return scored
