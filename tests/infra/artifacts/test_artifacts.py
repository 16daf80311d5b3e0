"""The artifact store, on a real disk and on S3: what goes in comes out, under plain names, in one piece."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest

from infra.artifacts import (
    ArtifactCorrupted,
    ArtifactInvalid,
    ArtifactMissing,
    ArtifactRef,
    ArtifactStore,
    StoreReadOnly,
    StoreUnsupported,
    open_store,
)
from infra.artifacts.local_store import LocalStore
from infra.settings import Settings
from infra.storage.filesystem import LocalFiles
from tests.infra.artifacts.artifact_folders import CONTENT, fill, put, read


@pytest.fixture
def local(tmp_path: Path) -> ArtifactStore:
    return open_store(tmp_path / "store")


@pytest.fixture(params=["folder", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ArtifactStore:
    if request.param == "folder":
        return open_store(tmp_path / "store")
    return open_store(f"s3://{request.getfixturevalue('bucket')}/some/where", cache=tmp_path / "cache")


def uri_of(store: ArtifactStore) -> str:
    return store.root if "://" in store.root else f"file://{store.root}"


def test_what_is_put_is_found_and_fetched(store: ArtifactStore):
    folder = fill(store.scratch(), CONTENT)
    ref = store.put(folder, "checkpoint", "k1")
    assert not folder.exists()
    assert store.find("checkpoint", "k1") == ref
    assert read(store.fetch(ref)) == CONTENT
    assert (ref.kind, ref.uri) == ("checkpoint", f"{uri_of(store)}/checkpoint/k1")
    assert {path.stat().st_mode & 0o777 for path in store.fetch(ref).rglob("*") if path.is_file()} == {0o444}


def test_digest_is_that_of_the_file_table_alone(store: ArtifactStore, tmp_path: Path):
    first = put(store, "k1", CONTENT)
    table = {
        name: {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)} for name, data in sorted(CONTENT.items())
    }
    assert first.digest == hashlib.sha256(json.dumps(table, separators=(",", ":")).encode()).hexdigest()
    elsewhere = LocalStore(tmp_path / "other", libraries={"torch": "0.1"})
    assert put(elsewhere, "k2", CONTENT, (first,)).digest == first.digest
    assert put(store, "k3", {**CONTENT, "state.json": b'{"step": 2}'}).digest != first.digest


def test_manifest_names_lineage_and_libraries(store: ArtifactStore):
    class CheckpointRef(ArtifactRef):
        policy_version: int

    parent = CheckpointRef(**put(store, "k1", CONTENT).model_dump(), policy_version=3)
    manifest = store.manifest(put(store, "k2", CONTENT, (parent,)))
    assert manifest.inputs == (ArtifactRef(kind=parent.kind, uri=parent.uri, digest=parent.digest),)
    assert "pydantic" not in manifest.libraries
    assert "torch" in manifest.libraries
    assert (manifest.format, manifest.kind, manifest.key) == (1, "checkpoint", "k2")


def test_a_folder_elsewhere_is_taken_too(store: ArtifactStore, tmp_path: Path):
    folder = fill(tmp_path / "mine", CONTENT)
    assert read(store.fetch(store.put(folder, "checkpoint", "k1"))) == CONTENT
    assert not folder.exists()


def test_a_folder_on_another_disk_is_taken_too(store: ArtifactStore, tmp_path: Path):
    folder = Path("/dev/shm") / f"{tmp_path.name}-{os.getpid()}"
    try:
        fill(folder, CONTENT)
        assert read(store.fetch(store.put(folder, "checkpoint", "k1"))) == CONTENT
        assert not folder.exists()
        assert not [path for scratch in tmp_path.glob("*/scratch") for path in scratch.iterdir()]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_a_known_key_is_adopted(store: ArtifactStore):
    first = put(store, "k1", CONTENT)
    folder = fill(store.scratch(), {"other": b"content"})
    assert store.put(folder, "checkpoint", "k1") == first
    assert not folder.exists()
    assert read(store.fetch(first)) == CONTENT


def test_a_moved_store_resolves_old_references(local: ArtifactStore, tmp_path: Path):
    ref = put(local, "k1", CONTENT)
    shutil.move(local.root, tmp_path / "moved")
    moved = open_store(f"file://{tmp_path}/moved")
    assert moved.fetch(ref) == tmp_path / "moved/checkpoint/k1"
    with pytest.raises(ArtifactMissing, match="checkpoint/k1"):
        local.fetch(ref)
    assert local.find("checkpoint", "k1") is None


def test_what_the_store_does_not_have_is_said_to_be_missing(store: ArtifactStore):
    ref = ArtifactRef(kind="checkpoint", uri="file:///elsewhere/checkpoint/k1", digest="0" * 64)
    assert store.find("checkpoint", "k1") is None
    assert store.set_aside("checkpoint", "k1") is None
    for ask in (store.fetch, store.manifest, store.location):
        with pytest.raises(ArtifactMissing, match=r"holds no artifact checkpoint/k1 \(made as file:///elsewhere"):
            ask(ref)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "A", "a.b", "a b", "ä", "x" * 201, "a\n"])
def test_names_are_plain(store: ArtifactStore, name: str):
    folder = fill(store.scratch(), CONTENT)
    for kind, key in ((name, "k"), ("kind", name)):
        with pytest.raises(ArtifactInvalid, match="lower-case"):
            store.put(folder, kind, key)
        with pytest.raises(ArtifactInvalid):
            store.find(kind, key)
    assert read(folder) == CONTENT


@pytest.mark.parametrize("kind", ["runs", "damaged", "scratch", "trash"])
def test_the_store_keeps_its_own_kinds(store: ArtifactStore, kind: str):
    with pytest.raises(ArtifactInvalid, match="kept for the store"):
        store.put(fill(store.scratch(), CONTENT), kind, "k")


def test_set_aside_leaves_what_is_whole(store: ArtifactStore):
    ref = put(store, "k1", CONTENT)
    assert store.set_aside("checkpoint", "k1") is None
    assert store.set_aside("checkpoint", "k1", digest=ref.digest) is None
    wrong = ref.model_copy(update={"digest": "0" * 64})
    with pytest.raises(ArtifactCorrupted, match=f"has digest {ref.digest}, the reference says 0000"):
        store.fetch(wrong)
    assert store.set_aside("checkpoint", "k1", digest=wrong.digest) is not None
    assert store.find("checkpoint", "k1") is None
    assert put(store, "k1", CONTENT) == ref


def test_a_reference_cannot_leave_the_store(store: ArtifactStore):
    with pytest.raises(ArtifactInvalid):
        store.fetch(ArtifactRef(kind="..", uri="file:///etc", digest="0"))


def test_folders_that_cannot_become_artifacts(store: ArtifactStore, tmp_path: Path):
    empty = store.scratch()
    (empty / "below").mkdir()
    linked, special, manifest = (fill(store.scratch(), CONTENT) for _ in range(3))
    (linked / "link").symlink_to(tmp_path)
    os.mkfifo(special / "policy/pipe")
    (manifest / "manifest.json").write_text("{}")
    cases = {
        empty: "no file",
        linked: "is a link",
        special: "is a special",
        manifest: "another name",
        tmp_path / "absent": "no folder",
        empty.parent.parent: "belongs to the",
        tmp_path: "belongs to the",
    }
    for folder, complaint in cases.items():
        with pytest.raises(ArtifactInvalid, match=complaint):
            store.put(folder, "checkpoint", "k1")
    assert store.find("checkpoint", "k1") is None
    assert sorted(os.listdir(empty.parent.parent)) == ["scratch"]
    for folder in (linked, special, manifest):
        assert {name: (folder / name).read_bytes() for name in CONTENT} == CONTENT


def test_a_stored_artifact_cannot_be_put_again_from_its_place(store: ArtifactStore):
    ref = put(store, "k1", CONTENT)
    for key in ("k1", "k2"):
        with pytest.raises(ArtifactInvalid, match=r"belongs to the (store|cache)"):
            store.put(store.fetch(ref), "checkpoint", key)
    assert read(store.fetch(ref)) == CONTENT


def test_files_of_other_programs_are_no_part_of_it(store: ArtifactStore):
    ref = put(store, "k1", {**CONTENT, "policy/registered_model_meta": b"x"})
    place = store.fetch(ref)
    (place / "registered_model_meta").write_text("mlflow was here")
    (place / "policy/registered_model_meta").write_text("and here")
    assert store.fetch(ref) == place
    assert ref.digest == put(store, "k2", CONTENT).digest


class ReadOnlyFiles(LocalFiles):
    """A disk mounted read-only; permissions would not stop a superuser who runs the tests."""

    def writable(self, folder: Path) -> bool:
        return False

    def make_folder(self, folder: Path) -> None:
        if not folder.exists():
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(folder))


def test_a_read_only_store_says_so_and_leaves_the_folder_alone(local: ArtifactStore, tmp_path: Path):
    ref = put(local, "k1", CONTENT)
    folder = fill(tmp_path / "mine", CONTENT)
    read_only = LocalStore(Path(local.root), files=ReadOnlyFiles())
    for kind in ("checkpoint", "scores"):
        with pytest.raises(StoreReadOnly, match=rf"{local.root} cannot be written to \(at .*{kind}\).*PPOFLOW_STORE"):
            read_only.put(folder, kind, "k2")
    assert read(folder) == CONTENT
    assert {path.stat().st_mode & 0o222 for path in folder.rglob("*") if path.is_file()} == {0o200}
    with pytest.raises(StoreReadOnly):
        read_only.scratch()
    assert read(read_only.fetch(ref)) == CONTENT


@pytest.mark.parametrize("root", ["gs://bucket/prefix", "gs:/bucket", "file://host/folder", "file:/x", "http://x/y"])
def test_other_addresses_are_refused(root: str):
    with pytest.raises(StoreUnsupported, match=root):
        open_store(root)


@pytest.mark.parametrize("root", ["s3:/bucket/x", "S3://bucket/x"])
def test_a_mistyped_address_of_s3_makes_no_folder(root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PPOFLOW_STORE", root)
    with pytest.raises(StoreUnsupported, match=rf"^store '{root}': write s3://bucket/prefix .*, or \./{root} for"):
        open_store(Settings().store_root)
    assert open_store(f"./{root}").root == str(tmp_path / root)


def test_many_bytes_are_hashed_by_several_threads(local: ArtifactStore):
    content = {f"{number}.bin": bytes([number]) * (17 * 2**20) for number in range(4)}
    ref = put(local, "k1", content)
    table = {name: hashlib.sha256(data).hexdigest() for name, data in content.items()}
    assert {name: entry.sha256 for name, entry in local.manifest(ref).files.items()} == table
    assert read(local.fetch(ref)) == content


def test_others_find_the_files_by_their_location(local: ArtifactStore):
    ref = put(local, "k1", CONTENT)
    assert local.location(ref) == local.fetch(ref).as_uri()
