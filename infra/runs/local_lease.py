"""The lease of a run whose records are files.

Every change of a run's records is one atomic link from, or one atomic rename into, the folder of the holder's lease; a
lease is ended by renaming that folder. So a holder that was stopped and goes on after another process has taken the
run over finds its folder gone: it can change nothing, and gets LeaseLost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from infra.process_identity import ProcessIdentity, is_alive, this_process
from infra.runs.lease_expiry import EXPIRY_S, POLL_S, Clock, LeaseExpiry, beat_of
from infra.runs.local_lease_folders import HEARTBEAT, PARTIAL, PINS, SUPERSEDED, LeaseFolders
from infra.runs.names import validate_run_name
from infra.runs.owner import LeaseLost, LeaseOwner, loss
from infra.storage.filesystem import FileSystem, LocalFiles, local_root, writing_to

GC_LOCK = ".gc.lock"


class LocalLease:
    """The lease of a run as a folder; see `infra.runs.lease.Lease`."""

    def __init__(
        self, run: str, number: int, root: Path, folders: LeaseFolders, files: FileSystem, clock: Clock
    ) -> None:
        self.run = run
        self.number = number
        self.folder = folders.place(number)
        self.predecessors: tuple[LeaseOwner, ...] = ()
        self._root = root
        self._folders = folders
        self._files = files
        self._clock = clock
        self._beats = 0
        self._lost = False

    @property
    def lost(self) -> bool:
        """Whether this process has noticed that the run is no longer its own, or has released it."""
        return self._lost

    @property
    def partial(self) -> Path:
        """Where the holder writes what it then links into the run."""
        return self.folder / PARTIAL

    @property
    def superseded(self) -> Path:
        """Where the holder moves the records that it takes out of the run."""
        return self.folder / SUPERSEDED

    @contextmanager
    def fenced(self) -> Iterator[None]:
        """What fails in here because the lease is gone fails with LeaseLost."""
        try:
            yield
        except OSError as error:
            if self._gone():
                raise self._loss() from error
            raise

    def check(self) -> None:
        """LeaseLost if the lease is gone."""
        if self._gone():
            raise self._loss()

    def beat(self) -> None:
        """Show that the holder lives, or LeaseLost."""
        self._beats += 1
        with writing_to(self._root), self.fenced():
            written = self.partial / f"{HEARTBEAT}-{uuid4().hex}"
            try:
                self._files.write(written, [beat_of(self._beats, self._clock)])
                self._files.rename(written, self.folder / HEARTBEAT)
            except OSError:
                with suppress(OSError):
                    self._files.remove(written)
                raise

    def pin(self, kind: str, key: str) -> None:
        """Keep the collector from an artifact until `unpin_all`, or as long as this lease lasts."""
        lock = self._root / GC_LOCK
        with writing_to(self._root), self.fenced(), self._files.exclusive(lock), suppress(FileExistsError):
            self._files.write(self.folder / PINS / f"{kind}.{key}", [])

    def unpin_all(self) -> None:
        """Let go of every pinned artifact."""
        with writing_to(self._root), self.fenced():
            for name in self._files.names(self.folder / PINS):
                self._files.remove(self.folder / PINS / name)

    def release(self) -> None:
        """Let the run go; nothing happens where it is gone already."""
        if self._lost:
            return
        with writing_to(self._root):
            self._folders.end(self.number)
            self._lost = True
            self._folders.sync()

    def _gone(self) -> bool:
        return self._lost or self._files.status(self.partial) is None

    def _loss(self) -> LeaseLost:
        self._lost = True
        successor = None
        with suppress(OSError):
            live = self._folders.numbers().live
            successor = self._folders.holder(live[-1]) if live else None
        return loss(self.run, self.number, successor)


def acquire_lease(
    root: str | Path,
    run: str,
    *,
    note: Mapping[str, str] | None = None,
    wait: bool = False,
    files: FileSystem | None = None,
    identity: ProcessIdentity | None = None,
    alive: Callable[[ProcessIdentity], bool | None] = is_alive,
    clock: Clock | None = None,
    expiry_s: float = EXPIRY_S,
) -> LocalLease:
    """Become the only writer of a run; see `infra.backend.acquire_lease`."""
    seam: FileSystem = LocalFiles() if files is None else files
    place, clock, me = local_root(root), clock or Clock(), identity or this_process()
    folders = LeaseFolders(place, validate_run_name(run), me, seam)
    watch = LeaseExpiry(folders, alive, clock, expiry_s)
    with writing_to(place):
        folders.make()
        while True:
            numbers = folders.numbers()
            if watch.all_gone(numbers.live, refuse=not wait):
                holder = LeaseOwner(identity=me, since_ms=clock.now_ms(), note=dict(note or {}))
                lease = LocalLease(run, numbers.highest + 1, place, folders, seam, clock)
                if folders.publish(folders.prepare(holder, beat_of(0, clock)), lease.number) and _settle(
                    lease, folders, watch.holders
                ):
                    return lease
            else:
                clock.sleep(POLL_S)


def _settle(lease: LocalLease, folders: LeaseFolders, known: Mapping[int, LeaseOwner]) -> bool:
    """Make a new lease the only one; False if others were faster."""
    try:
        if not folders.is_newest(lease.number):
            folders.withdraw(lease.number)
            return False
        folders.furnish(lease.number)
        before = [number for number in folders.numbers().live if number < lease.number]
        taken = [number for number in before if folders.end(number)]
        for number in folders.numbers().ended:
            folders.close(number)
        folders.sync()
    except OSError:
        with suppress(OSError):
            if not folders.end(lease.number):
                return False
        raise
    lease.predecessors = tuple(known[number] for number in taken if number in known)
    return True
