"""The rooms of the house: what lies where can be seen at a glance."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath

import pytest

from tests.architecture.source_tree import LAYERS, Module, dotted, module_from, modules

MOST_ENTRIES = 20


def crowded_folders(sources: Iterable[Module]) -> Iterator[str]:
    """Folders that show more files and folders than can be taken in at once; `__init__` and `__main__` do not count."""
    shown: dict[str, set[str]] = {}
    for path in (PurePosixPath(module.path) for module in sources):
        for folder, entry in zip(path.parents, [path, *path.parents], strict=False):
            if entry.stem not in ("__init__", "__main__") and str(folder) != ".":
                shown.setdefault(str(folder), set()).add(entry.name)
    for folder, entries in sorted(shown.items()):
        if len(entries) > MOST_ENTRIES:
            yield f"{folder} shows {len(entries)} entries, at most {MOST_ENTRIES}: give what belongs together a folder"


def without_a_task(sources: Iterable[Module]) -> Iterator[str]:
    """Files directly in `tasks/` that hold no Prefect task: it reads as the contents of a run."""
    for module in sources:
        at_the_top = PurePosixPath(module.path).parent == PurePosixPath("tasks") and not module.is_package
        if at_the_top and not any(_is_stage(node) for node in module.tree.body):
            yield f"{module.path} holds no task: its place is in one of the folders beside it"


def _is_stage(node: ast.stmt) -> bool:
    if not isinstance(node, ast.FunctionDef):
        return False
    return any(isinstance(mark, ast.Call) and dotted(mark.func) == "stage" for mark in node.decorator_list)


def test_a_folder_can_be_taken_in_at_once() -> None:
    assert list(crowded_folders(modules(*LAYERS))) == []


def test_the_tasks_read_as_the_contents_of_a_run() -> None:
    assert list(without_a_task(modules("tasks"))) == []


@pytest.mark.parametrize(("count", "offences"), [(20, 0), (21, 1)])
def test_a_crowded_folder_is_seen(count: int, offences: int) -> None:
    sources = [module_from(f"infra/room/a{number}.py", "") for number in range(count)]
    assert len(list(crowded_folders([*sources, module_from("infra/room/__init__.py", "")]))) == offences


@pytest.mark.parametrize(
    ("path", "text", "offences"),
    [
        ("tasks/a.py", "@stage('a')\ndef a(): ...", 0),
        ("tasks/a.py", "def a(): ...", 1),
        ("tasks/room/a.py", "def a(): ...", 0),
    ],
)
def test_a_file_without_a_task_is_seen(path: str, text: str, offences: int) -> None:
    assert len(list(without_a_task([module_from(path, text)]))) == offences
