"""Where a run stands: nothing yet, or after its last committed iteration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infra.runs import RunRecords
from ppo_core.records import InputError
from ppo_core.spec import RunSpec, differing_keys
from tasks.commit_iteration import IterationRecord, read_record

MAY_CHANGE = ("iterations: ", "engines.", "registry.", "training.")
"""What a run may go on with another value of: its length, how engines run, where its policy goes."""


def effective_spec(spec: RunSpec, records: RunRecords) -> RunSpec:
    """The spec a run really has: learning-rate decay ends where the run was first meant to end.

    Raises InputError when the run exists with another spec, listing the keys that differ.
    """
    recorded = records.read_spec()
    decay = spec.update.decay_iterations or spec.iterations
    if recorded is not None and spec.update.decay_iterations is None:
        decay = int(recorded["update"]["decay_iterations"])
    resolved = spec.model_copy(update={"update": spec.update.model_copy(update={"decay_iterations": decay})})
    if recorded is not None:
        refuse_other_spec(records.run, recorded, resolved.document())
    return resolved


def refuse_other_spec(run: str, recorded: Mapping[str, Any], requested: Mapping[str, Any]) -> None:
    """Raise InputError naming every key that differs and may not."""
    keys = [line for line in differing_keys(recorded, requested) if not line.startswith(MAY_CHANGE)]
    if keys:
        listed = "\n  ".join(keys)
        raise InputError(
            f"run {run} exists with another spec (recorded -> requested):\n  {listed}\n"
            "choose another --run name, or restore these keys"
        )


def last_record(records: RunRecords) -> IterationRecord | None:
    """The record of the last committed iteration, None for a new run."""
    last = records.last()
    return None if last is None else read_record(records.read(last))


def first_record(records: RunRecords) -> IterationRecord:
    """Record 0: the policy that PPO started from."""
    return read_record(records.read(0))
