"""Which process has a run now, for whoever only wants to know: nothing is taken, changed or waited for."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from infra.artifacts.store import REMOTE
from infra.process_identity import is_alive, this_process
from infra.runs.lease_expiry import EXPIRY_S, Clock, LeaseExpiry
from infra.runs.local_lease_folders import LeaseFolders
from infra.runs.names import validate_run_name
from infra.runs.owner import LeaseOwner
from infra.storage.filesystem import LocalFiles, local_root
from infra.storage.objects import Objects, S3Address

if TYPE_CHECKING:
    from infra.runs.s3_pointer import RunHead


def holder_of(root: str | Path, run: str, *, objects: Objects | None = None) -> LeaseOwner | None:
    """Who has the run; None where nobody has, or only a process of this machine that is dead.

    Of a process on another machine this cannot tell whether it lives: it counts until another one takes the run over.
    """
    validate_run_name(run)
    if isinstance(root, str) and root.startswith(REMOTE):
        holder = _head(root, run, objects).look().head.lease.holder
    else:
        holder = _in_folders(local_root(root), run)
    return None if holder is None or is_alive(holder.identity) is False else holder


def require_free(root: str | Path, run: str, *, objects: Objects | None = None) -> None:
    """Raise LeaseHeld where one look tells that a process has the run and goes on: taking it would be refused too.

    A process that is silent, or on another machine, is no reason yet: whoever takes the run watches it for a while.
    """
    validate_run_name(run)
    if isinstance(root, str) and root.startswith(REMOTE):
        from infra.runs.s3_lease import LeaseStates

        head = _head(root, run, objects)
        states = LeaseStates(head)
        LeaseExpiry(run, states, is_alive, Clock(), EXPIRY_S).all_gone(states.look(head.look().head), refuse=True)
        return
    folders = LeaseFolders(local_root(root), run, this_process(), LocalFiles())
    with suppress(FileNotFoundError):
        LeaseExpiry(run, folders, is_alive, Clock(), EXPIRY_S).all_gone(folders.numbers().live, refuse=True)


def _in_folders(root: Path, run: str) -> LeaseOwner | None:
    folders = LeaseFolders(root, run, this_process(), LocalFiles())
    with suppress(FileNotFoundError):
        live = folders.numbers().live
        return folders.holder(live[-1]) if live else None
    return None


def _head(root: str, run: str, objects: Objects | None) -> RunHead:
    # boto3 is worth a quarter of a second, and most stores are folders.
    from infra.runs.s3_pointer import RunHead
    from infra.storage.client import open_objects

    address = S3Address.parse(root)
    return RunHead(objects or open_objects(address.bucket), address, run)
