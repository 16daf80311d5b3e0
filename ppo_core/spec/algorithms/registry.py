"""The algorithms by their kinds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from ppo_core.spec.algorithms.with_values import KlPenaltyPpoSpec, PpoSharedSpec, PpoSpec, VapoSpec
from ppo_core.spec.algorithms.without_values import GrpoSpec, ReinforceSpec, RlooSpec


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
