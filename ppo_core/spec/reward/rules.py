"""The kinds of rewards that are rules: they need no code of the user's, no server and no model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator, model_validator

from ppo_core.spec.section import NonNegative, Section

TAG = r"[A-Za-z_][A-Za-z0-9_-]*"


class AnyReward(Section):
    """What every kind has."""

    weight: float = Field(
        1.0,
        allow_inf_nan=False,
        description="Weight in the score, the weighted sum of all rewards; 0: only measured",
    )
    name: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}$",
        description="Name in metrics and columns; none: the function's name, or the kind",
    )

    @property
    def component(self) -> str:
        """Its column among the scores."""
        return self.name or self.label

    @property
    def label(self) -> str:
        """What people know it by."""
        return str(vars(self)["kind"])

    @property
    def code(self) -> tuple[str, ...]:
        """Import paths of the user's functions that it calls."""
        return ()

    @property
    def folders(self) -> tuple[str, ...]:
        """Folders of models that it reads."""
        return ()

    @property
    def sample_by_sample(self) -> bool:
        """Whether it scores each sample by itself and may take long: it is asked while others are still sampled."""
        return False


class ExactMatchSpec(AnyReward):
    """1 where the response is the reference answer, apart from white space around it; else 0."""

    kind: Literal["exact_match"] = Field("exact_match", description="This kind")
    ignore_case: bool = Field(False, description="Ignore upper and lower case")


class PatternSpec(AnyReward):
    """What every kind with a regular expression has."""

    pattern: str | None
    pattern_timeout_s: PositiveFloat = Field(
        1.0,
        le=600.0,
        description="Seconds of processor time that patterns may take on one response; beyond them it has no score",
    )

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        try:
            re.compile(pattern or "")
        except re.error as error:
            raise ValueError(
                f"{pattern!r} is not a valid regular expression ({error}): see Python's re module"
            ) from None
        return pattern


class NumberSpec(PatternSpec):
    """1 where the last number of the response is that of the reference answer, else 0."""

    kind: Literal["number"] = Field("number", description="This kind")
    pattern: str | None = Field(
        None,
        description=r"Regular expression that selects the part to compare: its last match, or the first group of that, "
        r"as in '#### (.*)'. No match scores 0. none: the whole response",
    )
    tolerance: NonNegative = Field(0.0, description="Largest difference at which two numbers count as equal")


class RegexSpec(PatternSpec):
    """1 where the pattern is found in the response, else 0."""

    kind: Literal["regex"] = Field("regex", description="This kind")
    pattern: str = Field(min_length=1, description="Python regular expression, searched for anywhere in the response")


class LengthSpec(AnyReward):
    """1 within the bounds of length, and less the further outside, down to 0."""

    kind: Literal["length"] = Field("length", description="This kind")
    unit: Literal["tokens", "characters"] = Field(
        "tokens", description="Unit of length: tokens (including EOS) or characters"
    )
    min: PositiveInt | None = Field(None, description="Shortest length that scores 1")
    max: PositiveInt | None = Field(None, description="Longest length that scores 1")
    target: PositiveInt | None = Field(None, description="Instead of min and max: the only length that scores 1")
    slope: NonNegativeInt = Field(
        0, description="Distance outside the bounds at which the score has fallen linearly to 0; 0: at once"
    )

    @property
    def bounds(self) -> tuple[int, int | None]:
        """The shortest and the longest length that score 1; None: any."""
        return (self.min or 0, self.max) if self.target is None else (self.target, self.target)

    @model_validator(mode="after")
    def _has_bounds(self) -> Self:
        if self.target is not None and (self.min is not None or self.max is not None):
            raise ValueError(f"target={self.target} is the one length that scores 1: leave out min and max, or target")
        if self.target is not None and not self.slope:
            raise ValueError(
                f"target={self.target} with slope=0 scores 1 at exactly that length only, else 0: set slope to "
                "the distance at which the score reaches 0"
            )
        if self.min is None and self.max is None and self.target is None:
            raise ValueError("no length is given: set min, max or both, or target with a slope")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min={self.min} is above max={self.max}, so no length can score 1: swap or change them")
        return self


class FormatSpec(PatternSpec):
    """1 where the whole response has the form that is asked for, else 0."""

    kind: Literal["format"] = Field("format", description="This kind")
    pattern: str | None = Field(
        None,
        min_length=1,
        description="Python regular expression that the whole response must match; (?s) lets . match line breaks",
    )
    tags: tuple[str, ...] = Field(
        (),
        description="The response must be <a>...</a> <b>...</b> for tags [a, b]: each once, in this order, with only "
        "white space around them, and not nested",
    )

    @field_validator("tags")
    @classmethod
    def _are_names(cls, tags: tuple[str, ...]) -> tuple[str, ...]:
        for tag in tags:
            if not re.fullmatch(TAG, tag):
                raise ValueError(f"{tag!r} is not a tag name: write think for <think>...</think>")
        if len(set(tags)) < len(tags):
            raise ValueError(f"tags {', '.join(tags)}: name each tag once")
        return tags

    @model_validator(mode="after")
    def _asks_for_something(self) -> Self:
        if self.pattern is None and not self.tags:
            raise ValueError("no format is given: set pattern, or tags, for example [think, answer]")
        return self


class JsonSchemaSpec(PatternSpec):
    """1 where the response is JSON that the schema accepts, else 0."""

    kind: Literal["json_schema"] = Field("json_schema", description="This kind")
    json_schema: dict[str, Any] = Field(
        description="JSON Schema (draft 2020-12, or what its $schema names), without references to other documents"
    )
    pattern: str | None = Field(
        None,
        description="Regular expression that selects the part to read as JSON: its last match, or the first group of "
        "that. No match counts as no JSON. none: the whole response",
    )
    no_json: float = Field(0.0, description="Score of a response that is not JSON at all")

    @field_validator("json_schema")
    @classmethod
    def _is_a_schema(cls, schema: dict[str, Any]) -> dict[str, Any]:
        from jsonschema.exceptions import SchemaError
        from jsonschema.validators import Draft202012Validator, validator_for

        draft = schema.get("$schema", Draft202012Validator.META_SCHEMA["$id"])
        if not isinstance(draft, str) or validator_for({"$schema": draft}, default=None) is None:
            raise ValueError(f"$schema={draft!r} is not a known draft of JSON Schema: leave it out for 2020-12")
        try:
            validator_for(schema, default=Draft202012Validator).check_schema(schema)
        except SchemaError as error:
            place = "/".join(str(part) for part in error.absolute_path)
            raise ValueError(f"not a valid JSON Schema, at {place or 'the top'}: {error.message}") from None
        for reference, base in _dead_references(schema):
            below = f" below the $id {base!r}, from which it counts," if base else ""
            raise ValueError(
                f"its $ref {reference!r}{below} cannot be resolved: write #/$defs/NAME, and add that definition to "
                + ("the part with that $id, or leave the $id out" if base else "the schema")
            )
        return schema


class UnitTestsSpec(PatternSpec):
    """The fraction of a row's unit tests that the code in the response passes, in a process of limited memory."""

    kind: Literal["unit_tests"] = Field("unit_tests", description="This kind")
    column: str = Field(
        "tests",
        min_length=1,
        description="Column with the tests: Python statements, as one text or a list of one per test",
    )
    pattern: str | None = Field(
        None,
        description="Regular expression that selects the code: its last match, or the first group of that. No match "
        "scores 0. none: the last block of Python between ``` if there is one, else the whole response",
    )
    timeout_s: PositiveFloat = Field(
        10.0,
        le=600.0,
        description="Seconds for all tests of a response; tests that have not passed by then fail",
    )
    memory_mib: PositiveInt = Field(512, ge=64, description="Memory limit of the process, MiB")
    while_sampling: bool = Field(
        False,
        description="Run the tests of a response as soon as it is finished, while others are sampled: where sampling "
        "leaves cores of this machine idle, as on a GPU",
    )

    @property
    def sample_by_sample(self) -> bool:
        """As the spec says: beside vLLM on the same cores, tests could take longer than `timeout_s`."""
        return self.while_sampling


def _dead_references(schema: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """References that lead nowhere, each with the $id that it counts from, if that is not the schema's own.

    They are looked for where the draft has schemas, and where references lead: `const` and `enum` hold data.
    """
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import Draft202012Validator, validator_for
    from referencing import Registry
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import DRAFT202012, specification_with

    draft = specification_with(schema.get("$schema", ""), default=DRAFT202012)
    validator = validator_for(schema, default=Draft202012Validator)
    root, seen = draft.create_resource(schema), set[int]()
    waiting = [(root, Registry().resolver_with_root(root), "")]
    while waiting:
        one, resolver, base = waiting.pop()
        if not isinstance(one.contents, dict) or id(one.contents) in seen:
            continue
        seen.add(id(one.contents))
        for name in ("$ref", "$dynamicRef"):
            if isinstance(reference := one.contents.get(name), str):
                try:
                    found = resolver.lookup(reference)
                    validator.check_schema(found.contents)
                except (Unresolvable, SchemaError, ValueError, TypeError):  # the last two of odd addresses
                    yield reference, base
                else:
                    waiting.append((draft.create_resource(found.contents), found.resolver, base))
        for part in one.subresources():
            waiting.append((part, resolver.in_subresource(part), part.id() or base))
