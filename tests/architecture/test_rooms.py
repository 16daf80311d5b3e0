"""The rooms of the house: what lies where can be seen at a glance."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from pathlib import PurePosixPath

import pytest

from tests.architecture.source_tree import LAYERS, Module, dotted, edges, module_from, modules, reachable

MOST_ENTRIES = 20
IN_ONE_DIRECTION = ("ppo_core", "tasks", "infra", "flows")
"""Packages whose rooms have an order, in which each imports only those below it."""


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


def circles(sources: Sequence[Module]) -> Iterator[str]:
    """Imports from a room into one that imports it too, itself or by others; for types and inside functions as well.

    A room is a folder directly in a package, with all below it. Files beside the rooms are in none.
    """
    paths = {module.name: PurePosixPath(module.path).parts for module in sources}
    rooms = {name: "/".join(parts[:2]) for name, parts in paths.items() if len(parts) > 2}
    imports = edges(sources, for_types=True)
    others = {name: {rooms.get(target, room) for target in imports[name]} - {room} for name, room in rooms.items()}
    graph: dict[str, set[str]] = {room: set() for room in rooms.values()}
    for name, room in rooms.items():
        graph[room] |= others[name]
    for name, room in sorted(rooms.items()):
        for other in sorted(others[name]):
            if room in reachable(other, graph):
                yield f"{name} imports {other}, which imports {room}, itself or by others: move it up, or that down"


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


def test_rooms_import_each_other_in_one_direction() -> None:
    for package in IN_ONE_DIRECTION:
        assert list(circles(modules(package))) == []


def test_the_tasks_read_as_the_contents_of_a_run() -> None:
    assert list(without_a_task(modules("tasks"))) == []


@pytest.mark.parametrize(("count", "offences"), [(20, 0), (21, 1)])
def test_a_crowded_folder_is_seen(count: int, offences: int) -> None:
    sources = [module_from(f"infra/room/a{number}.py", "") for number in range(count)]
    assert len(list(crowded_folders([*sources, module_from("infra/room/__init__.py", "")]))) == offences


@pytest.mark.parametrize(
    ("texts", "offenders"),
    [
        ({"a/x": "from infra.b import y", "b/y": "import infra.a.x"}, ["a.x", "b.y"]),
        ({"a/x": "from infra.b.y import f", "b/z": "def f():\n    from infra.a import x"}, ["a.x", "b.z"]),
        ({"a/x": "from ..b import y", "b/z": "if TYPE_CHECKING:\n    from infra.a.x import X"}, ["a.x", "b.z"]),
        (
            {"a/x": "import infra.b.y", "b/z": "import infra.c.z", "c/deep/z": "import infra.a.x"},
            ["a.x", "b.z", "c.deep.z"],
        ),
        ({"a/x": "import infra.b.y, infra.c.z", "b/y": "import infra.c.z", "c/z": "import infra.top"}, []),
        ({"a/x": "import infra.a.y", "a/y": "import infra.b.y", "top": "import infra.a.x"}, []),
    ],
)
def test_rooms_that_import_each_other_are_seen(texts: dict[str, str], offenders: list[str]) -> None:
    names = {"a/x", "b/y", "b/z", "c/z", "top", *texts}
    rooms = [module_from(f"infra/{room}/__init__.py", "") for room in "abc"]
    sources = [module_from(f"infra/{name}.py", texts.get(name, "")) for name in sorted(names)]
    assert [offence.split()[0] for offence in circles([*rooms, *sources])] == [f"infra.{name}" for name in offenders]


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
