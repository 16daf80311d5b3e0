"""The sections that say what a run's policy is registered as in MLflow, and when it may take the champion's place."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches
from math import ceil, log2
from typing import Annotated

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt, ValidationInfo, field_validator

from ppo_core.spec.reward.section import OF_THE_WHOLE_SCORE
from ppo_core.spec.section import Section

OF_THE_SCORE = ("score", "accuracy")
"""What can be compared besides single rewards."""
MEASURED = (
    *("advantage", "critic", "evaluation", "gold", "kl", "memory", "policy", "response", "reward", "rollout"),
    *("sampler", "score", "seconds", "sft", "system", "throughput", "update"),
)
"""What the names of metrics begin with, in docs/metrics.md."""
NOT_RECORDED = {"system": "is of the machine, not of an iteration", "sft": "is measured at the start alone"}
HIGHER_IS_WORSE = ("kl/", "sampler/", "seconds/", "memory/", "policy/loss", "critic/loss")
LONGEST_ALIAS = 255
CHAMPION = "champion"
"""The alias that policies are promoted to, unless a spec names another."""
NO_PART_OF_A_NAME = "/:@'"


def unmeasured_kl(*, reference: str, evaluated: str) -> str:
    """The setting with which no KL of a policy to its start is measured; empty where it is."""
    if reference != "fixed":
        return f"advantages.reference.kind={reference}"
    return "" if evaluated == "policy" else f"evaluation.weights={evaluated}"


def registered_name(name: str) -> str:
    """A name for a registered model that models:/NAME@ALIAS can hold. Raises ValueError for any other."""
    if not any(character.isalnum() for character in name):
        raise ValueError(f"{name!r} cannot be the name of a registered model: it needs at least one letter or digit")
    if name != name.strip() or not name.isprintable():
        raise ValueError(
            f"{name!r} begins or ends with a space, or has a character that is not printed: leave that out"
        )
    if found := [character for character in NO_PART_OF_A_NAME if character in name]:
        proposal = re.sub(f"[{NO_PART_OF_A_NAME}]+", "-", name).strip("-")
        raise ValueError(
            f"{name!r} has {' and '.join(found)}, which MLflow, or models:/NAME@ALIAS, does not allow in the name of "
            f"a registered model: leave that out{f', as in {proposal}' if proposal else ''}"
        )
    return name


def _written_name(name: str, info: ValidationInfo) -> str:
    return registered_name(name) if info.context else name  # a run's record may be older than this rule


RegisteredName = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(_written_name)]
"""What a spec names a registered model."""


def mlflow_alias(alias: str) -> str:
    """An alias that MLflow takes. Raises ValueError for any other."""
    if len(alias) > LONGEST_ALIAS:
        raise ValueError(f"{alias[:20]}... has {len(alias)} characters, MLflow allows {LONGEST_ALIAS}: shorten it")
    if not re.fullmatch(r"[A-Za-z0-9_-]+", alias):
        raise ValueError(f"{alias!r} is not a valid MLflow alias: use letters, digits, dashes and underscores")
    if alias.lower() == "latest" or re.fullmatch(r"[vV][0-9]+", alias):
        raise ValueError(f"{alias!r}: MLflow reserves latest, v1, v2 …; choose another alias, such as candidate")
    return alias


class RegistrySpec(Section):
    """The MLflow model that a run's best policy becomes a version of."""

    model: RegisteredName | None = Field(None, description="Name of the registered model; none: the spec's name")
    metric: str = Field(
        "evaluation/score", description="The best policy is that of the iteration with the highest value of this metric"
    )
    alias: str | None = Field("candidate", description="Alias that is moved to the new version")

    @field_validator("alias")
    @classmethod
    def _known_to_mlflow(cls, alias: str | None) -> str | None:
        return None if alias is None else mlflow_alias(alias)

    def notes(self, *, evaluates: bool) -> list[str]:
        """A metric that does not tell which policy is the best."""
        if self.metric.startswith("evaluation/") and not evaluates and "metric" in self.model_fields_set:
            return [
                f"no prompts are held out, so that registry.metric={self.metric} is not measured and the last policy "
                "counts as the best: set dataset.evaluation or evaluation_fraction, or registry.metric to score/mean"
            ]
        if self.metric.startswith(HIGHER_IS_WORSE):
            return [f"registry.metric={self.metric}: the best policy is that of the highest value, and lower is better"]
        return []

    def problems(self, rewards: Sequence[str], *, critic: bool = True, gold: bool = True) -> list[str]:
        """A metric that no run measures; `rewards` are the names of the parts of the score.

        `critic` and `gold`: whether a critic is trained, and a gold reward named.
        """
        part, _, name = self.metric.partition("/")
        absent = dict(NOT_RECORDED) if critic else {**NOT_RECORDED, "critic": "needs a critic, and none is trained"}
        if not gold:
            absent["gold"] = "needs guards.gold_reward, which names none"
        if part in absent:
            remedy = "set it to evaluation/score, or to another one of docs/metrics.md"
            return [f"registry.metric={self.metric} {absent[part]}: {remedy}"]
        names = [f"evaluation/{way}{metric}" for way in ("", "greedy_") for metric in OF_THE_SCORE]
        if part == "evaluation":
            return self._problems_of_an_evaluation(names, rewards)
        scores, parts = [f"score/{one}" for one in OF_THE_WHOLE_SCORE], [f"score/{one}" for one in rewards]
        if part == "score" and name:
            if self._is_one_of(scores, parts):
                return []
            there = f"of score/… there are {', '.join([*OF_THE_WHOLE_SCORE, *rewards])}"
        elif part in MEASURED and name:
            return []
        else:
            there = f"metrics begin with {', '.join(f'{one}/' for one in MEASURED)}"
        right = [f"{one}/{name}" for one in get_close_matches(part, MEASURED, n=1) if name and one != part]
        close = right or get_close_matches(self.metric, [*names, *scores, *parts], n=1)
        hint = f"; did you mean {close[0]}?" if close else ": set it to evaluation/score, or to one of docs/metrics.md"
        return [f"registry.metric={self.metric} is measured by no run ({there}){hint}"]

    def _problems_of_an_evaluation(self, names: Sequence[str], rewards: Sequence[str]) -> list[str]:
        """The same of what begins with `evaluation/`, which has parts of the score only where there are several."""
        several = rewards if len(rewards) > 1 else ()
        parts = [f"{one}/{reward}" for one in names if one.endswith("score") for reward in several]
        others = [f"evaluation/{way}{one}" for way in ("", "greedy_") for one in ("response_length", "unscored")]
        if self._is_one_of((*names, *others), parts):
            return []
        return [
            f"registry.metric={self.metric} is not measured by an evaluation: set it to one of {', '.join(names)}, "
            "or, with several rewards, to a score with / and a reward's name behind it"
        ]

    def _is_one_of(self, names: Sequence[str], parts: Sequence[str]) -> bool:
        """Whether the metric is one of these, or measured beside the score of one of these parts."""
        return self.metric in (*names, *parts) or any(self.metric.startswith(f"{one}/") for one in parts)


def fewest_pairs(confidence: float) -> int:
    """Of equal policies' paired differences, the least number that all have one sign no more often than an interval of
    this confidence may be wrong on that side: no resample of such differences has a mean on the other one."""
    return ceil(log2(2.0 / (1.0 - confidence)))


class PromotionSpec(Section):
    """The gates that a candidate must pass to become champion. None of them changes what a run computes."""

    alias: str = Field(CHAMPION, description="Alias that moves to a candidate that passes every gate")
    metric: str = Field(
        "score",
        description="What is compared per prompt: the score, accuracy (whether it reaches evaluation.pass_score), or "
        "one reward by its name, for example a gold reward of weight 0",
    )
    min_gain: float = Field(
        0.0,
        description="The confidence interval of the mean gain over the champion must lie above this; negative: the "
        "candidate may be that much worse",
    )
    confidence: float = Field(0.95, ge=0.5, lt=1.0, description="Confidence level of that two-sided interval")
    resamples: PositiveInt = Field(10_000, ge=100, le=1_000_000, description="Paired bootstrap resamples")
    max_kl: PositiveFloat | None = Field(
        None,
        description="Highest KL to the reference per response in the candidate's run, nats; none: no limit",
    )
    max_length_growth: PositiveFloat | None = Field(
        None, description="Highest ratio of mean response length to the champion's, 1.5 for 50 % longer; none: no limit"
    )
    approval: bool = Field(False, description="Wait for approval in Prefect's UI before the alias moves")
    approval_timeout_h: PositiveFloat = Field(
        24.0, le=720.0, description="Hours to wait for approval, after which the flow ends"
    )

    @field_validator("alias")
    @classmethod
    def _known_to_mlflow(cls, alias: str) -> str:
        return mlflow_alias(alias)

    def problems(self, candidates: str | None, rewards: Sequence[str] = (), *, unmeasured: str = "") -> list[str]:
        """`candidates` is the alias that every training run moves to its best policy: these gates guard another.

        `rewards` are the names of the parts of the score: what is compared is not to be one of them and all
        at once. Without them that is not asked. `unmeasured` is the setting with which no KL to the start is measured.
        """
        found, alone = list[str](), self.metric == "score" and len(rewards) == 1
        if unmeasured and self.max_kl is not None:
            found.append(
                f"promotion.max_kl={self.max_kl:g} lets no policy pass with {unmeasured}, with which its KL to the "
                "start is not measured: leave it out, or change that"
            )
        if self.alias == candidates:
            found.append(
                f"registry.alias={candidates} is promotion.alias too, so that every run of training would make its "
                "policy champion, past all gates: set one of them to another alias (by default registry.alias is "
                "candidate, and promotion.alias champion)"
            )
        if self.metric in OF_THE_SCORE and self.metric in rewards and "metric" in self.model_fields_set and not alone:
            found.append(
                f"promotion.metric={self.metric} is ambiguous, for a reward is called {self.metric} too: give that "
                "reward another `name`, or compare another metric"
            )
        return found
