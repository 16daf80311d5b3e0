"""Reading a spec file: YAML and overrides. What is wrong in it is said by `explaining`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from ppo_core.spec.explaining import explain, shown

Spec = TypeVar("Spec", bound=BaseModel)


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
        text = path.read_text(encoding="utf-8")
        document = yaml.load(text, _EachKeyOnce)
    except OSError as error:
        raise SpecError(f"{path}: cannot be read ({error.strerror}): give the path of a spec, a YAML file") from None
    except UnicodeDecodeError as error:
        raise SpecError(f"{path}: byte {error.start + 1} is not UTF-8: save the file as text in UTF-8") from None
    except yaml.YAMLError as error:
        if lines := _lines_with_tabs(text):
            raise SpecError(f"{path}: line {lines[0]} is indented with a tab: YAML takes only spaces") from None
        mark, remedy = _trouble(error)
        if mark is None:
            raise SpecError(f"{path}: not valid YAML{remedy}") from None
        read = text.splitlines()
        line = shown(read[mark.line].strip()) if mark.line < len(read) else "the file ends"
        where = f"line {mark.line + 1}, column {mark.column + 1}"
        raise SpecError(f"{path} {where}: not valid YAML here{remedy}: {line}") from None
    if not isinstance(document, dict):
        found = "is empty" if document is None else f"holds {shown(document)}"
        raise SpecError(f"{path}: {found}: a spec consists of sections with keys, such as `rollout:`")
    return document


def _trouble(error: yaml.YAMLError) -> tuple[yaml.Mark | None, str]:
    """Where a text stops to be YAML, if that has a place, and what to look at."""
    if not isinstance(error, yaml.MarkedYAMLError):
        return None, f": {' '.join(str(error).split())}"
    context = error.context or ""
    if context.startswith(("while parsing a flow", "while scanning a quoted")):
        return error.context_mark, "; look at commas, and for a bracket or a quote that is not closed"
    mark = error.context_mark if context == "while scanning a simple key" else error.problem_mark
    return mark, "; look at the indentation, and at colons and other signs in texts (write those in quotes)"


def _lines_with_tabs(text: str) -> list[int]:
    """The numbers of the lines that are indented with a tab."""
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
        raise SpecError(f"--set {override!r}: the value is not valid YAML{_trouble(error)[1]}") from None


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
