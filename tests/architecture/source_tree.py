"""Reads the repository's sources without importing them, for the tests of its structure."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LAYERS = ("flows", "tasks", "ppo_core", "infra")


@dataclass(frozen=True)
class Import:
    """One imported name, as far as it is spelled: `from infra import artifacts` gives `infra.artifacts`."""

    name: str
    line: int


@dataclass(frozen=True)
class Module:
    """A source file: its dotted name, its path below the root, its text and its syntax tree."""

    name: str
    path: str
    text: str
    tree: ast.Module

    @property
    def is_package(self) -> bool:
        return self.path.endswith("__init__.py")

    @property
    def layer(self) -> str:
        return self.name.partition(".")[0]


def module_from(path: str, text: str) -> Module:
    """A module from its text, so that the tests can be tried on examples."""
    name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return Module(name, path, text, ast.parse(text, path))


@cache
def modules(*folders: str) -> tuple[Module, ...]:
    """All modules below these folders of the repository; a missing folder has none."""
    paths = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return tuple(_read(path) for path in paths)


@cache
def _read(path: Path) -> Module:
    return module_from(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))


def imports_of(module: Module) -> Iterator[Import]:
    """Every import of a module, also inside functions, under TYPE_CHECKING and by import_module with a literal name."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = _origin(module, node)
            yield from (Import(f"{origin}.{alias.name}".lstrip("."), node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call) and dotted(node.func).rpartition(".")[2] in ("import_module", "__import__"):
            literals = [argument.value for argument in node.args[:1] if isinstance(argument, ast.Constant)]
            yield from (Import(str(name), node.lineno) for name in literals)


def edges(sources: Iterable[Module], *, for_types: bool = False) -> dict[str, set[str]]:
    """Which of these modules imports which others of them when it runs, with the packages on the way.

    With `for_types` also the imports that only annotations need.
    """
    sources = tuple(sources)
    names = {module.name for module in sources}
    return {
        module.name: {
            target
            for used in (imports_of(module) if for_types else _executed(module))
            for target in _targets(used, names)
        }
        for module in sources
    }


def reachable(start: str, graph: Mapping[str, set[str]]) -> set[str]:
    """Everything that importing `start` imports, itself included."""
    found, waiting = {start}, [start]
    while waiting:
        new = graph[waiting.pop()] - found
        found |= new
        waiting.extend(new)
    return found


def dotted(node: ast.expr) -> str:
    """`a.b.c` for such an expression, else an empty text."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return ""


def within(name: str, prefixes: Iterable[str]) -> bool:
    """Whether a dotted name is one of the prefixes or lies below one."""
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def _origin(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    parents = parts[: len(parts) - node.level + module.is_package]
    return ".".join([*parents, *([node.module] if node.module else [])])


def _executed(module: Module) -> Iterator[Import]:
    guards = [
        node
        for node in ast.walk(module.tree)
        if isinstance(node, ast.If) and dotted(node.test).endswith("TYPE_CHECKING")
    ]
    for_types = {line for guard in guards for node in guard.body for line in range(node.lineno, _end(node) + 1)}
    return (used for used in imports_of(module) if used.line not in for_types)


def _end(node: ast.stmt) -> int:
    return node.end_lineno or node.lineno


def _targets(used: Import, names: set[str]) -> Iterator[str]:
    parts = used.name.split(".")
    yield from (".".join(parts[:end]) for end in range(1, len(parts) + 1) if ".".join(parts[:end]) in names)
