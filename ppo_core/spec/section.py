"""What the sections of every spec share: a frozen model that refuses unknown keys, and bounded numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import InitErrorDetails

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

    @model_validator(mode="before")
    @classmethod
    def _no_truth_is_a_number(cls, values: Any) -> Any:
        """pydantic would take true for 1."""
        fields = cls.model_fields.items() if isinstance(values, Mapping) else ()
        if wrong := [one for name, field in fields for one in _truths(name, values.get(name), field)]:
            raise ValidationError.from_exception_data(cls.__name__, wrong)
        return values


def _truths(name: str, value: Any, field: FieldInfo) -> list[InitErrorDetails]:
    """Where a field of numbers has true or false, also in a list or as a key's value."""
    if not isinstance(value, bool | list | tuple | Mapping):  # as most are
        return []
    inside = dict(enumerate(value)) if isinstance(value, list | tuple) else value
    places = {(name, key): one for key, one in inside.items()} if isinstance(inside, Mapping) else {(name,): value}
    truths = {place: one for place, one in places.items() if isinstance(one, bool)}
    types = _types_in(field.annotation) if truths else set()
    if not {float, int} & types or {bool, Any} & types:
        return []
    kind = "float_type" if float in types else "int_type"
    return [InitErrorDetails(type=kind, loc=place, input=one) for place, one in truths.items()]


def _types_in(annotation: Any) -> set[Any]:
    """The types that a union or a container consists of.

    >>> _types_in(tuple[Fraction, ...] | dict[str, Any]) == {float, ..., str, Any}
    True
    """
    if get_origin(annotation) is Literal:
        return set(map(type, get_args(annotation)))
    parts = get_args(annotation)[: 1 if get_origin(annotation) is Annotated else None]
    return {one for part in parts for one in _types_in(part)} if parts else {annotation}


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
