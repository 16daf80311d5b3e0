"""Which algorithm trains the policy: a section per algorithm. `ppo_core/algorithms/` has what each of them does."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ppo_core.spec.sections import Section


class PpoSpec(Section):
    """PPO with a critic of its own and GAE."""

    kind: Literal["ppo"] = Field("ppo", description="This algorithm")


AlgorithmSpec = Annotated[PpoSpec, Field(discriminator="kind")]
