"""The training code on whatever device this process finds; what training_program runs as device/NAME."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from ppo_core.logprobs import response_logprobs
from ppo_core.models.activations import keep_less, rotate_in_one
from ppo_core.models.loading import create_policy, load_policy
from ppo_core.models.packing import enable_packing
from ppo_core.models.precision import multiply_in
from ppo_core.processes.ranks import Ranks
from ppo_core.processes.turns import free_unused
from ppo_core.records import UpdatePolicyJob
from ppo_core.training.determinism import deterministic
from ppo_core.training.learner import Learner
from tests.ppo_core.tiny_models import VOCABULARY, ragged_sequences, tiny_config
from tests.ppo_core.training.programs.deepspeed_program import load, make_start, resume, train
from tests.ppo_core.training.update_cases import TEMPERATURE, checkpoint_folder, make_experience, update_job

SEQUENCES = ragged_sequences(9)
RESUMED = [(0, "float32"), (2, "bfloat16")]
MOVED = [(0, "float32"), (1, "float32"), (2, "bfloat16"), (3, "float32")]
# Name: what weights are kept in, what products are computed in, and whether only deterministic kernels may run.
PASSES = {
    "float32": ("float32", "float32", False),
    "deterministic": ("float32", "float32", True),
    "bf16 products": ("float32", "bfloat16", False),
    "bf16 weights": ("bfloat16", "float32", False),
}
Facts = dict[str, Any]


def policy_of(case: str) -> Any:
    """Grouped heads. Where bf16 rounds, weights so narrow that it moves no logprob far."""
    dtype, compute, _ = PASSES[case]
    config = {**tiny_config("qwen2"), "initializer_range": 0.05 if "bfloat16" in (dtype, compute) else 0.3}
    return create_policy(config, vocab_size=VOCABULARY, seed=0, dtype=dtype)


def gradient_factors(count: int, width: int) -> Tensor:
    """A factor of its own for every logprob, so that each has a gradient."""
    return torch.randn((count, width), generator=torch.Generator().manual_seed(1))


def passes(root: Path, ranks: Ranks) -> Facts:
    """Logprobs, entropies and gradients of packed rows and of padded ones."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for name, (_, compute, wanted) in PASSES.items():
        for rows in ("packed", "padded"):
            model = policy_of(name).to(device)
            if rows == "packed":  # as in training
                enable_packing(model)
                rotate_in_one(model)
                keep_less(model)
            multiply_in(model, compute)
            with deterministic(wanted):
                logprobs, entropy = response_logprobs(model, SEQUENCES, temperature=TEMPERATURE, with_entropy=True)
                (gradient_factors(*logprobs.shape).to(device) * (logprobs + entropy)).sum().backward()
            said = {"logprobs": logprobs.detach(), "entropy": entropy.detach()}
            said |= {f"gradient {key}": p.grad for key, p in model.named_parameters()}
            on_cpu = {key: tensor.float().cpu().contiguous() for key, tensor in said.items()}
            save_file(on_cpu, root / f"{rows} {name}.safetensors")
    return {}


def where(root: Path, ranks: Ranks) -> Facts:
    """What the ranks compute on, and talk through."""
    learner = Learner(ranks)
    policy = load(learner, make_start(root, "llama-tied", "float32", ranks), update_job())["policy"]
    facts = {"device": policy.device.type, "backend": dist.get_backend_config(), "ranks": ranks.world_size}
    learner.forget()
    return facts


def resumed(root: Path, ranks: Ranks) -> Facts:
    """Of two iterations the second again, by a fresh engine."""
    with deterministic(True):
        return resume(root, ranks, RESUMED)


def products_in_bf16(job: UpdatePolicyJob) -> UpdatePolicyJob:
    """The same with them."""
    training = job.training.model_copy(update={"compute_dtype": "bfloat16"})
    return job.model_copy(update={"training": training})


def moved(root: Path, ranks: Ranks) -> Facts:
    """Two iterations, and the same where everything makes room before the second: bytes that were held and that left,
    and what is left on the device."""
    facts: Facts = {}
    for stage, dtype in MOVED:
        job = update_job(zero_stage=stage, dtype=dtype, num_minibatches=2)
        start = make_start(root, "llama-tied", dtype, ranks)
        for name in ("stayed", "moved"):
            learner, folder = Learner(ranks), checkpoint_folder(root, stage, dtype, name)
            with deterministic(True):
                train(learner, start, root / f"{folder.name}-before", job, make_experience())
                reference = (start / "policy", "start")
                held = learner.reference(*reference, model=job.model, training=job.training)
                if name == "moved":
                    for parameter in held.parameters():  # a mapped file has no room of its own
                        parameter.data = parameter.data.clone()
                    offloaded = learner.offload_reference()
                    facts[folder.name] = {**made_room(learner), "offloaded": offloaded}
                    learner.bring_back()
                    held = learner.reference(*reference, model=job.model, training=job.training)
                    whole = load_policy(start / "policy", dtype=dtype, trust_remote_code=False).state_dict()
                    facts[folder.name] |= {
                        "reference": sum(tensor.nbytes for tensor in set(held.parameters())),
                        "same": all(torch.equal(whole[key], now.cpu()) for key, now in held.state_dict().items()),
                    }
                del held  # the next stage would find it on the device
                train(learner, root / f"{folder.name}-before", folder, job, make_experience())
            learner.forget()
    return facts


def made_room(learner: Learner) -> Facts:
    """Bytes of the weights and moments, those moved, and those left behind."""
    trained = [p for one in learner.trainables.values() for _, p in one.parameters()]
    held = [tensor for one in learner.trainables.values() for tensor in one.tensors()]
    facts = {"least": sum(p.numel() * p.element_size() for p in trained), "moved": learner.make_room()}
    storages = [tensor.untyped_storage() for tensor in held]
    facts["left"] = sum(storage.nbytes() for storage in storages if storage.resizable())  # others are mapped files
    if torch.cuda.is_available():
        free_unused()  # cuBLAS has 32 MiB for itself
        facts["left"] = torch.cuda.memory_allocated()
    return facts


def twice(root: Path, ranks: Ranks) -> Facts:
    """One update by two fresh engines, with products in bf16."""
    facts: Facts = {}
    job = products_in_bf16(update_job(num_minibatches=2, num_ppo_epochs=2, entropy_coef=0.05))
    for name in ("one", "two"):
        learner, folder = Learner(ranks), checkpoint_folder(root, 0, "float32", name)
        start = make_start(root, "llama-tied", "float32", ranks)
        with deterministic(True):
            facts[name] = train(learner, start, folder, job, make_experience())
        learner.forget()
    return facts


SCENARIOS: dict[str, Callable[[Path, Ranks], Facts]] = {
    "passes": passes,
    "where": where,
    "resumed": resumed,
    "moved": moved,
    "twice": twice,
}
