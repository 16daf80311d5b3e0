"""A disk in memory that can lose its power, for tests of what survives.

Two things are durable: the content of a file after `sync_file`, and the names in a folder after `sync_folder`. Of all
else a power cut keeps what it likes, by seed: of each file that was not synced nothing, a part, zeros or all; of the
changes to names any of them, in any order. As on ext4, xfs and btrfs, a rename is one step that happened or not, two
changes of the same name keep their order, and a folder is not gone before what was moved out of it has its new name.
Stricter than these, `sync_file` does not make a name durable, and a rename is durable with its target's folder only.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Literal

from infra.storage.filesystem import Status

ROOT = 1


@dataclass
class Node:
    """A file or a folder; `entries` are the names in a folder, `synced` says that a file's content is durable."""

    folder: bool
    modified_ns: int
    changed_ns: int
    content: bytes = b""
    synced: bool = False
    entries: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Change:
    """A change of names that is not durable: each (folder, name) gets a node or none; it never precedes `after`."""

    number: int
    edits: tuple[tuple[int, str, int | None], ...]
    folder: int
    after: frozenset[int]


class SimulatedDisk:
    """A `FileSystem` with its own clock; whoever asks for a lock that is held has made a deadlock."""

    def __init__(self) -> None:
        self.now_ns = 10**9
        self.locked: set[Path] = set()
        self._count = ROOT
        self._nodes = {ROOT: Node(folder=True, modified_ns=0, changed_ns=0)}
        self._durable: dict[int, dict[str, int]] = {ROOT: {}}
        self._pending: list[Change] = []

    def status(self, path: Path) -> Status | None:
        number = self._find(path)
        if number is None:
            return None
        node = self._nodes[number]
        kind: Literal["file", "folder"] = "folder" if node.folder else "file"
        return Status(kind, len(node.content), 1, number, node.modified_ns, node.changed_ns)

    def names(self, folder: Path) -> list[str]:
        return sorted(self._nodes[self._folder(folder)].entries)

    def blocks(self, path: Path) -> Iterator[bytes]:
        content = self._nodes[self._file(path)].content
        return iter([content] if content else [])

    def write(self, path: Path, blocks: Iterable[bytes]) -> None:
        content = b"".join(blocks)
        self._add(path, Node(folder=False, modified_ns=0, changed_ns=0, content=content))

    def sync_file(self, path: Path) -> None:
        self._nodes[self._file(path)].synced = True

    def sync_folder(self, folder: Path) -> None:
        number = self._folder(folder)
        wanted: set[int] = set()
        for change in reversed(self._pending):
            if change.folder == number or change.number in wanted:
                wanted |= {change.number, *change.after}
        for change in self._pending:
            if change.number in wanted:
                _apply(change, self._durable)
        self._pending = [change for change in self._pending if change.number not in wanted]

    def rename(self, source: Path, target: Path) -> None:
        below, above = self._folder(source.parent), self._folder(target.parent)
        moved = self._existing(source)
        taken = self._nodes[above].entries.get(target.name)
        if taken == moved:
            return
        if target.is_relative_to(source):
            raise _error(errno.EINVAL, source)
        if source.is_relative_to(target):
            raise _error(errno.ENOTEMPTY, source)
        if taken is not None:
            self._refuse_replacing(moved, taken, source)
        emptied = {taken} if taken is not None and self._nodes[taken].folder else set()
        self._change([(below, source.name, None), (above, target.name, moved)], emptied)

    def link(self, source: Path, target: Path) -> None:
        number = self._existing(source)
        above = self._folder(target.parent)
        if target.name in self._nodes[above].entries:
            raise _error(errno.EEXIST, source)
        if self._nodes[number].folder:
            raise _error(errno.EPERM, source)
        self._nodes[number].changed_ns = self._tick()
        self._change([(above, target.name, number)])

    def remove(self, path: Path) -> None:
        self._file(path)
        self._change([(self._folder(path.parent), path.name, None)])

    def remove_folder(self, folder: Path) -> None:
        number = self._folder(folder)
        if self._nodes[number].entries:
            raise _error(errno.ENOTEMPTY, folder)
        self._change([(self._folder(folder.parent), folder.name, None)], {number})

    def make_folder(self, folder: Path) -> None:
        number = self._find(folder)
        if number is None:
            self._add(folder, Node(folder=True, modified_ns=0, changed_ns=0))
        elif not self._nodes[number].folder:
            raise _error(errno.EEXIST, folder)

    def protect(self, path: Path) -> None:
        self._nodes[self._existing(path)].changed_ns = self._tick()

    def writable(self, folder: Path) -> bool:
        return self._find(folder) is not None

    @contextmanager
    def exclusive(self, path: Path) -> Iterator[None]:
        if self._find(path) is None:
            self.write(path, [])
        assert path not in self.locked, f"deadlock: {path} is held"
        self.locked.add(path)
        try:
            yield
        finally:
            self.locked.discard(path)

    def overwrite(self, path: Path, content: bytes) -> None:
        """Damage a file: no operation of the store does this."""
        node = self._nodes[self._file(path)]
        node.content, node.modified_ns, node.changed_ns = content, self._tick(), self.now_ns

    def copy(self) -> SimulatedDisk:
        """The same disk once more, with everything that is not durable yet."""
        twin = SimulatedDisk()
        twin.now_ns, twin._count = self.now_ns, self._count
        twin._nodes = {number: replace(node, entries=dict(node.entries)) for number, node in self._nodes.items()}
        twin._durable = {number: dict(entries) for number, entries in self._durable.items()}
        twin._pending = list(self._pending)
        return twin

    def after_power_cut(self, seed: int) -> SimulatedDisk:
        """What a machine finds here that starts again after its power was cut now."""
        dice = Random(seed)
        chance = dice.choice((0.0, 0.1, 0.5, 0.9, 1.0))
        names = {number: dict(entries) for number, entries in self._durable.items()}
        for change in self._survivors(dice, chance):
            _apply(change, names)
        found = SimulatedDisk()
        found.now_ns, found._count = self.now_ns + 10**9, self._count
        found._nodes = {}
        waiting = [ROOT]
        while waiting:
            number = waiting.pop()
            node, entries = self._nodes[number], names.get(number, {})
            whole = node.folder or node.synced or dice.random() < chance
            content = node.content if whole else _torn(node.content, dice)
            found._nodes[number] = replace(node, content=content, synced=True, entries=dict(entries))
            waiting.extend(sorted(set(entries.values()) - set(found._nodes)))
        found._durable = {number: dict(node.entries) for number, node in found._nodes.items() if node.folder}
        return found

    def _survivors(self, dice: Random, chance: float) -> list[Change]:
        if dice.random() < 0.25:
            return self._pending[: dice.randint(0, len(self._pending))]
        lost: set[int] = set()
        for change in self._pending:
            if change.after & lost or dice.random() >= chance:
                lost.add(change.number)
        return [change for change in self._pending if change.number not in lost]

    def _change(self, edits: list[tuple[int, str, int | None]], emptied: set[int] = frozenset()) -> None:
        now = self._tick()
        self._count += 1
        touched = {(folder, name) for folder, name, _ in edits}
        after = {
            change.number
            for change in self._pending
            if any((folder, name) in touched or folder in emptied for folder, name, _ in change.edits)
        }
        self._pending.append(Change(self._count, tuple(edits), edits[-1][0], frozenset(after)))
        for folder, name, node in edits:
            above = self._nodes[folder]
            above.modified_ns = above.changed_ns = now
            _edit(above.entries, name, node)

    def _add(self, path: Path, node: Node) -> None:
        above = self._folder(path.parent)
        if path.name in self._nodes[above].entries:
            raise _error(errno.EEXIST, path)
        self._count += 1
        number = self._count
        self._nodes[number] = node
        node.modified_ns = node.changed_ns = self._tick()
        if node.folder:
            self._durable[number] = {}
        self._change([(above, path.name, number)])

    def _refuse_replacing(self, moved: int, taken: int, source: Path) -> None:
        ours, theirs = self._nodes[moved], self._nodes[taken]
        if ours.folder and not theirs.folder:
            raise _error(errno.ENOTDIR, source)
        if theirs.folder and not ours.folder:
            raise _error(errno.EISDIR, source)
        if theirs.entries:
            raise _error(errno.ENOTEMPTY, source)

    def _find(self, path: Path) -> int | None:
        number: int | None = ROOT
        for part in path.parts[1:]:
            number = None if number is None else self._nodes[number].entries.get(part)
        return number

    def _existing(self, path: Path) -> int:
        if (number := self._find(path)) is None:
            below_file = any((above := self._find(on)) and not self._nodes[above].folder for on in path.parents)
            raise _error(errno.ENOTDIR if below_file else errno.ENOENT, path)
        return number

    def _folder(self, path: Path) -> int:
        if not self._nodes[number := self._existing(path)].folder:
            raise _error(errno.ENOTDIR, path)
        return number

    def _file(self, path: Path) -> int:
        if self._nodes[number := self._existing(path)].folder:
            raise _error(errno.EISDIR, path)
        return number

    def _tick(self) -> int:
        self.now_ns += 1000
        return self.now_ns


def _apply(change: Change, names: dict[int, dict[str, int]]) -> None:
    for folder, name, node in change.edits:
        _edit(names[folder], name, node)


def _edit(entries: dict[str, int], name: str, node: int | None) -> None:
    if node is None:
        entries.pop(name, None)
    else:
        entries[name] = node


def _torn(content: bytes, dice: Random) -> bytes:
    """What may be left of a file that was not synced: an empty one, a beginning, zeros at the end or in between."""
    first, last = sorted((dice.randint(0, len(content)), dice.randint(0, len(content))))
    hole = content[:first] + bytes(last - first) + content[last:]
    return dice.choice((b"", content[:first], content[:first] + bytes(len(content) - first), hole))


def _error(number: int, path: Path) -> OSError:
    return OSError(number, os.strerror(number), str(path))
