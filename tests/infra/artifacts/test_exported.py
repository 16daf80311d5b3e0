"""A copy of a part of an artifact: it is one, it carries its proof, and what is done to it stays with it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from infra.artifacts import ArtifactCorrupted, ArtifactRef
from infra.artifacts.export import check_export, copy_file, export_part
from infra.artifacts.local_store import LocalStore

WEIGHTS = b"w" * 5000
FILES = {"policy/config.json": b"{}", "policy/weights/model.safetensors": WEIGHTS, "critic/model.safetensors": b"c"}


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """An empty one."""
    return LocalStore(tmp_path / "store", libraries={"torch": "2"})


def stored(store: LocalStore, key: str = "aa", weights: bytes = WEIGHTS) -> ArtifactRef:
    """A checkpoint in it."""
    folder = store.scratch()
    for name, content in {**FILES, "policy/weights/model.safetensors": weights}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return store.put(folder, "checkpoint", key)


def exported(store: LocalStore, ref: ArtifactRef, target: Path) -> Path:
    """Its policy."""
    export_part(store.fetch(ref), store.manifest(ref), ref, "policy", target)
    return target


def test_the_copy_has_the_files_of_its_part_and_a_manifest(store: LocalStore, tmp_path: Path) -> None:
    ref = stored(store)
    target = exported(store, ref, tmp_path / "best")
    names = sorted(path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file())
    assert names == ["config.json", "manifest.json", "weights/model.safetensors"]
    manifest = check_export(target)
    assert manifest is not None
    assert (manifest.inputs, manifest.libraries) == ((ref,), {"torch": "2"})


def test_writing_into_the_copy_leaves_the_store_as_it_was(store: LocalStore, tmp_path: Path) -> None:
    ref = stored(store)
    target = exported(store, ref, tmp_path / "best")
    for path in (path for path in target.rglob("*") if path.is_file()):
        assert os.stat(path).st_nlink == 1
        path.chmod(0o644)
        path.write_bytes(b"somebody else's")
    assert store.check(ref) == sum(len(content) for content in FILES.values())


@pytest.mark.parametrize("name", ["config.json", "weights/model.safetensors", "manifest.json"])
def test_a_damaged_copy_is_refused_and_replaced(store: LocalStore, tmp_path: Path, name: str) -> None:
    ref = stored(store)
    target = exported(store, ref, tmp_path / "best")
    content = bytearray((target / name).read_bytes())
    content[len(content) // 2] ^= 1
    (target / name).write_bytes(content)
    with pytest.raises(ArtifactCorrupted, match=rf"best is damaged: .*{name}.*Take the policy from the store instead"):
        check_export(target)
    exported(store, ref, target)
    assert check_export(target) is not None


def test_a_missing_and_a_surplus_file_are_damage(store: LocalStore, tmp_path: Path) -> None:
    target = exported(store, stored(store), tmp_path / "best")
    (target / "more.bin").write_bytes(b"1")
    with pytest.raises(ArtifactCorrupted, match=r"more\.bin: expected no such file, found 1 bytes"):
        check_export(target)
    (target / "more.bin").unlink()
    (target / "config.json").unlink()
    with pytest.raises(ArtifactCorrupted, match=r"config\.json: expected 2 bytes, found no such file"):
        check_export(target)


def test_the_same_again_is_left_alone_and_another_one_takes_its_place(store: LocalStore, tmp_path: Path) -> None:
    target = exported(store, stored(store), tmp_path / "best")
    before = target.stat().st_ino
    exported(store, stored(store), target)
    assert target.stat().st_ino == before
    exported(store, stored(store, "bb", b"other"), target)
    assert (target / "weights/model.safetensors").read_bytes() == b"other"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("best")] == ["best"]


@pytest.mark.parametrize("there", ["file", "link", "link to nothing"])
def test_a_file_or_a_link_is_replaced_and_nothing_stays_behind(store: LocalStore, tmp_path: Path, there: str) -> None:
    (elsewhere := tmp_path / "elsewhere").mkdir()
    (elsewhere / "mine").write_text("1")
    for name in ("best", "best.old", "best.new"):
        if there == "file":
            (tmp_path / name).write_text("1")
        else:
            (tmp_path / name).symlink_to(elsewhere if there == "link" else tmp_path / "nowhere")
    for key in ("aa", "bb"):
        assert check_export(exported(store, stored(store, key, key.encode()), tmp_path / "best")) is not None
        assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "elsewhere", "store"]
    assert [path.name for path in elsewhere.iterdir()] == ["mine"]


def test_a_folder_that_nobody_exported_is_nobodys_concern(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert check_export(tmp_path) is None
    assert check_export(tmp_path / "none") is None


def test_a_copy_of_a_file_is_independent(tmp_path: Path) -> None:
    source = tmp_path / "a"
    source.write_bytes(os.urandom(3 * 2**20))
    copy_file(source, tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == source.read_bytes()
    with (tmp_path / "b").open("r+b") as file:
        file.write(b"changed")
    assert not source.read_bytes().startswith(b"changed")
