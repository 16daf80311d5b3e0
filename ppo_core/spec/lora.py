"""Low-rank adapters (LoRA): what is trained in place of a model's weights."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat

from ppo_core.spec.section import Section

LayerName = Annotated[str, Field(pattern=r"^\w+$")]


class LoraSpec(Section):
    """W + alpha / rank * B A for layers' weights W: PPO trains A and B, of the policy and of the critic.

    There is no dropout, as in no network here: two passes over the same tokens must agree.
    """

    rank: int = Field(16, ge=1, le=1024, description="Rows of A and columns of B; a layer's smaller side at most")
    alpha: PositiveFloat = Field(32.0, description="The product of A and B is multiplied by alpha / rank")
    target_modules: Literal["all-linear"] | Annotated[tuple[LayerName, ...], Field(min_length=1)] = Field(
        "all-linear",
        description="Linear layers that get one, by the last part of their names ([q_proj, v_proj]); all-linear: every "
        "one but the output embedding",
    )
