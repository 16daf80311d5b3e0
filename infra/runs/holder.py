"""Which process has a run now, for whoever only wants to know: nothing is taken, changed or waited for."""

from __future__ import annotations

from infra.process_identity import is_alive
from infra.runs.lease_expiry import EXPIRY_S, Clock, LeaseExpiry, RunLeases
from infra.runs.owner import LeaseOwner


def holder_of(leases: RunLeases) -> LeaseOwner | None:
    """Who has the run; None where nobody has, or only a process of this machine that is dead.

    Of a process on another machine this cannot tell whether it lives: it counts until another one takes the run over.
    """
    live = leases.live()
    holder = leases.holder(live[-1]) if live else None
    return None if holder is None or is_alive(holder.identity) is False else holder


def require_free(leases: RunLeases) -> None:
    """Raise LeaseHeld where one look shows that a process has the run and goes on: taking it would be refused too.

    A process that is silent, or on another machine, is no reason yet: whoever takes the run watches it for a while.
    """
    LeaseExpiry(leases, is_alive, Clock(), EXPIRY_S).all_gone(leases.live(), refuse=True)
