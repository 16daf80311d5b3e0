"""What lies at `<kind>/<key>/manifest.json` on S3: the state of an artifact, and every step from one to the next.

    absent, gone --put--> live --set aside--> gone        live --collector--> marked --collector--> gone
                                                                              marked --restore--> live

Each step is one conditional put, and each version has a nonce of its own, so no two versions have the same ETag and
a step from a version that somebody has changed meanwhile fails. What is gone keeps its envelope for ever: that nothing
was ever there and that something was taken away are two different things to a writer that comes late.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Literal
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from infra.artifacts.manifest import (
    MANIFEST_NAME,
    ArtifactCorrupted,
    ArtifactError,
    ArtifactFormatTooNew,
    Manifest,
    damaged,
    parse_checked,
    parse_manifest,
    sha256_of,
)
from infra.storage.objects import Objects, S3Address
from infra.storage.rereading import read_again

ENVELOPE_FORMAT = 1
UPLOAD = re.compile("[0-9a-f]{32}")
"""What the folder of an upload is called."""
State = Literal["live", "marked", "gone"]


class Envelope(BaseModel):
    """The state of an artifact, the folder that holds its files, and its manifest.

    `upload` is the name of the folder `<kind>/<key>/<upload>`. `checksum` covers everything else.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int
    state: State
    upload: str = Field(pattern=f"^{UPLOAD.pattern}$")
    nonce: str = Field(pattern=r"^[0-9a-f]{32}$")
    manifest: dict[str, Any]
    checksum: str

    @classmethod
    def of(cls, state: State, upload: str, manifest: dict[str, Any]) -> Envelope:
        """A new version."""
        body: dict[str, Any] = {
            "format": ENVELOPE_FORMAT,
            "state": state,
            "upload": upload,
            "nonce": uuid4().hex,
            "manifest": manifest,
        }
        return cls(**body, checksum=sha256_of(body))

    def moved_to(self, state: State) -> Envelope:
        """The next version, in another state."""
        return Envelope.of(state, self.upload, self.manifest)

    def to_bytes(self) -> bytes:
        """The one spelling of this version."""
        return (json.dumps(self.model_dump(), indent=1, sort_keys=True) + "\n").encode()


@dataclass(frozen=True)
class Version:
    """An envelope as it was read, with the ETag that tells this version of it from others."""

    envelope: Envelope
    etag: str

    @property
    def exists(self) -> bool:
        """Whether there is an artifact; a marked one is there still."""
        return self.envelope.state != "gone"


def envelope_key(address: S3Address, kind: str, key: str) -> str:
    """Where the envelope of an artifact lies."""
    return address.key(kind, key, MANIFEST_NAME)


def upload_prefix(address: S3Address, kind: str, key: str, upload: str) -> str:
    """What the keys of the files of one upload begin with."""
    return address.key(kind, key, upload) + "/"


def read_version(objects: Objects, address: S3Address, kind: str, key: str) -> Version | None:
    """The present version, or None where nothing ever was; ArtifactCorrupted where these bytes are no envelope."""
    place = envelope_key(address, kind, key)
    read = read_again(objects, place, lambda content: parse_envelope(content, kind, key), ArtifactCorrupted)
    return None if read is None else Version(read[0], read[1].etag)


def move(objects: Objects, address: S3Address, kind: str, key: str, version: Version, state: State) -> Version | None:
    """The version after this step, or None if another one came first."""
    envelope = version.envelope.moved_to(state)
    etag = objects.replace(envelope_key(address, kind, key), envelope.to_bytes(), version.etag)
    return None if etag is None else Version(envelope, etag)


def manifest_of(envelope: Envelope, kind: str, key: str) -> Manifest:
    """The manifest in an envelope, checked by its own checksum."""
    content = (json.dumps(envelope.manifest, indent=1, sort_keys=True) + "\n").encode()
    return parse_manifest(content, kind, key)


def parse_envelope(content: bytes, kind: str, key: str) -> Envelope:
    """The envelope that these bytes are, or the error that says what is wrong with them."""
    document, sound = parse_checked(content, kind, key)
    stated = document.get("format")
    if sound and isinstance(stated, int) and stated > ENVELOPE_FORMAT:
        raise _too_new(kind, key, stated)
    try:
        envelope = Envelope.model_validate(document)
    except ValidationError as error:
        raise damaged(kind, key, f"is not an artifact's state ({error.errors()[0]['msg']})") from error
    if not sound or envelope.format != ENVELOPE_FORMAT:
        raise damaged(kind, key, f"does not have its own checksum {envelope.checksum}")
    return envelope


def _too_new(kind: str, key: str, stated: int) -> ArtifactError:
    return ArtifactFormatTooNew(
        f"artifact {kind}/{key} has format {stated} on S3, this version reads up to format {ENVELOPE_FORMAT}: "
        "use a newer ppoflow"
    )
