"""Budgets and bans that keep every file one thing that can be read at once."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath

import pytest

from tests.architecture.source_tree import LAYERS, Module, dotted, imports_of, module_from, modules, within

EVERYTHING = (*LAYERS, "tests", "benchmarks", "examples")
MAX_FILE_LINES = 300
MAX_FUNCTION_LINES = 60
FORBIDDEN_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "base"}
FORBIDDEN_CALLS = {"getattr", "hasattr", "eval", "exec"}
PICKLES = ("pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal")
Rule = Callable[[Module], Iterator[str]]
Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(module: Module) -> Iterator[Function]:
    yield from (node for node in ast.walk(module.tree) if isinstance(node, Function))


def calls(module: Module) -> Iterator[ast.Call]:
    yield from (node for node in ast.walk(module.tree) if isinstance(node, ast.Call))


def long_files(module: Module) -> Iterator[str]:
    if (lines := len(module.text.splitlines())) > MAX_FILE_LINES:
        yield f"{module.path}: {lines} lines, at most {MAX_FILE_LINES}: split it by its reasons to change"


def long_functions(module: Module) -> Iterator[str]:
    for node in functions(module):
        if (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > MAX_FUNCTION_LINES:
            yield f"{module.path}:{node.lineno}: {node.name} has {lines} lines, at most {MAX_FUNCTION_LINES}"


def empty_names(module: Module) -> Iterator[str]:
    path = PurePosixPath(module.path)
    if taken := FORBIDDEN_NAMES & {*path.parent.parts, path.stem}:
        yield f"{module.path}: {', '.join(sorted(taken))} promises nothing: name what it holds"


def busy_packages(module: Module) -> Iterator[str]:
    documented = ast.get_docstring(module.tree) is not None
    if module.is_package and not (documented and all(_names_again(node) for node in module.tree.body[1:])):
        yield f"{module.path}: holds its folder's promise as a docstring, names of its modules again, and nothing else"


def _names_again(node: ast.stmt) -> bool:
    listed = isinstance(node, ast.Assign) and dotted(node.targets[0]) == "__all__"
    return listed or (isinstance(node, ast.ImportFrom) and within(node.module or "", LAYERS))


def attribute_games(module: Module) -> Iterator[str]:
    for node in calls(module):
        if dotted(node.func).removeprefix("builtins.") in FORBIDDEN_CALLS:
            yield f"{module.path}:{node.lineno}: {dotted(node.func)}: say what the thing is instead of asking it"


def pickles(module: Module) -> Iterator[str]:
    for used in imports_of(module):
        if within(used.name, PICKLES):
            yield f"{module.path}:{used.line}: {used.name}: no pickle is ever read"
    for node in calls(module):
        options = {word.arg: word.value.value for word in node.keywords if isinstance(word.value, ast.Constant)}
        if dotted(node.func) == "torch.load" and options.get("weights_only") is not True:
            yield f"{module.path}:{node.lineno}: torch.load needs weights_only=True"
        if options.get("allow_pickle") is True:
            yield f"{module.path}:{node.lineno}: allow_pickle=True: no pickle is ever read"


def late_annotations(module: Module) -> Iterator[str]:
    if not module.is_package and "__future__.annotations" not in {used.name for used in imports_of(module)}:
        yield f"{module.path}: begins with `from __future__ import annotations`"


def missing_annotations(module: Module) -> Iterator[str]:
    for node in functions(module):
        given = node.args
        named = [*given.posonlyargs, *given.args, *given.kwonlyargs, *filter(None, (given.vararg, given.kwarg))]
        bare = [
            argument.arg for argument in named if argument.annotation is None and argument.arg not in ("self", "cls")
        ]
        if bare or node.returns is None:
            yield f"{module.path}:{node.lineno}: {node.name} lacks the type of {', '.join(bare) or 'its result'}"


def postponed_work(module: Module) -> Iterator[str]:
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        if token.type == tokenize.COMMENT and re.search(r"\b(TODO|FIXME|XXX|HACK)\b", token.string):
            yield f"{module.path}:{token.start[0]}: {token.string}: do it, or open an issue"


def mocks(module: Module) -> Iterator[str]:
    for used in imports_of(module):
        if within(used.name, ("unittest.mock", "mock", "pytest_mock")):
            yield f"{module.path}:{used.line}: {used.name}: a fake implements a port, our own code is never mocked"


RULES: dict[Rule, tuple[str, ...]] = {
    long_files: EVERYTHING,
    long_functions: EVERYTHING,
    empty_names: EVERYTHING,
    busy_packages: LAYERS,
    attribute_games: LAYERS,
    pickles: LAYERS,
    late_annotations: EVERYTHING,
    missing_annotations: LAYERS,
    postponed_work: EVERYTHING,
    mocks: EVERYTHING,
}


@pytest.mark.parametrize("rule", RULES)
def test_the_tree_keeps_the_rule(rule: Rule) -> None:
    offences = [offence for module in modules(*RULES[rule]) for offence in rule(module)]
    assert not offences, "\n".join(offences)


@pytest.mark.parametrize(
    ("rule", "path", "text"),
    [
        (long_files, "infra/a.py", "x = 1\n" * 301),
        (long_functions, "infra/a.py", "def f():\n" + "    x = 1\n" * 60),
        (empty_names, "infra/utils.py", ""),
        (empty_names, "infra/base/store.py", ""),
        (busy_packages, "infra/__init__.py", '"""Promise."""\nimport os'),
        (busy_packages, "infra/__init__.py", ""),
        (attribute_games, "infra/a.py", "x = getattr(y, 'z', None)"),
        (pickles, "infra/a.py", "import pickle"),
        (pickles, "ppo_core/a.py", "import torch\nx = torch.load('f')"),
        (pickles, "ppo_core/a.py", "import torch\nx = torch.load('f', weights_only=False)"),
        (pickles, "ppo_core/a.py", "import numpy\nx = numpy.load('f', allow_pickle=True)"),
        (late_annotations, "infra/a.py", "x = 1"),
        (missing_annotations, "infra/a.py", "def f(x) -> int: ..."),
        (missing_annotations, "infra/a.py", "def f(*, x: int): ..."),
        (postponed_work, "infra/a.py", "x = 1  # " + "TODO later"),
        (mocks, "tests/infra/test_a.py", "from unittest.mock import patch"),
    ],
)
def test_an_offence_is_seen(rule: Rule, path: str, text: str) -> None:
    assert len(list(rule(module_from(path, text)))) == 1


@pytest.mark.parametrize(
    ("rule", "path", "text"),
    [
        (long_files, "infra/a.py", "x = 1\n" * 300),
        (long_functions, "infra/a.py", "def f():\n" + "    x = 1\n" * 59),
        (empty_names, "infra/database.py", ""),
        (busy_packages, "infra/__init__.py", '"""Promise."""'),
        (attribute_games, "ppo_core/a.py", "model.eval()"),
        (pickles, "ppo_core/a.py", "import torch\nx = torch.load('f', weights_only=True)"),
        (late_annotations, "infra/a.py", "from __future__ import annotations"),
        (missing_annotations, "infra/a.py", "class A:\n    def f(self, x: int) -> int: ..."),
        (postponed_work, "infra/a.py", "x = 'TODO'"),
    ],
)
def test_what_is_allowed_passes(rule: Rule, path: str, text: str) -> None:
    assert list(rule(module_from(path, text))) == []
