"""Folders for tests of the store: written, read back, stored."""

from __future__ import annotations

from pathlib import Path

from infra.artifacts import ArtifactRef, ArtifactStore

CONTENT = {"policy/model.safetensors": b"weights" * 100, "policy/config.json": b"{}", "state.json": b'{"step": 1}'}


def fill(folder: Path, content: dict[str, bytes]) -> Path:
    for name, data in content.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def read(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("manifest.json"))
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def put(store: ArtifactStore, key: str, content: dict[str, bytes], inputs: tuple[ArtifactRef, ...] = ()) -> ArtifactRef:
    return store.put(fill(store.scratch(), content), "checkpoint", key, inputs)
