"""What of a spec does not fit this machine, or has no effect on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from infra.engines.hardware import (
    has_bf16_units,
    has_nvidia_gpu,
    lacks_bf16,
    nvidia_smi,
    smallest_memory_gib,
    usable_cores,
)
from infra.settings import visible_gpus
from ppo_core.records import CheckRunJob, InputError, PrepareDatasetJob, TrainingJob
from ppo_core.spec import DpoSpec, RolloutSpec, RunSpec, SpecError, TrainingSpec, UpdateSpec
from ppo_core.spec.flow_spec import FlowSpec
from ppo_core.spec.sections import ComputeDtype
from tasks.stages.engine_programs import sharing_of

CHANGES: Mapping[str, Sequence[str]] = {
    "engines.placement": ("engines.placement=together",),
    "engines.offload_reference": ("engines.offload_reference=true",),
    "model.lora.rank": ("model.lora.rank=16", "training.zero_stage=2"),
    "model.dtype": ("model.dtype=bfloat16", "training.zero_stage=1"),
}
"""Settings that take less memory of a GPU, and that not every spec can have."""


def machine_notes(spec: FlowSpec) -> list[str]:
    """What a person should know before training starts; of the machine nothing where it is on another."""
    here = spec.engines.backend == "local" and not has_nvidia_gpu()
    said = notes_of_defaults(spec) if isinstance(spec, RunSpec) else []
    ranks, cores = spec.training.num_ranks, usable_cores()
    if here and ranks > cores:
        said.append(
            f"training.num_ranks={ranks} is more than the {cores} cores here, and ranks wait for each other: lower it "
            f"to {most_ranks(spec, cores)}"
        )
    asked = {"training.compute_dtype": spec.training.compute_dtype, "model.dtype": spec.model.dtype}
    if isinstance(spec, RunSpec | DpoSpec):
        asked["rollout.dtype"] = spec.rollout.dtype
    # One without AVX512 took 60 times as long for a product of 1024 x 1024.
    said += [
        f"{key}=bfloat16 is slow here: this CPU lacks AVX512-BF16 and AMX, and may take many times as long as in "
        f"float32; {'float32 needs twice the memory' if key == 'model.dtype' else 'auto chooses the faster one'}"
        for key, dtype in asked.items()
        if here and dtype == "bfloat16" and not has_bf16_units()
    ]
    if here and spec.engines.offload_reference:
        said.append("engines.offload_reference=true has no effect here: without a GPU all is in main memory anyway")
    return said


def notes_of_defaults(spec: RunSpec) -> list[str]:
    """Defaults that suit small new models, where the run begins with one that is there."""
    rate, longest = (
        section.model_fields[name].default
        for section, name in ((UpdateSpec, "learning_rate"), (RolloutSpec, "max_response_tokens"))
    )
    said = list[str]()
    if spec.model.path is not None and spec.model.lora is None and spec.update.learning_rate == rate:
        said.append(
            f"update.learning_rate={rate:g}, the default, is for small models made from model.config; for a pretrained "
            "model 1e-6 to 5e-6 is usual (docs/hyperparameters.md)"
        )
    if spec.model.path is not None and spec.rollout.max_response_tokens == longest:
        said.append(f"responses are cut at {longest} tokens, the default: set rollout.max_response_tokens")
    return said


def check_job(spec: RunSpec | DpoSpec, dataset: PrepareDatasetJob) -> CheckRunJob:
    """The check of a run on this machine, or on those of its Ray cluster.

    Raises InputError where the run asks for more GPUs than are here, or for sampling in a precision that they lack.
    """
    require_gpus(spec)
    gpu = None if spec.engines.backend == "ray" else has_nvidia_gpu()
    samples = "rollout" in spec.roles
    stop = tuple(spec.rollout.stop) if samples else ()
    if not gpu:
        dtype = spec.rollout.compute_dtype(spec.training)
        return CheckRunJob(
            dataset=dataset, samples=samples, stop=stop, engines=spec.engines, sampler_dtype=dtype, gpu=gpu
        )
    gpus = visible_gpus()
    lacking = lacks_bf16(nvidia_smi("index,uuid,compute_cap"), gpus)
    training = on_gpus(spec, lacking=lacking)
    learner: dict[str, Any] = {"sampler_dtype": spec.rollout.compute_dtype(training)}
    if lacking and samples:
        check_sampler(spec, learner["sampler_dtype"])
    if isinstance(spec, RunSpec):
        learner["learner"] = TrainingJob(model=spec.model, algorithm=spec.algorithm, training=training)
        learner["fixed"] = [key for key, change in CHANGES.items() if not accepts(spec, change)]
        learner["fixed"] += ["model.dtype", "rollout.dtype"] if lacking else []
    memory, sharing = smallest_memory_gib(nvidia_smi("index,uuid,memory.total"), gpus), sharing_of(spec, len(gpus))
    learner |= {"gpu_gib": memory, "gpus": len(gpus), "sharing": sharing}
    return CheckRunJob(dataset=dataset, samples=samples, stop=stop, engines=spec.engines, gpu=True, **learner)


def check_sampler(spec: RunSpec | DpoSpec, dtype: ComputeDtype) -> None:
    """Raise InputError where GPUs without units for bf16 would have to sample in it: vLLM refuses that."""
    key = "model.dtype" if spec.model.dtype == "bfloat16" else "rollout.dtype"
    if "bfloat16" in (spec.model.dtype, dtype):
        raise InputError(
            f"vLLM samples in bfloat16 only on GPUs of compute capability 8 or more, and one here has less: set "
            f"{key}=float32"
        )


def on_gpus(spec: RunSpec | DpoSpec, *, lacking: bool) -> TrainingSpec:
    """The section with what `compute_dtype: auto` is as the training engine resolves it; `lacking`: GPUs that have no
    units for bf16."""
    if spec.training.compute_dtype == "auto" and lacking:
        return spec.training.model_copy(update={"compute_dtype": "float32"})
    return spec.training


def accepts(spec: FlowSpec, changes: Sequence[str]) -> bool:
    """Whether the spec could have these settings."""
    try:
        spec.with_overrides(list(changes))
    except SpecError:
        return False
    return True


def most_ranks(spec: FlowSpec, limit: int) -> int:
    """The largest training.num_ranks up to the limit that the spec could have."""
    return next((ranks for ranks in range(limit, 1, -1) if accepts(spec, [f"training.num_ranks={ranks}"])), 1)


def require_gpus(spec: FlowSpec) -> None:
    """Raise InputError where the flow asks for more GPUs than are here; those of a Ray cluster nobody can count."""
    check_reward_gpus(spec, len(visible_gpus()))
    if spec.engines.backend == "local" and has_nvidia_gpu():
        check_gpus(spec, len(visible_gpus()))


def check_gpus(spec: FlowSpec, gpus: int) -> None:
    """Raise InputError where a machine with GPUs has fewer than one of the engines needs."""
    if gpus == 0:
        raise InputError("CUDA_VISIBLE_DEVICES hides every GPU of this machine: unset it, or name the GPUs to use")
    engines, ranks = spec.engines, spec.training.num_ranks
    sampling = engines.rollout_engines * engines.tensor_parallel_size
    if ranks > gpus:
        raise InputError(
            f"training.num_ranks={ranks} is more than the {gpus} GPUs here, and each rank has one: lower it to "
            f"{most_ranks(spec, gpus)}"
        )
    if sampling > gpus:
        raise InputError(
            f"engines.rollout_engines={engines.rollout_engines} of tensor_parallel_size={engines.tensor_parallel_size} "
            f"need {sampling} GPUs, and there are {gpus}: lower one of them"
        )


def check_reward_gpus(spec: FlowSpec, gpus: int) -> None:
    """Raise InputError where this machine, with so many GPUs, has fewer than a reward model needs.

    The engine that scores is here, wherever the others are. On CPUs any number of ranks goes.
    """
    for reward in spec.reward_models:
        if reward.device == "cuda" and not gpus:
            raise InputError(
                f"the reward {reward.component} asks for device=cuda, and there is no GPU here: set it to cpu, or to "
                "auto, which takes a GPU where there is one"
            )
        if reward.device != "cpu" and 0 < gpus < reward.num_ranks:
            raise InputError(
                f"num_ranks={reward.num_ranks} of the reward {reward.component} is more than the {gpus} GPUs here, and "
                f"each rank has one: lower it to {gpus}, or set its device to cpu"
            )
