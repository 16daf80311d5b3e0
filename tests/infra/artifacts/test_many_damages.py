"""Ten thousand damages to a store: every one is found and named, and nothing wrong ever comes out as right.

Damaged are the files of artifacts, their manifests, and records. An extra file in an artifact is damage: only what
other programs leave there by known names is none. An extra file beside records is not: it is no record.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest

from infra.artifacts import ArtifactCorrupted, ArtifactFormatTooNew, ArtifactMissing, ArtifactRef
from infra.artifacts.manifest import MANIFEST_NAME
from infra.runs.local_records import LocalRecords
from infra.runs.records import RecordCorrupted, RecordFormatTooNew, RecordMissing
from infra.storage.filesystem import read_whole, tree
from tests.infra.runs.leases import writer
from tests.infra.storage.simulated_disk import SimulatedDisk
from tests.infra.storage.simulated_stores import ROOT, fresh_disk, open_on, put, read

CASES = 10_000
BATCHES = 10
ITERATIONS = 4
CONTENTS = {
    ("checkpoint", "k1"): {
        "policy/model.safetensors": bytes(range(256)) * 4,
        "policy/config.json": b"{}",
        "empty": b"",
    },
    ("checkpoint", "k2"): {"policy/model.safetensors": bytes(range(255, -1, -1)) * 4, "state.json": b'{"step": 12}'},
    ("scores", "k1"): {"scores.parquet": b"PAR1" + bytes(500) + b"PAR1", "stats.json": b'{"mean": 0.25}'},
}
FOUND = (
    ArtifactCorrupted,
    ArtifactMissing,
    ArtifactFormatTooNew,
    RecordCorrupted,
    RecordMissing,
    RecordFormatTooNew,
)


@dataclass(frozen=True)
class Blow:
    """A damage: what was done, and the files that complaints must name."""

    what: str
    hurt: tuple[Path, ...]


Damage = Callable[[SimulatedDisk, Path, Random], Blow]


def flipped(disk: SimulatedDisk, path: Path, dice: Random) -> Blow:
    content = bytearray(read_whole(disk, path))
    if not content:
        return appended(disk, path, dice)
    where = dice.randrange(len(content))
    content[where] ^= 1 << dice.randrange(8)
    disk.overwrite(path, bytes(content))
    return Blow(f"bit of byte {where} flipped", (path,))


def cut(disk: SimulatedDisk, path: Path, dice: Random) -> Blow:
    content = read_whole(disk, path)
    if not content:
        return missing(disk, path, dice)
    length = dice.randrange(len(content))
    disk.overwrite(path, content[:length])
    return Blow(f"cut to {length} bytes", (path,))


def emptied(disk: SimulatedDisk, path: Path, dice: Random) -> Blow:
    if not read_whole(disk, path):
        return appended(disk, path, dice)
    disk.overwrite(path, b"")
    return Blow("emptied", (path,))


def appended(disk: SimulatedDisk, path: Path, dice: Random) -> Blow:
    more = dice.choice((b" ", b"\n", b"\0", b"}", dice.randbytes(9)))
    disk.overwrite(path, read_whole(disk, path) + more)
    return Blow(f"{more!r} appended", (path,))


def zeroed(disk: SimulatedDisk, path: Path, dice: Random) -> Blow:
    content = read_whole(disk, path)
    start = dice.randrange(len(content) + 1)
    end = min(len(content), start + dice.randint(1, 64))
    holed = content[:start] + bytes(end - start) + content[end:]
    if holed == content:
        return flipped(disk, path, dice)
    disk.overwrite(path, holed)
    return Blow(f"zeros from byte {start}", (path,))


def missing(disk: SimulatedDisk, path: Path, dice: Random) -> Blow:
    disk.remove(path)
    return Blow("missing", (path,))


def replaced(disk: SimulatedDisk, path: Path, dice: Random) -> Blow:
    content = read_whole(disk, path)
    other = dice.choice([other for other in files_of(disk) if read_whole(disk, other) != content])
    disk.overwrite(path, read_whole(disk, other))
    if dice.random() < 0.5:
        return Blow(f"has the content of {other}", (path,))
    disk.overwrite(other, content)
    return Blow("swapped", (path, other))


def extra(disk: SimulatedDisk, path: Path, dice: Random) -> Blow:
    folder = dice.choice([path.parent for path in files_of(disk) if path.parent.name != "iterations"])
    name = dice.choice(("extra", "manifest.json.partial", ".hidden", "copy of it", "0"))
    disk.write(folder / name, [dice.randbytes(dice.randint(0, 9))])
    return Blow("an extra file", (folder / name,))


DAMAGES: tuple[Damage, ...] = (flipped, flipped, cut, emptied, appended, zeroed, missing, replaced, extra)


def store_with_records() -> tuple[SimulatedDisk, list[ArtifactRef]]:
    disk = fresh_disk()
    refs = [put(disk, kind, key, content) for (kind, key), content in CONTENTS.items()]
    records = writer(ROOT, disk)
    for iteration in range(ITERATIONS):
        records.commit(iteration, record_of(iteration, refs))
    return disk, refs


def record_of(iteration: int, refs: list[ArtifactRef]) -> dict[str, object]:
    named = [ref.model_dump() for ref in refs]
    return {"iteration": iteration, "artifacts": named, "metrics": {"kl": iteration / 7, "score": float("inf")}}


def files_of(disk: SimulatedDisk) -> list[Path]:
    """The files of artifacts, their manifests and the records."""
    folders = [*(ROOT / kind / key for kind, key in CONTENTS), ROOT / "runs/r/iterations"]
    return [folder / name for folder in folders for name in tree(disk, folder)]


def read_everything(disk: SimulatedDisk, refs: list[ArtifactRef]) -> list[str]:
    """What a new process complains of when it reads every artifact and record; what it gets must be right."""
    complaints = []
    store, records = open_on(disk), LocalRecords(ROOT, "r", files=disk)
    for ref, content in zip(refs, CONTENTS.values(), strict=True):
        try:
            assert read(disk, store.fetch(ref)) == content, "wrong, and taken for right"
        except FOUND as error:
            complaints.append(str(error))
    for iteration in range(ITERATIONS):
        try:
            assert records.read(iteration) == record_of(iteration, refs), "wrong, and taken for right"
        except FOUND as error:
            complaints.append(str(error))
    return complaints


def is_named(path: Path, hurt: Sequence[Path], complaints: Sequence[str]) -> bool:
    """Whether a complaint names this record, or the first of this artifact's files that are damaged."""
    if path.parent.name == "iterations":
        return any(str(path) in complaint or f"iteration {int(path.stem)} " in complaint for complaint in complaints)
    kind, key = path.relative_to(ROOT).parts[:2]
    place = ROOT / kind / key
    own = [complaint for complaint in complaints if f"artifact {kind}/{key}" in complaint]
    if place / MANIFEST_NAME in hurt:
        return any("manifest" in complaint for complaint in own)
    named = [f"file {other.relative_to(place)}:" for other in hurt if other.is_relative_to(place)]
    return any(name in complaint for complaint in own for name in named)


def test_an_undamaged_store_is_read_without_complaint():
    disk, refs = store_with_records()
    assert read_everything(disk, refs) == []


@pytest.mark.parametrize("batch", [0, *(pytest.param(n, marks=pytest.mark.thorough) for n in range(1, BATCHES))])
def test_every_damage_is_found_and_named(batch: int):
    whole, refs = store_with_records()
    for seed in range(batch * CASES // BATCHES, (batch + 1) * CASES // BATCHES):
        dice, disk = Random(seed), whole.copy()
        path = dice.choice(files_of(disk))
        blow = dice.choice(DAMAGES)(disk, path, dice)
        complaints = read_everything(disk, refs)
        for hurt in blow.hurt:
            assert is_named(hurt, blow.hurt, complaints), f"seed {seed}: {hurt} ({blow.what}): {complaints}"
