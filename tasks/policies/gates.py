"""What a candidate must pass before it takes the champion's place. Each gate says what it measured, and its limit."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from ppo_core.spec import PromotionSpec
from tasks.policies.compare_policies import ComparisonRef
from tasks.policies.policy import Policy


class Gate(BaseModel):
    """One gate: `passed` is None where there was nothing to check it against."""

    model_config = ConfigDict(frozen=True)

    name: str
    passed: bool | None
    text: str

    @property
    def sign(self) -> str:
        """As a table shows it."""
        return {True: "passed", False: "FAILED", None: "not checked"}[self.passed]


def check_gates(spec: PromotionSpec, candidate: Policy, comparison: ComparisonRef | None) -> list[Gate]:
    """Every gate of the spec. Without a champion there is no comparison, and what needs one is not checked."""
    return [gain_gate(spec, comparison), kl_gate(spec, candidate), length_gate(spec, comparison)]


def passed(gates: list[Gate]) -> bool:
    """Whether none of them has failed."""
    return all(gate.passed is not False for gate in gates)


def gain_gate(spec: PromotionSpec, comparison: ComparisonRef | None) -> Gate:
    """Is the whole confidence interval of the gain above the smallest gain asked for?"""
    if comparison is None:
        return Gate(name="min_gain", passed=None, text="there is no champion to compare with")
    metrics = comparison.metrics
    gain, low, high = (metrics[f"promotion/{name}"] for name in ("gain", "gain_low", "gain_high"))
    return Gate(
        name="min_gain",
        passed=low > spec.min_gain,
        text=f"{spec.metric} {gain:+.4f}, {100 * spec.confidence:g}% interval {low:+.4f} to {high:+.4f} over "
        f"{comparison.pairs} prompts; must lie above {spec.min_gain:+g}",
    )


def kl_gate(spec: PromotionSpec, candidate: Policy) -> Gate:
    """Has it stayed close enough to the reference? What nobody measured does not pass."""
    measured = candidate.divergence()
    if spec.max_kl is None:
        said = "" if measured is None else f"{measured[0]:.4f} nats per response; "
        return Gate(name="max_kl", passed=None, text=f"{said}no limit")
    if measured is None:
        return Gate(
            name="max_kl",
            passed=False,
            text=f"its run measured none; must be at most {spec.max_kl:g}",
        )
    kl, where = measured
    return Gate(
        name="max_kl",
        passed=kl <= spec.max_kl,
        text=f"{kl:.4f} nats per response ({where}); must be at most {spec.max_kl:g}",
    )


def length_gate(spec: PromotionSpec, comparison: ComparisonRef | None) -> Gate:
    """Have the responses not grown too long?"""
    if comparison is None:
        return Gate(name="max_length_growth", passed=None, text="there is no champion to compare with")
    after, before = (comparison.metrics[f"promotion/{side}_length"] for side in ("candidate", "champion"))
    growth = after / before if before else float("inf")
    text = f"{before:.1f} to {after:.1f} tokens per response, {growth:.2f} times"
    if spec.max_length_growth is None:
        return Gate(name="max_length_growth", passed=None, text=f"{text}; no limit")
    return Gate(
        name="max_length_growth",
        passed=growth <= spec.max_length_growth,
        text=f"{text}; must be at most {spec.max_length_growth:g} times",
    )
