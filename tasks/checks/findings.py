"""What a check has found in order, as people read it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from typing import Any

from infra.settings import Settings
from ppo_core.records import InputError
from ppo_core.spec import RunSpec, TrainingSpec
from tasks.runs.state_folder import nearest

GIB = 2**30


def findings_of(spec: RunSpec, facts: Mapping[str, Any], run: str, iteration: int | None, store: str) -> dict[str, str]:
    """A short line for each subject; `facts` are those of the scoring engine's job `check_run`."""
    settings, counts = Settings(), facts["counts"]
    free = shutil.disk_usage(nearest(settings.home)).free / GIB
    splits = [_prompts(counts["train"], spec.rollout.prompts_per_iteration)]
    splits += [f"{counts['eval']} held out"] if "eval" in counts else []
    splits += [counted(counts["sft"], "SFT example")] if "sft" in counts else []
    splits += [f"{count} left out ({reason})" for reason, count in facts["left_out"].items()]
    scores = ", ".join("none" if score is None else f"{score:g}" for score in facts["scores"])
    return {
        "run": f"{run}, {stands(iteration, spec.iterations)}",
        "data": ", ".join(splits),
        "context": _context(facts["longest_prompt"], spec.rollout.max_response_tokens, facts["context_length"]),
        "model": f"{facts['model_type']}, {facts['parameters'] / 1e6:.3g} million parameters, {spec.model.dtype}",
        "rollouts": _cache(spec, facts["sequences"]),
        **_gpu_memory(facts.get("gpu_memory")),
        "reward": f"{spec.reward.labels} on {counted(len(facts['scores']), 'row')}: {scores}",
        "state": f"{settings.home} ({free:.0f} GiB free)",
        "store": store,
    }


def require_recomputing(training: TrainingSpec, facts: Mapping[str, Any]) -> None:
    """Raise InputError where activations shall be recomputed that transformers can only keep."""
    if training.activation_checkpointing and not facts["recomputes"]:
        raise InputError(
            "training.activation_checkpointing=true: transformers cannot recompute the activations of this model (type "
            f"{facts['model_type']}), or of its critic: leave it out"
        )


def counted(number: int, what: str) -> str:
    """A number of things.

    >>> counted(1, "row"), counted(1024, "row")
    ('1 row', '1,024 rows')
    """
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _prompts(number: int, drawn: int) -> str:
    often = f" (each drawn about {drawn / number:.3g} times per iteration)" if drawn > number else ""
    return f"{counted(number, 'prompt')} to train on{often}"


def stands(iteration: int | None, planned: int) -> str:
    """Where a run is, in a few words."""
    if iteration is None:
        return f"a new run of {planned} iterations"
    if iteration >= planned:
        return f"finished: it has {iteration} iterations, and iterations={planned}; raise that to continue training"
    return f"continues after iteration {iteration} of {planned}"


def _context(longest: int, response: int, limit: int | None) -> str:
    room = "has no limit" if limit is None else f"reads {limit} tokens"
    return f"longest prompt {longest} + response {response} = {longest + response} tokens; the model {room}"


def _cache(spec: RunSpec, sequences: int | None) -> str:
    size = f"engines.kv_cache_gib={spec.engines.kv_cache_gib:g}"
    if sequences is None:
        return size
    room, responses = f"{size} has room for {counted(sequences, 'such sequence')} at once", spec.rollout.num_responses
    if sequences >= responses:
        return room
    return f"{room}, of the {responses:,} responses of an iteration; raise it where memory is free"


def _gpu_memory(memory: Mapping[str, Any] | None) -> dict[str, str]:
    if memory is None:
        return {}
    found = f"about {memory['needed_gib']:.1f} of {memory['gpu_gib']:.1f} GiB on the fullest GPU"
    tight = "; that is an estimate, and may not fit" if memory["needed_gib"] > memory["gpu_gib"] else ""
    hint = "; both engines fit at once: engines.placement=apart saves the turns" if memory["fits_at_once"] else ""
    return {"memory": f"{found}{tight}{hint}"}
