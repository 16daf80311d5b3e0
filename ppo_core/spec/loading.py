"""Reading a spec file: YAML, overrides, and errors a person can act on."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError

Spec = TypeVar("Spec", bound=BaseModel)


class SpecError(ValueError):
    """A spec that cannot be run; each line of the message is one problem with its remedy."""


class _KeyAgain(yaml.YAMLError):
    """A key that a section has twice."""


class _EachKeyOnce(yaml.SafeLoader):
    """YAML as it is, but for keys that stand twice in one section: of their values one would be lost, silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in lines:
                raise _KeyAgain(
                    f"line {line}: the key {key.value} is there again, after line {lines[key.value]}: take one of the "
                    "two out"
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
        return cls.model_validate(document)
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
    cls = type(spec)
    try:
        return cls.model_validate(document)
    except ValidationError as error:
        raise SpecError("\n".join(explain(cls, error))) from None


def read_yaml(path: Path) -> dict[str, Any]:
    """The file's mapping. Raises SpecError for a missing file, broken YAML, or another type."""
    try:
        document = yaml.load(path.read_text(encoding="utf-8"), _EachKeyOnce)
    except OSError as error:
        raise SpecError(f"{path}: cannot be read ({error.strerror}): give the path of a YAML spec") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        if lines := _lines_with_tabs(path):
            raise SpecError(f"{path}: line {lines[0]} begins with a tab, and YAML is indented with spaces") from None
        raise SpecError(f"{path}: is not valid YAML: {error}") from None
    if not isinstance(document, dict):
        raise SpecError(f"{path}: holds {type(document).__name__}, not a mapping of sections such as `rollout:`")
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
            raise SpecError(f"--set {override!r}: {key} is a value, not a section")
        target = inner
    try:
        target[keys[-1]] = yaml.load(text, _EachKeyOnce)
    except yaml.YAMLError as error:
        raise SpecError(f"--set {override!r}: the value is not valid YAML: {error}") from None


def explain(cls: type[BaseModel], error: ValidationError) -> list[str]:
    """One line per problem: the key, what is wrong with which value, and what would be right."""
    lines = []
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"])
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            lines.append(f"{where}: unknown key{_suggestion(cls, item['loc'])}")
        elif item["type"] == "missing":
            lines.append(f"{where}: is required, and missing")
        elif item["type"] == "union_tag_invalid":
            lines.append(f"{where}.kind={item['ctx']['tag']!r}: choose one of {item['ctx']['expected_tags']}")
        elif item["type"] == "union_tag_not_found":
            kinds = ", ".join(repr(kind) for kind in _kinds(cls, item["loc"]))
            lines.append(f"{where}.kind: is required, and missing: choose one of {kinds}")
        elif item["type"] == "value_error":
            lines.append(f"{where}: {message}" if where else message)
        else:
            lines.append(f"{where}={item['input']!r}: {message}")
    return lines


def _suggestion(cls: type[BaseModel], location: tuple[int | str, ...]) -> str:
    models = _models_at(cls, location[:-1])
    known = list(models[0].model_fields) if models else []
    close = difflib.get_close_matches(str(location[-1]), known, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"{hint} (known: {', '.join(known)})" if known else hint


def _kinds(cls: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    return [model.model_fields["kind"].default for model in _models_at(cls, location)]


def _models_at(cls: type[BaseModel], location: tuple[int | str, ...]) -> list[type[BaseModel]]:
    """The sections that may stand at `location`, several where that is a union; empty where it is no section."""
    models: list[type[BaseModel]] = [cls]
    for part in location:
        if isinstance(part, int):  # a place in a list of sections
            continue
        # In a union the next part of the location is no field but the `kind` of the one that was meant.
        meant = [
            model for model in models if "kind" in model.model_fields and model.model_fields["kind"].default == part
        ]
        fields = [model.model_fields[part] for model in models if part in model.model_fields]
        models = meant or [model for field in fields for model in _models_in(field.annotation)]
    return models


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
