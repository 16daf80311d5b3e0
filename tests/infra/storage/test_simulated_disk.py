"""The simulated disk behaves as the real one while it has power, and finds a forgotten sync once it has not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from infra.runs.local_records import LocalRecords
from infra.storage.filesystem import FileSystem, LocalFiles, read_whole, tree
from tests.infra.artifacts.artifact_folders import CONTENT
from tests.infra.runs.leases import writer
from tests.infra.storage.faulty_files import Died
from tests.infra.storage.simulated_disk import SimulatedDisk
from tests.infra.storage.simulated_process import DiskFiles, Process
from tests.infra.storage.simulated_stores import ROOT, collector_on, fresh_disk, look, put

PLACES = ("a", "b", "a/c", "a/d", "b/c", "b/d", "a/c/e")
SEEDS = 1000


def attempt(files: FileSystem, base: Path, name: str, places: list[str]) -> object:
    """One operation, and what came of it."""
    first, second = (base / place for place in places)
    calls: dict[str, Callable[[], object]] = {
        "write": lambda: files.write(first, [second.name.encode() * 9]),
        "make_folder": lambda: files.make_folder(first),
        "remove": lambda: files.remove(first),
        "remove_folder": lambda: files.remove_folder(first),
        "rename": lambda: files.rename(first, second),
        "link": lambda: files.link(first, second),
        "names": lambda: files.names(first),
        "blocks": lambda: b"".join(files.blocks(first)),
        "status": lambda: None if (found := files.status(first)) is None else found.kind,
    }
    try:
        return calls[name]()
    except OSError as error:
        return error.errno


def test_it_does_what_the_real_one_does(tmp_path: Path):
    names = ["write", "make_folder", "make_folder", "remove", "remove_folder", "rename", "rename", "link"]
    for seed in range(150):
        dice, real, disk = Random(seed), LocalFiles(), SimulatedDisk()
        base = tmp_path / str(seed)
        real.make_folder(base)
        for number in range(60):
            name, places = dice.choice([*names, "names", "blocks", "status"]), dice.choices(PLACES, k=2)
            expected, found = attempt(real, base, name, places), attempt(disk, Path("/"), name, places)
            # Removing a folder as a file is the one complaint in which Linux itself is not of one mind.
            assert found == expected, f"seed {seed}, operation {number}: {name} {places}"
        theirs = {name: read_whole(real, base / name) for name in tree(real, base)}
        assert {name: read_whole(disk, Path("/") / name) for name in tree(disk, Path("/"))} == theirs


def test_what_was_synced_stays_and_what_was_not_goes_every_way():
    disk = fresh_disk()
    folder = ROOT.parent
    for name in ("kept", "torn", "unnamed"):
        disk.write(folder / name, [b"0123456789"])
    disk.sync_file(folder / "kept")
    disk.sync_file(folder / "unnamed")
    disk.sync_folder(folder)
    disk.rename(folder / "unnamed", folder / "renamed")
    cuts = [disk.after_power_cut(seed) for seed in range(SEEDS)]
    assert all(read_whole(cut, folder / "kept") == b"0123456789" for cut in cuts)
    torn = {read_whole(cut, folder / "torn") for cut in cuts}
    assert {b"", b"0123456789", b"01234", b"01234" + bytes(5), b"012" + bytes(3) + b"6789"} <= torn
    names = {tuple(cut.names(folder)) for cut in cuts}
    assert names == {("kept", "renamed", "torn"), ("kept", "torn", "unnamed")}
    assert [cut.names(folder) for cut in cuts] == [disk.after_power_cut(seed).names(folder) for seed in range(SEEDS)]


def test_changes_survive_in_any_order_but_never_lose_what_was_moved():
    disk = fresh_disk()
    place = ROOT.parent
    disk.make_folder(place / "old")
    disk.write(place / "old/file", [b"x"])
    disk.sync_file(place / "old/file")
    disk.sync_folder(place / "old")
    disk.sync_folder(place)
    disk.write(place / "first", [b""])
    disk.write(place / "second", [b""])
    disk.rename(place / "old/file", place / "file")
    disk.remove_folder(place / "old")
    found = {tuple(tree(cut, place)) for cut in map(disk.after_power_cut, range(SEEDS))}
    assert {("first", "old/file"), ("old/file", "second"), ("file",)} <= found
    assert all(("file" in names) != ("old/file" in names) for names in found)


class Forgetful(DiskFiles):
    """Does not do the syncs of one kind at some places."""

    def __init__(self, disk: SimulatedDisk, kind: str, forgotten: Callable[[Path], bool]) -> None:
        super().__init__(disk)
        self._kind = kind
        self._forgotten = forgotten

    def sync_file(self, path: Path) -> None:
        if self._kind != "sync_file" or not self._forgotten(path):
            super().sync_file(path)

    def sync_folder(self, folder: Path) -> None:
        if self._kind != "sync_folder" or not self._forgotten(folder):
            super().sync_folder(folder)


def put_once(files: FileSystem) -> None:
    put(files, "scores", "k", CONTENT)


def put_survives(disk: SimulatedDisk) -> bool:
    return look(disk, "scores", "k") == CONTENT


def commit_once(files: FileSystem) -> None:
    writer(ROOT, files).commit(0, {"a": 1})


def commit_survives(disk: SimulatedDisk) -> bool:
    try:
        return LocalRecords(ROOT, "r", files=disk).all() == [{"a": 1}]
    except RuntimeError:
        return False


def collect_until_it_dies(files: DiskFiles) -> None:
    put_once(files)
    real_remove, removed = files.remove, []

    def remove(path: Path) -> None:
        real_remove(path)
        removed.append(path)
        if len(removed) == 3:
            raise Died

    files.remove = remove
    with pytest.raises(Died):
        collector_on(files).collect([("scores", "k")], set)


def collect_leaves_no_half(disk: SimulatedDisk) -> bool:
    return look(disk, "scores", "k") in (None, CONTENT)


CASES = [
    (put_once, put_survives, "sync_file", lambda path: path.name == "state.json"),
    (put_once, put_survives, "sync_file", lambda path: path.name.startswith("manifest.json")),
    (put_once, put_survives, "sync_folder", lambda path: path.parent.name == "scratch"),
    (put_once, put_survives, "sync_folder", lambda path: path.name == "policy"),
    (put_once, put_survives, "sync_folder", lambda path: path == ROOT / "scores"),
    (put_once, put_survives, "sync_folder", lambda path: path == ROOT),
    (put_once, put_survives, "sync_folder", lambda path: path == ROOT.parent),
    (commit_once, commit_survives, "sync_file", lambda path: path.parent.name == "partial"),
    (commit_once, commit_survives, "sync_folder", lambda path: path.name == "iterations"),
    (commit_once, commit_survives, "sync_folder", lambda path: path.name == "r"),
    (commit_once, commit_survives, "sync_folder", lambda path: path.name == "runs"),
    (collect_until_it_dies, collect_leaves_no_half, "sync_folder", lambda path: path.parent.name == "trash"),
]


@pytest.mark.parametrize(("act", "survives", "kind", "forgotten"), CASES)
def test_a_forgotten_sync_is_found(
    act: Callable[[DiskFiles], None],
    survives: Callable[[SimulatedDisk], bool],
    kind: str,
    forgotten: Callable[[Path], bool],
):
    disk = fresh_disk()
    act(DiskFiles(disk))
    assert all(survives(disk.after_power_cut(seed)) for seed in range(200))
    disk = fresh_disk()
    act(Forgetful(disk, kind, forgotten))
    assert survives(disk), "only a power cut shows the difference"
    assert not all(survives(disk.after_power_cut(seed)) for seed in range(SEEDS))


def test_a_process_goes_on_only_when_it_is_let_and_dies_at_once():
    disk = fresh_disk()
    first, second = Process(disk), Process(disk)
    first.begin("put", lambda: put(first, "scores", "k", CONTENT))
    assert disk.names(ROOT.parent) == []
    steps = 0
    while look(disk, "scores", "k") is None:
        assert not first.step(1)
        steps += 1
    assert steps > 20
    first.die()
    assert first.work is None
    second.begin("lock", lambda: collector_on(second).collect([("scores", "k")], set))
    while ROOT / ".gc.lock" not in disk.locked:
        second.step(1)
    third = Process(disk)
    third.begin("lock too", lambda: collector_on(third).collect([("scores", "k")], set))
    assert not third.step(1000), "it waits for the lock"
    second.die()
    assert disk.locked == set()
    assert third.step(1000)
    assert look(disk, "scores", "k") is None
