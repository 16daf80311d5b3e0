"""The reference, which the KL is measured against: the policy that the run began with, or one that follows it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from ppo_core.spec.section import Section


class FixedReference(Section):
    """The policy that the run began with, throughout."""

    kind: Literal["fixed"] = Field("fixed", description="This kind")


class SteppedReference(Section):
    """The policy as it was not long ago, taken anew at intervals."""

    kind: Literal["every"] = Field("every", description="This kind")
    iterations: PositiveInt = Field(description="The policy becomes the reference every this many iterations")


class AveragedReference(Section):
    """A moving average of the policy."""

    kind: Literal["ema"] = Field("ema", description="This kind")
    decay: Annotated[float, Field(gt=0.0, lt=1.0)] = Field(
        0.95, description="Decay of the moving average, per iteration"
    )


ReferenceSpec = Annotated[FixedReference | SteppedReference | AveragedReference, Field(discriminator="kind")]
