"""Which tests are pure: they reach nothing that starts a process, so `make check` can run them while somebody types."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.architecture.source_tree import (
    LAYERS,
    ROOT,
    Module,
    dotted,
    edges,
    imports_of,
    modules,
    reachable,
    within,
)

# What starts processes, and what takes longer to import than pure tests to run.
STARTERS = ("subprocess", "multiprocessing", "deepspeed", "ray", "vllm")


def is_pure(item: pytest.Item) -> bool:
    """Whether neither its file nor a fixture that it asks for reaches one of `STARTERS`, by imports at any depth."""
    asked = set(item.fixturenames) if isinstance(item, pytest.Function) else set()
    return name_of(item.path) not in impure_modules() and not asked & impure_fixtures()


def name_of(path: Path) -> str:
    """The dotted name of a file of the repository."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


@cache
def impure_modules() -> frozenset[str]:
    """Everything of ours that reaches one of `STARTERS`."""
    sources = modules(*LAYERS, "tests")
    graph = edges(sources)
    starters = {module.name for module in sources if any(within(used.name, STARTERS) for used in imports_of(module))}
    return frozenset(name for name in graph if reachable(name, graph) & starters)


@cache
def impure_fixtures() -> frozenset[str]:
    """The fixtures in impure conftest files, but for those that every test gets."""
    files = [module for module in modules("tests") if module.name.endswith(".conftest")]
    return frozenset(name for module in files if module.name in impure_modules() for name in fixtures_of(module))


def fixtures_of(module: Module) -> Iterator[str]:
    """The names of a module's fixtures that are not automatic."""
    for node in module.tree.body:
        for mark in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
            call = mark if isinstance(mark, ast.Call) else None
            automatic = call is not None and any(keyword.arg == "autouse" for keyword in call.keywords)
            if dotted(call.func if call else mark) == "pytest.fixture" and not automatic:
                yield node.name
