"""Being the only process that works on something: a run, or what else a flow does under a run's name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

from infra.artifacts import open_store
from infra.backend import acquire_lease
from infra.runs.lease import Heartbeat, Lease
from infra.runs.names import RUN_NAME_LIMIT, validate_run_name
from infra.settings import Settings
from infra.storage.objects import StoreUnavailable
from ppo_core.records import content_digest

__all__ = ["DPO", "PRIVATE", "REWARD_MODEL", "RLHF", "Lease", "alone", "held", "lease_name"]

PRIVATE = "_"
"""So begin the names of leases that are no run's."""
DPO, REWARD_MODEL, RLHF = "dpo", "reward-model", "rlhf"
"""Flows whose leases are beside that of training, under the same run's name."""


@contextmanager
def held(
    root: str,
    name: str,
    *,
    note: Mapping[str, str] = {},
    wait: bool = False,
    keep: Callable[[], bool] | None = None,
) -> Iterator[Lease]:
    """Hold the lease of this name, which needs a heartbeat meanwhile. Raises LeaseHeld, unless it is to `wait`.

    `note` is for the next holder, who gets it if this process dies, or `keep` says that it is not to be released.
    """
    lease = acquire_lease(root, name, note=note, wait=wait)
    try:
        yield lease
    finally:
        with suppress(StoreUnavailable):  # whoever comes next finds this process gone, or silent
            if keep is None or not keep():
                lease.release()


@contextmanager
def alone(
    flow: str, run: str, *, note: Mapping[str, str] = {}, wait: bool = False, keep: Callable[[], bool] | None = None
) -> Iterator[Lease]:
    """The same for a whole flow, whose parts hold leases of their own: to lose this one ends nothing."""
    root = open_store(Settings().store_root).root
    with (
        held(root, lease_name(flow, run), note=note, wait=wait, keep=keep) as lease,
        Heartbeat(lease, on_lost=lambda: None),
    ):
        yield lease


def lease_name(flow: str, run: str) -> str:
    """What a flow's lease on a run is called, beside that of training; of a name too long, the beginning and a hash."""
    name, longest = validate_run_name(run), RUN_NAME_LIMIT - len(f"{PRIVATE}{flow}-")
    return f"{PRIVATE}{flow}-{name if len(name) <= longest else f'{name[: longest - 13]}-{content_digest(name)[:12]}'}"
