"""What the sections of every spec share: a frozen model that refuses unknown keys, and bounded numbers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
NonNegative = Annotated[float, Field(ge=0.0)]
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]
LearningRate = Annotated[float, Field(gt=0.0, le=1.0)]
WeightDecay = Annotated[float, Field(ge=0.0, le=1.0)]
Weight = Annotated[float, Field(ge=0.0, le=100.0)]
PositiveWeight = Annotated[float, Field(gt=0.0, le=100.0)]

CoefficientSchedule = Literal["constant", "linear", "cosine"]


def in_order(schema: dict[str, Any]) -> None:
    """Number the fields as they are declared: forms sort by `position`, and databases forget the order of keys."""
    for position, field in enumerate(schema.get("properties", {}).values()):
        field["position"] = position


class Section(BaseModel):
    """A frozen part of the spec that refuses keys it does not know."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False, json_schema_extra=in_order
    )


def check_schedule(section: Section, schedule: str, *, coef: str, final: str) -> None:
    """Raise ValueError for a schedule of nothing, and for an end (`final`) without a schedule; all are field names."""
    values = vars(section)
    if values[schedule] != "constant" and not values[coef]:
        raise ValueError(
            f"{schedule}={values[schedule]} has no effect with {coef}=0: leave it out, or set {coef} above 0"
        )
    if values[schedule] == "constant":
        refuse_idle(section, final, beside=f"{schedule}=constant", remedy=f"set {schedule} to linear or cosine")


def refuse_idle(section: Section, *names: str, beside: str, remedy: str) -> None:
    """Raise ValueError where one of these fields is not its default, although `beside` leaves it without effect."""
    for name in names:
        value, default = vars(section)[name], type(section).model_fields[name].default
        if value != default:
            shown = f"{value:g}" if isinstance(value, float) else str(value).lower()
            raise ValueError(f"{name}={shown} has no effect with {beside}: leave it out, or {remedy}")
