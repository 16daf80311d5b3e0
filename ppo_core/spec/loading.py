"""Reading a spec file: YAML, overrides, and errors that say what to do."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

Spec = TypeVar("Spec", bound=BaseModel)
LONGEST_VALUE = 80
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
    **dict.fromkeys(
        ("dict_type", "model_type", "model_attributes_type"), "must be keys with values, as in {{key: value}}"
    ),
    "string_type": "must be text",
}
_MEMBER = re.compile(r"str|int|float|bool|list|constrained-\w+|[a-z]+(-[a-z]+)*\[.*\]")
"""How pydantic names the members of a union that is told apart by types."""


class SpecError(ValueError):
    """A spec that cannot be run; each line of the message is one problem with its remedy."""


class _KeyAgain(yaml.YAMLError):
    """A section sets a key twice."""


class _EachKeyOnce(yaml.SafeLoader):
    """YAML, except that a key that is set twice in one section is refused: one of its values would be lost silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in lines:
                raise _KeyAgain(
                    f"line {line}: the key {key.value} was set on line {lines[key.value]} already: remove one"
                )
            lines[key.value] = line
        return super().construct_mapping(node, deep)


def load_spec(cls: type[Spec], path: Path, overrides: Iterable[str], parts: Iterable[str] = ()) -> Spec:
    """Parse `path`, apply `overrides`, validate. Raises SpecError.
    `parts` are sections that are specs themselves, and may name the `file` of one: other keys there go over the file's.
    """
    document = read_yaml(path)
    for override in overrides:
        apply_override(document, override)
    for part in parts:
        section = document.get(part)
        if isinstance(section, dict) and "file" in section:
            document[part] = _from_file(section, path.parent)
    document.setdefault("folder", str(path.resolve().parent))
    try:
        return cls.model_validate(document, context="written by a person")  # a record has what was filled in too
    except ValidationError as error:
        raise SpecError("\n".join(f"{path}: {line}" for line in explain(cls, error))) from None


def _from_file(section: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The mapping in the section's `file`, its folder included, with the section's other keys over it."""
    name = Path(str(section["file"])).expanduser()
    found = {"folder": str(name.parent), **read_yaml(folder / name)}
    return laid_over(found, {key: value for key, value in section.items() if key != "file"})


def laid_over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Both mappings as one: where both have a key, mappings are joined, and any other value is that of `above`.

    >>> laid_over({"a": {"x": 1, "y": 2}, "b": [1]}, {"a": {"y": 3}, "b": []})
    {'a': {'x': 1, 'y': 3}, 'b': []}
    """
    both = {**below, **above}
    for key in below.keys() & above.keys():
        if isinstance(below[key], Mapping) and isinstance(above[key], Mapping):
            both[key] = laid_over(below[key], above[key])
    return both


def overridden(spec: Spec, overrides: Iterable[str]) -> Spec:
    """Apply `overrides` to a spec and validate. Raises SpecError."""
    document = spec.model_dump(mode="json")
    for override in overrides:
        apply_override(document, override)
    return validated(type(spec), document)


def validated(cls: type[Spec], document: Mapping[str, Any]) -> Spec:
    """The spec that a document holds. Raises SpecError."""
    try:
        return cls.model_validate(document)
    except ValidationError as error:
        raise SpecError("\n".join(explain(cls, error))) from None


def read_yaml(path: Path) -> dict[str, Any]:
    """The file's mapping. Raises SpecError for a missing file, broken YAML, or another type."""
    try:
        document = yaml.load(path.read_text(encoding="utf-8"), _EachKeyOnce)
    except OSError as error:
        raise SpecError(f"{path}: cannot be read ({error.strerror}): give the path of a spec, a YAML file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        if lines := _lines_with_tabs(path):
            raise SpecError(f"{path}: line {lines[0]} is indented with a tab: YAML takes only spaces") from None
        raise SpecError(f"{path}: not valid YAML: {error}") from None
    if not isinstance(document, dict):
        found = "is empty" if document is None else f"holds {_shown(document)}"
        raise SpecError(f"{path}: {found}: a spec consists of sections with keys, such as `rollout:`")
    return document


def _lines_with_tabs(path: Path) -> list[int]:
    """The numbers of the lines that are indented with a tab."""
    text = path.read_text(encoding="utf-8", errors="replace")
    return [number for number, line in enumerate(text.splitlines(), 1) if "\t" in line[: -len(line.lstrip()) or None]]


def apply_override(document: dict[str, Any], override: str) -> None:
    """Set one `section.key=value` (the value read as YAML) in place. Raises SpecError."""
    name, equals, text = override.partition("=")
    keys = name.strip().split(".")
    if not equals or not all(keys):
        raise SpecError(f"--set {override!r} is not section.key=value, for example rollout.temperature=0.7")
    target = document
    for key in keys[:-1]:
        inner = target.get(key)
        if inner is None:
            inner = target[key] = {}
        if not isinstance(inner, dict):
            raise SpecError(f"--set {override!r}: {key} is a value, not a section: write {key}=VALUE")
        target = inner
    try:
        target[keys[-1]] = yaml.load(text, _EachKeyOnce)
    except yaml.YAMLError as error:
        raise SpecError(f"--set {override!r}: the value is not valid YAML: {error}") from None


def explain(cls: type[BaseModel], error: ValidationError) -> list[str]:
    """One line per problem: the key, what is wrong with which value, and what would be right."""
    lines: list[tuple[str, str]] = []
    for item in error.errors():
        place = _place(cls, item["loc"])
        where, kind, asked = place.key, item["type"], requirement(item)
        subject = f"{where}={_shown(item['input'])}: must be "
        if kind == "extra_forbidden":
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
            lines[-1] = f"{lines[-1][0]}, or {asked.removeprefix('must be ')}", lines[-1][1]
        else:
            remedy = place.meaning() if kind == "string_pattern_mismatch" else place.default()
            lines.append((f"{where}={_shown(item['input'])}: {asked}", remedy))
    return [text + remedy for text, remedy in lines]


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


def _shown(value: Any) -> str:
    text = repr(value)
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


def differing_keys(recorded: Mapping[str, Any], requested: Mapping[str, Any], prefix: str = "") -> list[str]:
    """`key: recorded -> requested` for every leaf that differs between two spec documents."""
    lines = []
    for key in sorted({*recorded, *requested}):
        before, after = recorded.get(key), requested.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            lines += differing_keys(before, after, f"{prefix}{key}.")
        elif before != after:
            lines.append(f"{prefix}{key}: {before!r} -> {after!r}")
    return lines
