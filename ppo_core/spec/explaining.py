"""What is wrong in a spec, in a line for each problem: the key, its value, and what would be right."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

LONGEST_VALUE = 80
_KEYED = ("dict_type", "model_type", "model_attributes_type")
_MEANT = {
    "algorithm": "kind",
    "dataset": "train",
    "dynamic_sampling": "max_batches",
    "kl": "coef",
    "lora": "rank",
    "model": "path",
    "overlong": "buffer",
    "preferences": "train",
    "reference": "kind",
    "registry": "model",
    "reward": "function",
    "reward_model": "file",
    "run": "file",
    "sft": "data",
    "sources": "function",
    "train": "path",
}
"""The key that a plain value means, in place of a section or of an entry of a list of sections."""
_REQUIREMENTS = {
    "missing": "is required but missing",
    "extra_forbidden": "is an unknown key",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "finite_number": "must be a finite number",
    "literal_error": "must be {expected}",
    "string_pattern_mismatch": "must match {pattern}",
    "string_too_short": "must have at least {min_length} characters",
    "string_too_long": "must have at most {max_length} characters",
    "too_short": "must have at least {min_length} entries",
    "too_long": "must have at most {max_length} entries",
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "must be a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "must be a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "must be true or false"),
    **dict.fromkeys(("list_type", "tuple_type"), "must be a list, as in [a, b]"),
    **dict.fromkeys(_KEYED, "must be keys with values, as in {{key: value}}"),
    "string_type": "must be text",
}
_MEMBER = re.compile(r"str|int|float|bool|list|constrained-\w+|[a-z]+(-[a-z]+)*\[.*\]")
"""How pydantic names the members of a union that is told apart by types."""


def explain(cls: type[BaseModel], error: ValidationError) -> list[str]:
    """One line per problem: the key, what is wrong with which value, and what would be right."""
    lines: list[tuple[str, str]] = []
    errors = error.errors()
    for item in errors:
        place = _place(cls, item["loc"])
        where, kind, asked = place.key, item["type"], requirement(item)
        written = _as_section(place, item["input"]) if kind in _KEYED else ""
        asked = "must be keys with values" if written else asked
        subject = f"{where}={shown(item['input'])}: must be "
        if kind == "extra_forbidden" and (entry := _entry(cls, item["loc"], errors)):
            if item["loc"][-1] == "kind":
                lines.append((f"{where}: rewards with a kind are listed", f": reward: {{sources: [{entry}]}}"))
        elif kind == "extra_forbidden":
            lines.append((f"{where}: unknown key", _suggestion(cls, item["loc"])))
        elif kind == "missing":
            lines.append((f"{where}: {asked}", place.meaning()))
        elif kind == "union_tag_invalid":
            lines.append((f"{where}.kind={item['ctx']['tag']!r}", f": choose one of {item['ctx']['expected_tags']}"))
        elif kind == "union_tag_not_found":
            kinds = ", ".join(repr(model.model_fields["kind"].default) for model in place.models)
            lines.append((f"{where}.kind: is required but missing", f": choose one of {kinds}"))
        elif kind == "value_error":
            lines.append((f"{where}: {asked}" if where else asked, ""))
        elif lines and lines[-1][0].startswith(subject):  # of a union, which wants one thing or another
            said, remedy = lines[-1]
            lines[-1] = f"{said}, or {asked.removeprefix('must be ')}", written or remedy
        else:
            remedy = place.meaning() if kind == "string_pattern_mismatch" else place.default()
            lines.append((f"{where}={shown(item['input'])}: {asked}", written or remedy))
    return [text + remedy for text, remedy in lines]


def _as_section(place: _Place, value: Any) -> str:
    """What to write in place of a plain value, where one key of the section is known to be meant."""
    name, entry, _ = place.key.rpartition(".")[2].partition("[")
    kinds = [model.model_fields["kind"].default for model in place.models if "kind" in model.model_fields]
    key = "kind" if value in kinds else _MEANT.get(name)
    if name == "function" and isinstance(value, list) and value and all(isinstance(one, str) for one in value):
        text = _keyed(dict.fromkeys(value, 1))
    elif key is not None and isinstance(value, str | int | float) and not isinstance(value, bool):
        text = _keyed({key: value})
    else:
        return ""
    return f": write {'-' if entry else f'{name}:'} {text}"


def _entry(cls: type[BaseModel], location: tuple[int | str, ...], errors: list[ErrorDetails]) -> str:
    """The unknown keys beside this one where they, with a kind, are those of an entry of the section's `sources`."""
    section = location[:-1]
    keys = {
        one["loc"][-1]: one["input"]
        for one in errors
        if one["type"] == "extra_forbidden" and one["loc"][:-1] == section
    }
    listed = any("sources" in model.model_fields for model in _place(cls, section).models)
    return _keyed(keys) if listed and "kind" in keys else ""


def _keyed(section: Mapping[Any, Any]) -> str:
    """A section as one writes it in one line."""
    return f"{{{_cut(', '.join(f'{key}: {value}' for key, value in section.items()))}}}"


def requirement(item: ErrorDetails) -> str:
    """What pydantic asks of a value that it refuses, in plain words."""
    kind, limits = item["type"], {name: _number(value) for name, value in item.get("ctx", {}).items()}
    if kind in ("string_too_short", "too_short") and limits["min_length"] == "1":
        return "must not be empty"
    words = _REQUIREMENTS.get(kind)
    if words is not None:
        return words.format(**limits)
    return item["msg"].removeprefix("Value error, ").replace("Input should be", "must be", 1)


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def shown(value: Any) -> str:
    """A value, cut where it is long."""
    return _cut(repr(value))


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 1]}…"


def _suggestion(cls: type[BaseModel], location: tuple[int | str, ...]) -> str:
    models = _place(cls, location[:-1]).models
    known = list(models[0].model_fields) if models else []
    close = difflib.get_close_matches(str(location[-1]), known, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"{hint} (known: {', '.join(known)})" if known else hint


class _Place(NamedTuple):
    """Where in a document a problem is: its key there, the field of that key, and the sections that may stand there."""

    key: str
    field: FieldInfo | None
    models: list[type[BaseModel]]

    def meaning(self) -> str:
        """What the field is for."""
        return f" ({self.field.description})" if self.field is not None and self.field.description else ""

    def default(self) -> str:
        """The field's default, where that is a plain value."""
        value = None if self.field is None else self.field.default
        shown = str(value).lower() if isinstance(value, bool) else value
        return f" (default: {shown})" if isinstance(shown, int | float | str) else ""


def _place(cls: type[BaseModel], location: tuple[int | str, ...]) -> _Place:
    """The place at pydantic's `location`, which also names the members of unions: the document has none of those."""
    key, field = "", None
    models: list[type[BaseModel]] = [cls]
    for part in location:
        if isinstance(part, int):
            key, field = f"{key}[{part}]", None
            continue
        kinds = [model for model in models if "kind" in model.model_fields] if len(models) > 1 else []
        meant = [model for model in kinds if model.model_fields["kind"].default == part]
        fields = [model.model_fields[part] for model in models if part in model.model_fields]
        if meant or (not fields and _MEMBER.fullmatch(part)):
            models = meant
            continue
        key, field = f"{key}.{part}" if key else part, fields[0] if fields else None
        models = [model for found in fields for model in _models_in(found.annotation)]
    return _Place(key, field, models)


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models_in(part)]
