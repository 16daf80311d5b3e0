"""Updates of the training engine without models: what they make is a hash of what they read; and what it refuses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from infra.engines.protocol import EngineInput, EngineJobError
from ppo_core.records import UpdatePolicyJob, content_digest
from ppo_core.training.state import derivation, identity_after, read_state
from tests.tasks.toy_checkpoints import PARTS, Weights, read_weights
from tests.tasks.toy_files import content

if TYPE_CHECKING:
    from tests.tasks.toy_engines import ToyEngines

Inputs = Mapping[str, EngineInput]


def update(engines: ToyEngines, held: Weights, spec: UpdatePolicyJob, experience: EngineInput) -> Weights:
    """The weights after one update."""
    what = [derivation(spec).model_dump(mode="json"), content(experience, "experience.json")]
    moved = [held.policy, held.critic, held.optimizer, engines.salts.get("update_policy")]
    return Weights.of(content_digest([*what, *moved]))


def hold(engines: ToyEngines, inputs: Inputs) -> Weights:
    """The weights of the input `checkpoint`; those of a policy-only one are made again."""
    folder = inputs["checkpoint"].path
    state = read_state(folder)
    if state.full:
        return read_weights(folder)
    missing = {"base", *(f"replay_{number}" for number in range(len(state.replay)))} - set(inputs)
    if missing:
        raise refusal(f"{folder} is a policy-only checkpoint, and these inputs are missing: {sorted(missing)}")
    base = read_state(inputs["base"].path)
    held, identity = read_weights(inputs["base"].path), base.identity
    for number, done in enumerate(state.replay):
        given = inputs[f"replay_{number}"]
        if given.digest != done.experience:
            raise refusal(f"replay_{number} is {given.digest}, not {done.experience}")
        engines.notes.append(f"replaying update {number + 1} of {len(state.replay)}")
        held = update(engines, held, done.spec, given)
        identity = identity_after(done.spec, identity, given.digest)
    if identity != state.identity or held.policy != (folder / PARTS["policy"]).read_text():
        raise refusal(f"the {len(state.replay)} updates since the last full checkpoint give other policy weights")
    return held


def refusal(reason: str) -> EngineJobError:
    """What a real engine answers to input that it cannot use."""
    return EngineJobError(f"engine 'training': InputError: {reason}", error_type="InputError", reason=reason)


def not_finite(what: str) -> EngineJobError:
    """What the training engine says when it gives up over numbers."""
    reason = f"FloatingPointError: {what}"
    return EngineJobError(f"engine 'training': {reason}", error_type="EngineDefect", reason=reason)
