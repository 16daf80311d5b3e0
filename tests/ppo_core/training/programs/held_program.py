"""What policy and critic hold of their device's memory, at rest and while they learn; see `training_program`."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ppo_core.processes import aside
from ppo_core.processes.ranks import Ranks
from ppo_core.training.deepspeed_engine import Trainable, full_shape
from ppo_core.training.learner import Learner
from ppo_core.training.update import Update
from tests.ppo_core.training.programs.deepspeed_program import Facts, load, make_start, silent
from tests.ppo_core.training.update_cases import BF16, FP32, make_experience, update_job

PIECE = 1 << 12
"""Bytes of memory that what is aside shares: of models this small."""


def held(networks: Mapping[str, Trainable]) -> int:
    """Bytes of all that the networks hold."""
    storages = [tensor.untyped_storage() for network in networks.values() for tensor in network.tensors()]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def live() -> int:
    """Bytes of all tensors and gradients that anything refers to, but for files that are mapped into memory."""
    tensors = [item for item in gc.get_objects() if isinstance(item, torch.Tensor) and not item.is_meta]
    tensors += [item.grad for item in tensors if item.is_leaf and item.grad is not None]
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values() if storage.resizable())


def watch(networks: Mapping[str, Trainable], measure: Callable[[], int]) -> tuple[list[int], list[int]]:
    """What is held before each step of one of them, when its gradients are complete, and where its moments change."""
    before, inside = list[int](), list[int]()

    def watched(step: Callable[..., Any], found: list[int]) -> Callable[..., Any]:
        def noting(*args: Any, **options: Any) -> Any:
            found.append(measure())
            return step(*args, **options)

        return noting

    for network in networks.values():
        vars(network)["step"] = watched(network.step, before)
        inner: Any = network._inner
        inner.step = watched(inner.step, inside)
    return before, inside


def states(root: Path, ranks: Ranks) -> Facts:
    """Before, in and after an update of two minibatches, in all stages."""
    facts: Facts = {}
    for stage, dtype in FP32 + BF16:
        job, learner = update_job(zero_stage=stage, dtype=dtype, num_minibatches=2), Learner(ranks)
        networks = load(learner, make_start(root, "llama-tied", dtype, ranks), job)
        resting, (learning, _) = held(networks), watch(networks, lambda networks=networks: held(networks))
        Update(networks, make_experience(), job, ranks).run(silent)
        found = {"resting": resting, "learning": learning, "afterwards": held(networks)}
        sizes = [full_shape(parameter).numel() for _, parameter in networks["policy"].parameters()]
        facts[f"{dtype}-{stage}"] = {**found, "parameters": sum(sizes)}
        learner.forget()
    return facts


def freed(root: Path, ranks: Ranks) -> Facts:
    """All live memory, beyond what there was: in and after an update, while networks are aside, and when they are
    forgotten, twice, the second time while they are aside; in all stages, without Python's own garbage collection."""
    facts: Facts = {}
    piece, aside.PIECE = aside.PIECE, PIECE
    for stage, dtype in FP32 + BF16:
        job, experience = update_job(zero_stage=stage, dtype=dtype, num_minibatches=2), make_experience()
        start = make_start(root, "llama-tied", dtype, ranks)
        gc.collect()
        gc.disable()
        before, found = live(), dict[str, Any]()
        for time in ("first", "second"):
            learner = Learner(ranks)
            networks = load(learner, start, job)
            at_steps = watch(networks, lambda before=before: live() - before)
            Update(networks, experience, job, ranks).run(silent)
            held_then = live() - before
            if time == "second":
                found |= {"learning": max(itertools.chain(*at_steps)), "held": held_then, "moved": learner.make_room()}
                found["left"] = live() - before - found["moved"]
            learner.forget()
            found[time] = live() - before
        facts[f"{dtype}-{stage}"] = found
        gc.enable()
    aside.PIECE = piece
    return facts


SCENARIOS: dict[str, Callable[[Path, Ranks], Facts]] = {"states": states, "freed": freed}
