"""The training state of a policy-only checkpoint, made again: the last full one, and every update since then once more.

base ──► update with replay_0 ──► update with replay_1 ──► … ──► the same policy, to the byte, or an error

It holds every network and its optimizer then as if the engine that made them had never ended.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ppo_core.models.loading import load_policy
from ppo_core.processes.protocol import JobInput
from ppo_core.records import InputError, UpdatePolicyJob
from ppo_core.training.checkpoint import full_weights, write_checkpoint
from ppo_core.training.checkpoint_checks import require_network
from ppo_core.training.deepspeed_engine import Trainable
from ppo_core.training.determinism import deterministic
from ppo_core.training.experience import Experience
from ppo_core.training.learner import Learner, LoadConfig
from ppo_core.training.state import (
    CheckpointState,
    check_networks,
    identity_after,
    read_state,
    settings_since,
    writer,
)
from ppo_core.training.update import Update

Tick = Callable[[int, int, str], None]
SHOWN = 4


def hold_checkpoint(
    learner: Learner, inputs: Mapping[str, JobInput], config: LoadConfig, tick: Tick
) -> dict[str, Trainable]:
    """The networks of the input `checkpoint`, full or policy-only; `Replay` says which inputs the latter needs.

    Raises InputError where they are missing or other networks, and where the updates give other weights than the
    checkpoint has.
    """
    folder, start = inputs["checkpoint"].path, _start(inputs)
    state = read_state(folder)
    check_networks(folder, state, config.networks)
    if not state.full and not learner.holds(state.identity, config):
        if learner.identity != state.identity:
            _check_inputs(folder, state, inputs, learner.ranks.world_size)
            _replay(learner, folder, state, inputs, tick)
        _hold_as(learner, config, start)
    return learner.checkpoint(folder, config, start)


def run_update(
    learner: Learner, experience: JobInput, spec: UpdatePolicyJob, tick: Tick, start: JobInput | None
) -> dict[str, float]:
    """Train what `learner` holds, which then is the next checkpoint. Returns the metrics.

    `start`, the run's checkpoint 0, is for a loss that has the KL to the reference over the whole vocabulary.
    """
    identity = identity_after(spec, str(learner.identity), experience.digest)
    reference = None
    if spec.update.exact_kl_loss and spec.model.lora is None:
        if start is None:
            raise InputError("update.kl_loss_estimator=full compares with the run's start: give that as `reference`")
        reference = learner.reference(start.path / "policy", start.digest, model=spec.model, training=spec.training)
    rows = Experience.load(experience.path)
    learner.invalidate()
    with deterministic(spec.deterministic):
        metrics = Update(learner.trainables, rows, spec, learner.ranks, reference).run(tick)
    learner.mark_loaded(identity)
    return metrics


def _replay(learner: Learner, folder: Path, state: CheckpointState, inputs: Mapping[str, JobInput], tick: Tick) -> None:
    specs = [update.spec for update in state.replay]
    if learner.ranks.is_first:  # one that cannot be compared with is refused before the updates are done again
        require_network(folder, "policy")
        _stored_policy(learner, folder, specs[0].model.dtype)
    start = _start(inputs)
    for number, spec in enumerate(specs):
        config = LoadConfig.of(spec)
        if number == 0:
            learner.checkpoint(inputs["base"].path, config, start)
        _hold_as(learner, config, start)
        # What the update did once it may do again, whatever the limit was at that time.
        unlimited = spec.model_copy(update={"max_skipped_steps": sys.maxsize})

        def noted(done: int, total: int, _: str, number: int = number) -> None:
            tick(done, total, f"replaying update {number + 1} of {len(specs)}")

        run_update(learner, inputs[f"replay_{number}"], unlimited, noted, inputs.get("reference"))
    _check_same_policy(learner, folder, state)


def _start(inputs: Mapping[str, JobInput]) -> Path | None:
    return inputs["reference"].path if "reference" in inputs else None


def _hold_as(learner: Learner, config: LoadConfig, start: Path | None) -> None:
    """The same weights as another job wants them, by way of files, as if a full checkpoint lay between the two."""
    identity = str(learner.identity)
    if learner.holds(identity, config):
        return
    with tempfile.TemporaryDirectory() as mine:
        folder = Path(learner.ranks.broadcast(mine))
        write_checkpoint(folder, learner.trainables, learner.tokenizer, learner.ranks, identity=identity)
        learner.checkpoint(folder, config, start)
        learner.ranks.barrier()


def _check_inputs(folder: Path, state: CheckpointState, inputs: Mapping[str, JobInput], num_ranks: int) -> None:
    """Raise InputError unless `inputs` are those that the checkpoint in `folder` was made of."""
    names = ["base", *(f"replay_{number}" for number in range(len(state.replay)))]
    missing = [name for name in names if name not in inputs]
    if missing:
        raise InputError(
            f"{folder} is a policy-only checkpoint, and this engine does not hold its training state: to replay "
            f"{len(state.replay)} updates it needs the inputs {', '.join(names)}; missing: {', '.join(missing)}"
        )
    base = read_state(inputs["base"].path)
    if not base.full:
        raise InputError(f"{inputs['base'].path} is a policy-only checkpoint itself: base must be the last full one")
    identity = base.identity
    for number, update in enumerate(state.replay):
        given, made_with = inputs[f"replay_{number}"].digest, update.spec.training.num_ranks
        if given != update.experience:
            raise InputError(f"replay_{number} is experience {given}, but {folder} was made with {update.experience}")
        if made_with != num_ranks:
            raise InputError(
                f"{folder} was made by {made_with} training ranks, and {num_ranks} would round otherwise: set "
                f"training.num_ranks={made_with} for now, or {_new_start(state)}"
            )
        identity = identity_after(update.spec, identity, update.experience)
    if identity != state.identity and (since := settings_since(folder, state)):
        raise InputError(
            f"{folder} is a policy-only checkpoint of an earlier ppoflow{writer(folder)}, in which updates had no "
            f"{', '.join(since[:SHOWN])}: this one does not make them again. Go on with that version up to the next "
            f"full checkpoint, or {_new_start(state)}"
        )
    if identity != state.identity:
        raise InputError(f"{inputs['base'].path} is not the full checkpoint that {folder} goes back to")


def _check_same_policy(learner: Learner, folder: Path, state: CheckpointState) -> None:
    """Raise InputError, on the first rank, unless the held policy is the one in `folder`, bit for bit."""
    policy = learner.trainables["policy"]
    replayed = full_weights(policy, learner.ranks)
    if not learner.ranks.is_first:
        return
    dtype = "float32" if policy.dtype is torch.float32 else "bfloat16"
    stored = dict(_stored_policy(learner, folder, dtype).named_parameters())
    other = [name for name, weight in replayed.items() if not _same_bytes(weight, stored[name])]
    if other:
        learner.forget()
        raise InputError(
            f"the {len(state.replay)} updates since the last full checkpoint, replayed, give other policy weights than "
            f"{folder} has ({len(other)} of {len(replayed)} tensors differ, {other[0]} first): another kind of CPU or "
            "GPU, number of threads, or version of a library than when it was made. Go on where it was made, or "
            f"{_new_start(state)}"
        )


def _stored_policy(learner: Learner, folder: Path, dtype: str) -> Any:
    return load_policy(folder / "policy", dtype=dtype, trust_remote_code=learner.trust_remote_code, exact=True)


def _same_bytes(one: Tensor, other: Any) -> bool:
    left, right = (tensor.detach().cpu().contiguous().flatten().view(torch.uint8) for tensor in (one, other))
    return torch.equal(left, right)


def _new_start(state: CheckpointState) -> str:
    """The first replayed update counts from 0 what the run's iterations count from 1."""
    return f"start from the last full checkpoint: ppoflow fork RUN@{state.replay[0].spec.iteration} NEW"
