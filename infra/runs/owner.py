"""Who has a run: what each holder says of itself, and how the others see it."""

from __future__ import annotations

from datetime import UTC, datetime

from pydantic import BaseModel, ConfigDict

from infra.process_identity import ProcessIdentity


class LeaseOwner(BaseModel):
    """A process that has or had a run, and what it said of itself."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    identity: ProcessIdentity
    since_ms: int
    note: dict[str, str] = {}


class LeaseHeld(RuntimeError):
    """Another process has the run: `holder`."""

    def __init__(self, message: str, holder: LeaseOwner) -> None:
        super().__init__(message)
        self.holder = holder


class LeaseLost(RuntimeError):
    """This process no longer has the run."""


def describe(holder: LeaseOwner) -> str:
    """A holder as people want to read of it."""
    since = datetime.fromtimestamp(holder.since_ms / 1000, UTC).isoformat(timespec="seconds")
    return f"process {holder.identity.pid} on {holder.identity.host} (since {since})"


def loss(run: str, number: int, successor: LeaseOwner | None) -> LeaseLost:
    """The error of a process whose lease of this number is gone."""
    if successor is None:
        return LeaseLost(f"run {run}: this process no longer has the run, its lease {number} has ended")
    return LeaseLost(
        f"run {run}: this process no longer has the run, its lease {number} was taken over; "
        f"{describe(successor)} has it now: let that process continue"
    )
