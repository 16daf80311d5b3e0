"""Which algorithm trains the policy: a section per algorithm. `ppo_core/algorithms/` has what each of them does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, PositiveFloat, ValidationInfo, field_validator, model_validator

from ppo_core.spec.advantages import AdvantageSpec
from ppo_core.spec.section import PositiveWeight, Section, Weight, refuse_idle
from ppo_core.spec.sections import RolloutSpec
from ppo_core.spec.update import UpdateSpec

NO_CRITIC = dict.fromkeys(
    (
        "advantages.critic_gae_lambda",
        "update.critic_learning_rate",
        "update.critic_warmup_iterations",
        "update.value_clip",
    ),
    "it trains no critic",
)
WHOLE_RESPONSES = {
    "advantages.gamma": "it discounts nothing: a response is one action",
    "advantages.gae_lambda": "it compares whole responses, without GAE",
    "advantages.gae_lambda_alpha": "it compares whole responses, without GAE",
}


class _Algorithm(Section):
    """`MEANINGLESS` are the settings of other sections that an algorithm would ignore, each with the reason.

    `COMPARES`: whether it learns from a response only what sets it apart from others to the same prompt.
    """

    kind: str = Field(description="The algorithm")
    MEANINGLESS: ClassVar[dict[str, str]] = {}
    COMPARES: ClassVar[bool] = False

    def continued(self, carried: Mapping[str, float]) -> Self:
        """The algorithm as the next iteration has it, after one whose update left these values of its settings."""
        return self.model_copy(update=dict(carried))

    def problems(
        self, rollout: RolloutSpec, advantages: AdvantageSpec, update: UpdateSpec, *, written: bool
    ) -> list[str]:
        """What in the other sections this algorithm cannot work with: a setting that it would ignore, among others.

        `written`: whether a person wrote the spec; a run's record has the defaults written out too.
        """
        sections: dict[str, Section] = {"advantages": advantages, "update": update}
        found = []
        for key, reason in self.MEANINGLESS.items():
            section, _, name = key.partition(".")
            value, default = vars(sections[section])[name], type(sections[section]).model_fields[name].default
            if value != default:
                found.append(
                    f"{key}={value} has no effect with algorithm.kind={self.kind} ({reason}): leave it out, or set "
                    "algorithm.kind to ppo"
                )
        if rollout.dynamic_sampling is not None and not self.COMPARES:
            found.append(
                "rollout.dynamic_sampling drops prompts whose responses all have the same score, but algorithm.kind="
                f"{self.kind} learns from these too: leave it out, or set algorithm.kind to rloo or grpo"
            )
        return found

    def notes(self, update: UpdateSpec) -> list[str]:
        """What a person should know before the run starts."""
        return []


class PpoSpec(_Algorithm):
    """PPO with a critic of its own and GAE."""

    kind: Literal["ppo"] = Field("ppo", description="This algorithm")


class VapoSpec(_Algorithm):
    """PPO as in VAPO (Yue et al. 2025): lambdas of its own, and a language-model loss on correct responses."""

    kind: Literal["vapo"] = Field("vapo", description="This algorithm")
    lm_coef: Weight = Field(
        0.1, description="Weight of the language-model loss, per token of the minibatch's correct responses"
    )
    correct_score: float = Field(
        1.0, description="A response is correct where its score, before score_norm and score_clip, is at least this"
    )

    @model_validator(mode="after")
    def _what_is_imitated_counts(self, info: ValidationInfo) -> Self:
        if not self.lm_coef and info.context:  # a run's record may be older than this rule
            refuse_idle(self, "correct_score", beside="lm_coef=0", remedy="set lm_coef above 0")
        return self

    def problems(
        self, rollout: RolloutSpec, advantages: AdvantageSpec, update: UpdateSpec, *, written: bool
    ) -> list[str]:
        """One lambda for all responses, besides."""
        found, value = super().problems(rollout, advantages, update, written=written), advantages.gae_lambda
        fields = type(advantages).model_fields
        if value != fields["gae_lambda"].default or (written and "gae_lambda" in advantages.model_fields_set):
            found.append(
                f"advantages.gae_lambda={value:g} has no effect with algorithm.kind={self.kind}, which gives each "
                "response a lambda by its length (advantages.gae_lambda_alpha, 0.05 where that is none): leave it "
                "out, or set algorithm.kind to ppo"
            )
        return found

    def notes(self, update: UpdateSpec) -> list[str]:
        """A critic that the policy learns from at once."""
        if update.critic_warmup_iterations:
            return []
        return [
            "algorithm.kind=vapo without critic warm-up: VAPO trains the critic alone first; set "
            "update.critic_warmup_iterations, 50 in examples/recipes/vapo.yaml"
        ]


class PpoSharedSpec(_Algorithm):
    """PPO with a value head on the policy in place of a critic, and one loss for both."""

    kind: Literal["ppo_shared"] = Field("ppo_shared", description="This algorithm")
    value_coef: PositiveWeight = Field(0.1, description="Weight of the value loss (half a squared error) in the loss")

    MEANINGLESS: ClassVar[dict[str, str]] = dict.fromkeys(
        ("update.critic_learning_rate", "update.critic_warmup_iterations"),
        "policy and values share one network; algorithm.value_coef weights the value loss",
    )


class KlPenaltyPpoSpec(_Algorithm):
    """PPO with a KL penalty towards the old policy in place of the clip (Schulman et al. 2017, section 4)."""

    kind: Literal["kl_penalty_ppo"] = Field("kl_penalty_ppo", description="This algorithm")
    coef: float = Field(
        1.0, ge=1e-6, le=1e6, description="Penalty per nat of KL(old policy, policy) per token, in the first iteration"
    )
    target: PositiveFloat | None = Field(
        0.01,
        description="Target KL per token after an update: coef doubles above 1.5 times it, halves below; none: fixed",
    )

    MEANINGLESS: ClassVar[dict[str, str]] = dict.fromkeys(
        ("update.clip_low", "update.clip_high", "update.dual_clip"), "it clips no ratio"
    )

    def problems(
        self, rollout: RolloutSpec, advantages: AdvantageSpec, update: UpdateSpec, *, written: bool
    ) -> list[str]:
        """A single step, which begins at the old policy, where the penalty is 0 and so is its gradient, besides."""
        found = super().problems(rollout, advantages, update, written=written)
        if written and update.num_steps == 1 and advantages.old_logprobs == "trainer":
            found.append(
                f"algorithm.kind={self.kind} with update.num_ppo_epochs=1 and num_minibatches=1: the only step "
                "begins at the old policy, where the penalty has no gradient; raise one of them, or set algorithm.kind "
                "to reinforce"
            )
        return found


class _WithoutCritic(_Algorithm):
    """No critic is trained."""

    MEANINGLESS: ClassVar[dict[str, str]] = NO_CRITIC

    def problems(
        self, rollout: RolloutSpec, advantages: AdvantageSpec, update: UpdateSpec, *, written: bool
    ) -> list[str]:
        """A critic's value of what would have followed, and sums that depend on the length, besides."""
        found = super().problems(rollout, advantages, update, written=written)
        if advantages.whiten_rewards:
            found.append(
                "advantages.whiten_rewards=true adds to every token's reward, so that the sum of a response's rewards "
                f"depends on its length, and algorithm.kind={self.kind} learns from these sums: leave it out, or set "
                "algorithm.kind to ppo"
            )
        if advantages.truncated == "bootstrap":
            found.insert(
                0,
                f"advantages.truncated=bootstrap needs a critic, and algorithm.kind={self.kind} trains none: set "
                "terminal or mask",
            )
        return found


class _ComparesGroups(_WithoutCritic):
    """A response is compared with the others to the same prompt."""

    MEANINGLESS: ClassVar[dict[str, str]] = {**WHOLE_RESPONSES, **NO_CRITIC}
    COMPARES: ClassVar[bool] = True

    def problems(
        self, rollout: RolloutSpec, advantages: AdvantageSpec, update: UpdateSpec, *, written: bool
    ) -> list[str]:
        """Groups of one, and a mean over all prompts that is taken from what each group is worth, besides."""
        found = super().problems(rollout, advantages, update, written=written)
        if advantages.whiten and advantages.whiten_centred:
            found.append(
                f"advantages.whiten={str(advantages.whiten).lower()} subtracts a mean over all prompts, and with "
                f"algorithm.kind={self.kind} a prompt whose responses got the same score has to stay at 0: set it to "
                "false, or whiten_centred to false, which only scales"
            )
        if written and advantages.score_norm == "mean_std" and advantages.score_clip is None:
            found.append(
                f"advantages.score_norm=mean_std subtracts a mean that cancels with algorithm.kind={self.kind}, which "
                "compares the responses to one prompt: set it to std or none"
            )
        if advantages.whiten is None and not advantages.whiten_centred:
            found.append(
                f"advantages.whiten_centred=false has no effect with algorithm.kind={self.kind}, which does not whiten "
                "by default: leave it out, or set whiten to true or minibatch"
            )
        if rollout.samples_per_prompt < 2:
            found.insert(
                0,
                f"rollout.samples_per_prompt={rollout.samples_per_prompt} gives algorithm.kind={self.kind} nothing to "
                "compare a response with: set it to 2 or more (4 is usual), or algorithm.kind to ppo",
            )
        return found


class RlooSpec(_ComparesGroups):
    """REINFORCE with the leave-one-out baseline over the samples of a prompt (Ahmadian et al. 2024); no critic."""

    kind: Literal["rloo"] = Field("rloo", description="This algorithm")


class GrpoSpec(_ComparesGroups):
    """Rewards relative to the group of samples of a prompt (Shao et al. 2024, DeepSeekMath); no critic."""

    kind: Literal["grpo"] = Field("grpo", description="This algorithm")
    scale: Literal["std", "none"] = Field(
        "std", description="std: divide by the group's standard deviation; none: do not (Dr. GRPO)"
    )


class ReinforceSpec(_WithoutCritic):
    """REINFORCE with the reward to go; with centred whitening (the default) REINFORCE++ (Hu 2025); no critic."""

    kind: Literal["reinforce"] = Field("reinforce", description="This algorithm")
    baseline: Literal["batch_mean", "none"] = Field(
        "batch_mean", description="Subtracted from every reward to go; centred whitening (advantages.whiten) cancels it"
    )

    @field_validator("baseline", mode="before")
    @classmethod
    def _leave_one_out_is_rloo(cls, baseline: Any) -> Any:
        if baseline == "leave_one_out":
            raise ValueError(
                f"{baseline} is an algorithm of its own here: set algorithm.kind to rloo, and "
                "rollout.samples_per_prompt to 2 or more"
            )
        return baseline

    MEANINGLESS: ClassVar[dict[str, str]] = {
        "advantages.gae_lambda": "it has no values to mix in",
        "advantages.gae_lambda_alpha": "it has no values to mix in",
        **NO_CRITIC,
    }

    def problems(
        self, rollout: RolloutSpec, advantages: AdvantageSpec, update: UpdateSpec, *, written: bool
    ) -> list[str]:
        """A baseline that whitening cancels, besides."""
        found = super().problems(rollout, advantages, update, written=written)
        if self.baseline == "none" and advantages.whiten is not False and advantages.whiten_centred:
            found.append(
                "algorithm.baseline=none has no effect with centred whitening, which subtracts a mean anyway: leave it "
                "out, or set advantages.whiten or whiten_centred to false"
            )
        return found


def _dpo_is_a_command(section: Any) -> Any:
    if isinstance(section, Mapping) and section.get("kind") == "dpo":
        raise ValueError(
            "kind=dpo learns from preferences, without samples, and so has a command and a spec of its own: "
            "`ppoflow dpo` (docs/dpo.md)"
        )
    return section


AlgorithmSpec = Annotated[
    PpoSpec | VapoSpec | PpoSharedSpec | KlPenaltyPpoSpec | RlooSpec | GrpoSpec | ReinforceSpec,
    Field(discriminator="kind"),
    BeforeValidator(_dpo_is_a_command),
]
