"""What the sections of every spec share: a frozen model that refuses unknown keys, and bounded numbers."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
NonNegative = Annotated[float, Field(ge=0.0)]
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


def in_order(schema: dict[str, Any]) -> None:
    """Number the fields as they are declared: forms sort by `position`, and databases forget the order of keys."""
    for position, field in enumerate(schema.get("properties", {}).values()):
        field["position"] = position


class Section(BaseModel):
    """A frozen part of the spec that refuses keys it does not know."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False, json_schema_extra=in_order
    )
