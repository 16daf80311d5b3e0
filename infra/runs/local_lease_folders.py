"""What lies in `<root>/runs/<run>/leases/`, and the atomic steps by which a run passes from one holder to the next.

    000006.ended/              was released, or taken over
    000007/holder.json         who holds the run
    000007/heartbeat           replaced at every beat
    000007/partial/            the holder writes here before it links
    000007/pins/               artifacts that the holder uses and that no record names yet
    000007/superseded/         records that the holder took out of the run

A number is given once. The last three folders are made only when the number is known to be new: so whoever had the
same number before can never write into them, even where a latecomer's folder bears its name for a moment.
"""

from __future__ import annotations

import errno
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from pydantic import ValidationError

from infra.process_identity import ProcessIdentity, this_process
from infra.runs.checksummed_json import RecordError, encode, read_checksummed
from infra.runs.names import validate_run_name
from infra.runs.owner import LeaseOwner
from infra.storage.filesystem import FileSystem, LocalFiles, local_root, make_folders, read_whole, remove_tree

HOLDER, HEARTBEAT, PARTIAL, PINS, SUPERSEDED = "holder.json", "heartbeat", "partial", "pins", "superseded"
TAKEN_ERRORS = frozenset({errno.ENOTEMPTY, errno.EEXIST})
PASSING_ERRORS = TAKEN_ERRORS | {errno.ENOENT}
_LEASE = re.compile(r"(\d{6}|[1-9]\d{6,})(\.ended)?")
# A damaged holder.json must not block its run for ever: like a holder elsewhere, it is watched.
_UNKNOWN = ProcessIdentity(host="unknown", boot="0", namespace="0", pid=1, started=0)


@dataclass(frozen=True)
class Numbers:
    """The leases of a run: those that some process may have, and those that are ended."""

    live: tuple[int, ...]
    ended: tuple[int, ...]

    @property
    def highest(self) -> int:
        return max((*self.live, *self.ended), default=0)


class LeaseFolders:
    """The leases of one run; `owner` names this process in what it prepares."""

    def __init__(self, root: Path, run: str, owner: ProcessIdentity, files: FileSystem) -> None:
        self.run = run
        self.folder = root / "runs" / run / "leases"
        self._owner = owner
        self._root = root
        self._files = files

    def make(self) -> None:
        """Make the folder that holds the leases, durable."""
        make_folders(self._files, self.folder, top=self._root)

    def place(self, number: int) -> Path:
        """Where a lease lies until it is ended."""
        return self.folder / f"{number:06d}"

    def numbers(self) -> Numbers:
        """The leases that are there; a live one whose number is ended too came too late to be one."""
        found = [match for name in self._files.names(self.folder) if (match := _LEASE.fullmatch(name))]
        ended = {int(match[1]) for match in found if match[2]}
        live = {int(match[1]) for match in found if not match[2]} - ended
        return Numbers(tuple(sorted(live)), tuple(sorted(ended)))

    def live(self) -> tuple[int, ...]:
        """Those that some process may have; none where the run is not there."""
        with suppress(FileNotFoundError):
            return self.numbers().live
        return ()

    def holder(self, number: int) -> LeaseOwner | None:
        """Who has a lease; None if it has just ended."""
        document: dict[str, Any] | None = None
        with suppress(RecordError):
            document = read_checksummed(
                self._files, self.place(number) / HOLDER, HOLDER, remedy="its holder counts as unknown"
            )
            if document is None and self._files.status(self.place(number)) is None:
                return None
        try:
            return LeaseOwner.model_validate(document)
        except ValidationError:
            return LeaseOwner(identity=_UNKNOWN, since_ms=0)

    def heartbeat(self, number: int) -> bytes | None:
        """The last beat, or None if there is none."""
        place = self.place(number)
        # Listing a folder makes a network file system look again instead of remembering.
        with suppress(FileNotFoundError):
            if HEARTBEAT in self._files.names(place):
                return read_whole(self._files, place / HEARTBEAT)
        return None

    def prepare(self, holder: LeaseOwner, beat: bytes) -> Path:
        """A lease's folder under a name of its own, durable but for that name."""
        staged = self._own_name()
        try:
            self._files.make_folder(staged)
            self._files.write(staged / HOLDER, [encode(HOLDER, holder.model_dump(mode="json"))])
            self._files.sync_file(staged / HOLDER)
            self._files.write(staged / HEARTBEAT, [beat])
            self._files.sync_file(staged / HEARTBEAT)
            self._files.sync_folder(staged)
        except OSError:
            self.discard(staged)
            raise
        return staged

    def publish(self, staged: Path, number: int) -> bool:
        """Give a prepared folder its number; False if another process has it already."""
        try:
            self._files.rename(staged, self.place(number))
        except OSError as error:
            self.discard(staged)
            if error.errno in TAKEN_ERRORS:
                return False
            raise
        return True

    def is_newest(self, number: int) -> bool:
        """Whether nobody else has, or had, this number or a higher one."""
        numbers = self.numbers()
        return number in numbers.live and number == numbers.highest

    def furnish(self, number: int) -> None:
        """Make the folders that the holder works in."""
        for name in (PINS, SUPERSEDED, PARTIAL):
            self._files.make_folder(self.place(number) / name)

    def end(self, number: int) -> bool:
        """End a lease, so that its holder can change nothing any more; False if it was not there."""
        try:
            self._files.rename(self.place(number), self._ended(number))
        except FileNotFoundError:
            return False
        except OSError as error:
            if error.errno not in TAKEN_ERRORS:
                raise
            self.withdraw(number)
            return False
        return True

    def close(self, number: int) -> None:
        """Make sure that no operation that an ended lease's holder had begun can still take effect.

        The kernel first finds what a path names and then acts on it; in between, the lease can end. So what such an
        operation would act on is removed: the files it would link, the folder into which it would move a record.
        """
        ended = self._ended(number)
        while self._files.status(ended / PARTIAL) is not None:
            try:
                self._replace_superseded(ended)
                remove_tree(self._files, ended / PARTIAL)
            except OSError as error:
                # Another process closes it too, or such an operation has just come through: once more.
                if error.errno not in PASSING_ERRORS:
                    raise

    def withdraw(self, number: int) -> None:
        """Take away a lease that came too late to be one."""
        aside = self._own_name()
        with suppress(FileNotFoundError):
            self._files.rename(self.place(number), aside)
        self.discard(aside)

    def sync(self) -> None:
        """Make what is given and what is ended durable."""
        self._files.sync_folder(self.folder)

    def discard(self, folder: Path) -> None:
        """Remove what was prepared, as far as that goes."""
        with suppress(OSError):
            if self._files.status(folder) is not None:
                remove_tree(self._files, folder)

    def _replace_superseded(self, ended: Path) -> None:
        kept, superseded = ended / "kept", ended / SUPERSEDED
        if self._files.status(superseded) is not None:
            if names := self._files.names(superseded):
                self._files.make_folder(kept)
            for name in names:
                self._files.rename(superseded / name, kept / name)
            self._files.remove_folder(superseded)
        if self._files.status(kept) is not None:
            self._files.sync_folder(kept)
            self._files.rename(kept, superseded)
            self._files.sync_folder(ended)

    def _own_name(self) -> Path:
        return self.folder / f".new-{self._owner.token}-{uuid4().hex}"

    def _ended(self, number: int) -> Path:
        return self.folder / f"{number:06d}.ended"


def open_lease_folders(root: str | Path, run: str) -> LeaseFolders:
    """The leases of a run in the store at `root`."""
    return LeaseFolders(local_root(root), validate_run_name(run), this_process(), LocalFiles())
