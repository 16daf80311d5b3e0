"""The order of operations that makes a commit survive a power cut, and the seam through which all of them go."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

from infra.artifacts.local_store import LocalStore
from infra.storage.filesystem import LocalFiles
from tests.infra.runs.leases import successor, writer
from tests.infra.storage.faulty_files import FaultyFiles, Operation

ROOT = Path(__file__).resolve().parents[3]


def position(trace: list[Operation], name: str, path: Path) -> int:
    return max(number for number, operation in enumerate(trace) if (operation.name, operation.path) == (name, path))


def test_an_artifact_is_durable_before_it_is_visible_and_visible_before_put_returns(tmp_path: Path):
    root, files = tmp_path / "not" / "yet", FaultyFiles()
    folder = tmp_path / "mine"
    (folder / "below/deeper").mkdir(parents=True)
    names = ["a", "below/b", "below/deeper/c"]
    for name in names:
        (folder / name).write_text(name)
    LocalStore(root, files=files, libraries={}).put(folder, "scores", "k")

    visible = position(files.trace, "rename", folder)
    manifest = position(files.trace, "rename", folder / "manifest.json.partial")
    assert files.trace[visible].target == root / "scores/k"
    for name in names:
        protected, synced = (position(files.trace, step, folder / name) for step in ("protect", "sync_file"))
        assert protected < synced < manifest
    written, synced = (position(files.trace, step, folder / "manifest.json.partial") for step in ("write", "sync_file"))
    deepest, below, top = (
        position(files.trace, "sync_folder", folder / name) for name in ("below/deeper", "below", "")
    )
    assert deepest < below < written < synced < manifest < top < visible
    for made in (root.parent, root, root / "scores"):
        assert position(files.trace, "sync_folder", made.parent) > position(files.trace, "make_folder", made)
        assert position(files.trace, "sync_folder", made.parent) < visible
    changes = [operation for operation in files.trace[visible + 1 :] if operation.name != "status"]
    assert changes == [Operation("sync_folder", root / "scores")]


def test_an_adopted_artifact_is_made_durable_too(tmp_path: Path):
    for number in range(2):
        folder, files = tmp_path / f"mine{number}", FaultyFiles()
        folder.mkdir()
        (folder / "a").write_text("a")
        LocalStore(tmp_path / "store", files=files, libraries={}).put(folder, "scores", "k")
    assert not any(operation.name == "rename" for operation in files.trace)
    kept = position(files.trace, "sync_folder", tmp_path / "store/scores")
    assert kept < position(files.trace, "remove", folder / "a")


def test_a_record_is_durable_before_it_has_its_name(tmp_path: Path):
    files = FaultyFiles()
    writer(tmp_path / "store", files).commit(7, {"a": 1})
    iterations = tmp_path / "store/runs/r/iterations"
    (link,) = (number for number, operation in enumerate(files.trace) if operation.name == "link")
    written = files.trace[link].path
    assert files.trace[link].target == iterations / "000007.json"
    assert position(files.trace, "write", written) < position(files.trace, "sync_file", written) < link
    assert link < position(files.trace, "sync_folder", iterations) < position(files.trace, "remove", written)
    for made in (iterations, iterations.parent, iterations.parent.parent, tmp_path / "store"):
        before = files.trace[:link]
        assert position(before, "make_folder", made) < position(before, "sync_folder", made.parent)


def test_a_lease_is_durable_before_it_is_acquired(tmp_path: Path):
    successor(tmp_path)
    files = FaultyFiles()
    lease = successor(tmp_path, files)
    (staged,) = (operation.path for operation in files.trace if operation.target == lease.folder)
    published = position(files.trace, "rename", staged)
    for name in ("holder.json", "heartbeat"):
        written, synced = (position(files.trace, step, staged / name) for step in ("write", "sync_file"))
        assert written < synced < position(files.trace, "sync_folder", staged) < published
    ended = position(files.trace, "rename", lease.folder.with_name("000001"))
    assert published < ended < position(files.trace, "sync_folder", lease.folder.parent)


def test_syncs_reach_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    synced: list[str] = []
    fsync = os.fsync

    def traced(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", traced)
    (tmp_path / "file").write_text("content")
    LocalFiles().sync_file(tmp_path / "file")
    LocalFiles().sync_folder(tmp_path)
    assert synced == [str(tmp_path / "file"), str(tmp_path)]


def test_creating_never_replaces(tmp_path: Path):
    files = LocalFiles()
    files.write(tmp_path / "a", [b"one", b"", b"two"])
    assert b"".join(files.blocks(tmp_path / "a")) == b"onetwo"
    with pytest.raises(FileExistsError):
        files.write(tmp_path / "a", [b"three"])
    files.write(tmp_path / "b", [b"four"])
    with pytest.raises(FileExistsError):
        files.link(tmp_path / "b", tmp_path / "a")
    for name in ("x", "y"):
        files.make_folder(tmp_path / name)
        files.write(tmp_path / name / "file", [b"five"])
    with pytest.raises(OSError, match="not empty"):
        files.rename(tmp_path / "x", tmp_path / "y")
    assert b"".join(files.blocks(tmp_path / "a")) == b"onetwo"


@pytest.mark.parametrize(
    "name",
    [
        "artifacts/store",
        "gc/collector",
        "artifacts/integrity",
        "runs/lease",
        "runs/lease_expiry",
        "gc/local_collector",
        "runs/local_lease",
        "runs/local_lease_folders",
        "storage/write_once_files",
        "runs/local_records",
        "runs/local_runs",
        "artifacts/local_store",
        "artifacts/manifest",
        "runs/records",
        "runs/checksummed_json",
    ],
)
def test_no_file_operation_goes_past_the_seam(name: str):
    tree = ast.parse((ROOT / "infra" / f"{name}.py").read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert imported.isdisjoint({"os", "io", "shutil", "tempfile", "fcntl", "glob"})
    of_paths = {member for member in vars(Path) if not member.startswith("_")} - {"resolve", "absolute"}
    pure = {member for kind in Path.__mro__[1:] for member in vars(kind)}
    ours = {member for member in vars(LocalFiles) if not member.startswith("_")}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id != "open"
        if isinstance(node, ast.Attribute) and node.attr not in ours:
            assert node.attr not in of_paths - pure, f"line {node.lineno}: .{node.attr}"
