"""Low-rank adapters (LoRA): what is trained in place of a model's weights."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat

from ppo_core.spec.section import Section

LayerName = Annotated[str, Field(pattern=r"^\w+$")]


class LoraSpec(Section):
    """W + alpha / rank * B A for layers' weights W: PPO trains A and B of policy and critic, DPO of the policy.

    There is no dropout, as in no network here: two passes over the same tokens must agree.
    """

    rank: int = Field(
        16, ge=1, le=1024, description="Rank: rows of A and columns of B; at most the smaller side of a layer"
    )
    alpha: PositiveFloat = Field(32.0, description="The product of A and B is multiplied by alpha / rank")
    target_modules: Literal["all-linear"] | Annotated[tuple[LayerName, ...], Field(min_length=1)] = Field(
        "all-linear",
        description="Linear layers that get an adapter, by the last part of their names, as in [q_proj, v_proj]; "
        "all-linear: every one except the output embedding",
    )
