"""`runs/<run>/head.json`: all that can change of a run on S3, in one object.

    head.json                                   who has the run, and by name all that it consists of
    spec/…  iterations/000012-000007-….json     checksummed documents: each is written once, before the head names it
    leases/000007-…/heartbeat.json, pins/…      of the holder of that lease alone; see `infra.runs.s3_lease`

The head is only ever replaced by compare-and-swap: a change is made whole or not at all, and whoever decided on a head
that has changed meanwhile has to look again. Every version carries a nonce, so no two versions have the same ETag.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, ValidationError

from infra.runs.checksummed_json import RecordCorrupted, RecordMissing, decode, encode
from infra.runs.owner import LeaseOwner
from infra.storage.objects import Objects, S3Address
from infra.storage.rereading import read_again

HEAD = "head.json"
RUNS = "runs"


class LeaseState(BaseModel):
    """The last lease of a run that was given; without a `holder` it has ended. `token` tells attempts at it apart."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    number: int = 0
    token: str = ""
    holder: LeaseOwner | None = None

    @property
    def folder(self) -> str:
        """What its holder writes lies below this, in the run's folder."""
        return f"leases/{self.number:06d}-{self.token}"


class RunPointer(BaseModel):
    """What a run consists of. Documents are named as they lie in the run's folder."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    lease: LeaseState = LeaseState()
    spec: str | None = None
    iterations: dict[int, str] = {}
    notes: dict[str, tuple[str, ...]] = {}
    superseded: tuple[str, ...] = ()
    nonce: str = ""

    def changed(self, **changes: Any) -> RunPointer:
        """The head with these changes."""
        return self.model_copy(update=changes)

    def documents(self) -> set[str]:
        """The names of all documents."""
        of_notes = [name for names in self.notes.values() for name in names]
        return {*self.iterations.values(), *of_notes, *self.superseded, *([self.spec] if self.spec else [])}


@dataclass(frozen=True)
class Version:
    """A head as it was read or written, with its ETag; without one, there is none yet."""

    head: RunPointer
    etag: str | None


Step = Callable[[RunPointer], RunPointer]


class RunHead:
    """The head of one run; safe for several threads. It remembers the version that it has read or written last."""

    def __init__(self, objects: Objects, address: S3Address, run: str) -> None:
        self.objects = objects
        self.run = run
        self._address = address
        self._mutex = threading.RLock()
        self._known: Version | None = None

    def key(self, name: str) -> str:
        """Where something of the run lies; all of it lies below `key("")`."""
        return f"{self._address.key(RUNS, self.run)}/{name}"

    def place(self, name: str = "") -> str:
        """The same, for people."""
        return self._address.uri_of(self.key(name))

    def look(self) -> Version:
        """The present version. Raises RecordMissing where it is gone and what it named is there."""
        version = self._look()
        # Whoever has the run may have begun it between the two looks.
        if version.etag is None and self._has_records() and (version := self._look()).etag is None:
            raise RecordMissing(f"{self.place(HEAD)} is gone, and records that it named are there: {self._remedy()}")
        return version

    def read(self) -> Version:
        """The present version, which is remembered."""
        with self._mutex:
            version = self.look()
            self._known = version if version.etag is not None else None
            return version

    def known(self) -> Version:
        """The version that was read or written last: the present one, as long as nobody else changes the head."""
        with self._mutex:
            return self._known or self.read()

    def put(self, head: RunPointer, before: Version) -> Version | None:
        """Write a head over the version that it was made of; None if that is not the present one any more."""
        content = encode(HEAD, head.changed(nonce=uuid4().hex).model_dump(mode="json"))
        with self._mutex:
            # Until the answer is here it is not known which version is the present one.
            self._known = None
            if before.etag is None:
                etag = self.objects.create(self.key(HEAD), content)
            else:
                etag = self.objects.replace(self.key(HEAD), content, before.etag)
            self._known = None if etag is None else Version(head, etag)
            return self._known

    def change(self, step: Step) -> RunPointer:
        """Change the head by a step, which may be tried several times and sees what is there each time.

        A step that gives its head back changes nothing; one that raises has seen the present version when it does.
        """
        with self._mutex:
            remembered = self._known
            version = remembered or self.read()
            while True:
                try:
                    after = step(version.head)
                except RuntimeError:
                    if version is not remembered:
                        raise
                    remembered, version = None, self.read()
                    continue
                if after is version.head or self.put(after, version) is not None:
                    return after
                version = self.read()

    def _look(self) -> Version:
        read = read_again(self.objects, self.key(HEAD), self._parse, RecordCorrupted)
        return Version(RunPointer(), None) if read is None else Version(read[0], read[1].etag)

    def _remedy(self) -> str:
        anew = f"remove {self.place()}: the run then begins anew, from what it made"
        return f"put back its last undamaged version (what was committed after that is made again), or {anew}"

    def _has_records(self) -> bool:
        """Whether there are records by holders of the run, not only what a broken `create` left."""
        top = self.key("iterations/")
        names = (entry.key.removeprefix(top) for entry in self.objects.entries(top))
        return any(name.split("-")[1:2] not in ([], ["000000"]) for name in names)

    def _parse(self, content: bytes) -> RunPointer:
        place = self.place(HEAD)
        document = decode(place, HEAD, content, remedy=self._remedy())
        try:
            return RunPointer.model_validate(document)
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise RecordCorrupted(f"{place} is not the head of a run ({reason}): {self._remedy()}") from error
