"""`state.json` of a checkpoint: which one it is, how far it has trained, and how a policy-only one is completed."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from pydantic import NonNegativeInt, ValidationError

from ppo_core.records import InputError, Replay, UpdatePolicyJob, content_digest
from ppo_core.spec import Section
from ppo_core.spec.explaining import explain
from ppo_core.spec.loading import differing_keys

FORMAT = 3
FILE = "state.json"
NO_PART_OF_THE_RESULT = {"full", "max_skipped_steps"}


class CheckpointState(Section):
    """What `state.json` says. Of each network: optimizer steps so far, and how many in a row up to here were skipped.

    `identity` names the content by its derivation, the same for a full and a policy-only checkpoint of one policy.
    `replay` has every update since the last full checkpoint, this one's own included; in a full one nothing.
    """

    format: int = FORMAT
    identity: str
    full: bool
    num_steps: dict[str, NonNegativeInt]
    skipped_steps: dict[str, NonNegativeInt]
    replay: tuple[Replay, ...]

    def write(self, folder: Path) -> None:
        """Write `state.json`."""
        (folder / FILE).write_text(json.dumps(self.model_dump(mode="json"), indent=2, sort_keys=True) + "\n")


def read_state(folder: Path) -> CheckpointState:
    """`state.json`, checked. Raises InputError for one that is missing, damaged, or of another format."""
    path = folder / FILE
    try:
        document = json.loads(path.read_text())
        written_in = int(document["format"])
    except FileNotFoundError:
        raise InputError(f"{folder} is no checkpoint: {FILE} is missing") from None
    except (ValueError, TypeError, KeyError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from None
    if written_in != FORMAT:
        raise InputError(
            f"{folder} has checkpoint format {written_in}, and this ppoflow reads format {FORMAT} alone: use the "
            f"ppoflow that wrote it{writer(folder)}"
        )
    try:
        state = CheckpointState.model_validate(document)
    except ValidationError as error:
        complaints = "; ".join(explain(CheckpointState, error))
        if {item["type"] for item in error.errors()} == {"extra_forbidden"}:
            raise InputError(
                f"{path} has settings that this ppoflow does not know ({complaints}): use the one that wrote it"
                f"{writer(folder)}, or go on from the last full checkpoint, with ppoflow fork"
            ) from None
        raise _damaged(path, complaints) from None
    if state.num_steps.keys() != state.skipped_steps.keys():
        raise _damaged(
            path, f"num_steps is of {_names(state.num_steps)}, skipped_steps of {_names(state.skipped_steps)}"
        )
    if state.full == bool(state.replay):
        raise _damaged(path, f"full={state.full} does not go with {len(state.replay)} updates in replay")
    return state


def check_networks(folder: Path, state: CheckpointState, networks: Collection[str]) -> None:
    """Raise InputError unless the checkpoint has the training state of just these networks."""
    if state.num_steps.keys() != set(networks):
        raise InputError(
            f"{folder} has the training state of {_names(state.num_steps)}, and the algorithm of this job trains "
            f"{_names(networks)}: keep the algorithm that made it, or start a run of its own from the policy in it "
            f"(model.path={folder}/policy)"
        )


def derivation(spec: UpdatePolicyJob) -> UpdatePolicyJob:
    """The job without what leaves its result as it is."""
    return UpdatePolicyJob.model_validate(spec.model_dump(exclude=NO_PART_OF_THE_RESULT))


def identity_after(spec: UpdatePolicyJob, before: str, experience: str) -> str:
    """The identity of what an update makes of the checkpoint `before` and the experience of that digest."""
    return content_digest(
        ["update_policy", spec.model_dump(mode="json", exclude=NO_PART_OF_THE_RESULT), before, experience]
    )


def settings_since(folder: Path, state: CheckpointState) -> list[str]:
    """The settings of the updates in `replay` that the ppoflow which wrote `state.json` did not have yet."""
    written = json.loads((folder / FILE).read_text()).get("replay", [])
    now = [update.spec.model_dump(mode="json") for update in state.replay]
    lines = [line for one, other in zip(written, now, strict=True) for line in differing_keys(one["spec"], other)]
    return sorted({line.partition(":")[0] for line in lines})


def _names(networks: Collection[str]) -> str:
    return " and ".join(sorted(networks, reverse=True))


def _damaged(path: Path, why: str) -> InputError:
    return InputError(f"{path} is damaged ({why}): take the checkpoint from a copy, or an earlier one")


def writer(folder: Path) -> str:
    """The version in the manifest that a stored checkpoint has beside its state, where it says one."""
    try:
        libraries: dict[str, Any] = json.loads((folder / "manifest.json").read_text())["libraries"]
        return f" ({libraries['ppoflow']})"
    except (OSError, ValueError, TypeError, KeyError):
        return ""
