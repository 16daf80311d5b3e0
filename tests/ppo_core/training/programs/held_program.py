"""What policy and critic hold of their device's memory, at rest and while they learn; see `training_program`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from ppo_core.processes.ranks import Ranks
from ppo_core.training.deepspeed_engine import Trainable, full_shape
from ppo_core.training.learner import Learner
from ppo_core.training.update import Update
from tests.ppo_core.training.programs.deepspeed_program import Facts, load, make_start, silent
from tests.ppo_core.training.update_cases import BF16, FP32, make_experience, update_job


def held(networks: Mapping[str, Trainable]) -> int:
    """Bytes of all that the networks hold."""
    storages = [tensor.untyped_storage() for network in networks.values() for tensor in network.tensors()]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def watch(networks: Mapping[str, Trainable]) -> list[int]:
    """What they hold before each step of one of them, when its gradients are complete."""
    found: list[int] = []

    def watched(step: Callable[[float], float]) -> Callable[[float], float]:
        def noting(rate: float) -> float:
            found.append(held(networks))
            return step(rate)

        return noting

    for network in networks.values():
        vars(network)["step"] = watched(network.step)
    return found


def states(root: Path, ranks: Ranks) -> Facts:
    """Before, in and after an update of two minibatches, in all stages."""
    facts: Facts = {}
    for stage, dtype in FP32 + BF16:
        job, learner = update_job(zero_stage=stage, dtype=dtype, num_minibatches=2), Learner(ranks)
        networks = load(learner, make_start(root, "llama-tied", dtype, ranks), job)
        resting, learning = held(networks), watch(networks)
        Update(networks, make_experience(), job, ranks).run(silent)
        found = {"resting": resting, "learning": learning, "afterwards": held(networks)}
        sizes = [full_shape(parameter).numel() for _, parameter in networks["policy"].parameters()]
        facts[f"{dtype}-{stage}"] = {**found, "parameters": sum(sizes)}
        learner.forget()
    return facts


SCENARIOS: dict[str, Callable[[Path, Ranks], Facts]] = {"states": states}
