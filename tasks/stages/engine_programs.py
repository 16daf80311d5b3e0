"""The engines' programs: what an engine is started with, on whatever machine it is started."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from infra.artifacts.fingerprint import code_fingerprint
from infra.engines.hardware import has_nvidia_gpu, quota_cores, usable_cores
from infra.engines.process import EngineProcess
from infra.settings import Settings, reward_environment, visible_gpus
from ppo_core import records
from ppo_core.records import InputError, Sharing
from ppo_core.spec.flow_spec import FlowSpec

PROGRAMS = {role: f"ppo_core.engines.{role}" for role in ("rollout", "training", "scoring")}

# Where gloo, nccl and vLLM would else take the address that the machine's name or its way out has.
ON_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1"}


@dataclass(frozen=True)
class EnginePlan:
    """Plain data that `launch` makes an engine of. `role` names the program, `name` the engine and its log.

    `gpus` are those that it sees of the ones that its machine shows us; None: all. `accompanied`: another engine works
    at the same time; `takes_turns`: another one has the GPUs when this one waits. `deterministic` is for rollout
    engines, which cannot change it later; jobs tell the training engine.
    """

    role: str
    name: str
    num_ranks: int = 1
    deterministic: bool = False
    gpus: tuple[int, ...] | None = None
    accompanied: bool = False
    takes_turns: bool = False
    offload_reference: bool = False


def plan_engines(spec: FlowSpec) -> dict[str, EnginePlan]:
    """The engines of a flow by name."""
    deterministic, names = spec.engines.deterministic, rollout_names(spec)
    accompanied, gpus = spec.engines_overlap or len(names) > 1, len(visible_gpus())
    in_turns = sharing_of(spec, gpus) == "turns"
    rollout = [
        EnginePlan(
            "rollout",
            name,
            deterministic=deterministic,
            gpus=_share(spec, number, gpus),
            accompanied=accompanied,
            takes_turns=in_turns,
        )
        for number, name in enumerate(names)
    ]
    training = EnginePlan(
        "training",
        "training",
        num_ranks=spec.training.num_ranks,
        accompanied=spec.engines_overlap,
        offload_reference=spec.engines.offload_reference,
    )
    scoring = EnginePlan("scoring", "scoring", takes_turns=in_turns and rewards_on_gpu(spec, gpus))
    plans = (scoring, training, *rollout)
    return {plan.name: plan for plan in plans if plan.role in spec.roles}


def rollout_names(spec: FlowSpec) -> list[str]:
    """The names of the rollout engines: rollout, rollout-2, rollout-3, …"""
    return ["rollout", *(f"rollout-{number}" for number in range(2, spec.engines.rollout_engines + 1))]


def sharing_of(spec: FlowSpec, gpus: int) -> Sharing:
    """How the engines of a flow have this machine's GPUs, of which there are so many."""
    engines, placement = spec.engines, spec.engines.placement
    both = {"rollout", "training"} <= set(spec.roles) and engines.backend != "ray"
    if both and placement == "together":
        return "turns"
    if gpus >= spec.training.num_ranks + engines.rollout_engines * engines.tensor_parallel_size:
        return "own"
    return "turns" if both and placement == "auto" and gpus and not spec.engines_overlap else "same"


def rewards_on_gpu(spec: FlowSpec, gpus: int) -> bool:
    """Whether reward models compute on this machine's GPUs, of which there are so many."""
    return gpus > 0 and any(reward.device != "cpu" for reward in spec.reward_models)


def _share(spec: FlowSpec, number: int, gpus: int) -> tuple[int, ...] | None:
    """The GPUs of a rollout engine: those after the training engine's, where they have their own. Ray gives them out by
    itself."""
    size, own = spec.engines.tensor_parallel_size, sharing_of(spec, gpus) == "own" and "training" in spec.roles
    if spec.engines.backend == "ray" or (spec.engines.rollout_engines == 1 and not own):
        return None
    first = number * size + (spec.training.num_ranks if own else 0)
    return tuple(range(first, first + size))


def launch(plan: EnginePlan, settings: Settings, logs: Path, *, called: str | None = None) -> EngineProcess:
    """An engine that is not started yet, for the machine that this runs on."""
    return EngineProcess(
        called or plan.name,
        PROGRAMS[plan.role],
        log=logs / f"{plan.name}.log",
        environment=_environment(plan, settings),
        command=_command(plan, settings),
    )


def _command(plan: EnginePlan, settings: Settings) -> list[str]:
    """With what the owner of this machine permits; the scoring engine runs the user's code, the others models' code."""
    trusted = ["--trust-remote-code"] if settings.trust_remote_code else []
    if plan.role == "training":
        offload = ["--offload-reference"] if plan.offload_reference else []
        return [*training_command(plan.num_ranks), *trusted, *offload]
    permitted = scoring_permissions(settings) if plan.role == "scoring" else []
    turns = ["--take-turns"] if plan.role == "rollout" and plan.takes_turns else []
    return [sys.executable, "-m", PROGRAMS[plan.role], *permitted, *trusted, *turns]


def scoring_permissions(settings: Settings) -> list[str]:
    """What the owner of this machine permits user code, as `ppo_core.processes.permissions` reads it."""
    generated = ["--run-generated-code"] if settings.run_generated_code else []
    servers = [f"--reward-url={url}" for url in settings.reward_urls]
    return [*(f"--plugins={place}" for place in settings.plugins), *servers, *generated]


def launch_on_node(node: str, *, plan: EnginePlan, run: str, threads: int | None) -> EngineProcess:
    """The same on a node of a cluster, by that node's own settings but for `threads`; messages name the node.

    Ray lets an actor have one thread; an engine may have as many as there are, as elsewhere. On CPU the last bits of
    an update depend on how many, so what the flow says goes for all nodes.
    """
    settings = Settings()
    settings = settings.model_copy(update={"engine_threads": threads or settings.engine_threads or usable_cores()})
    return launch(plan, settings, settings.log_folder(run), called=f"{plan.name} on {node}")


def code_facts(role: str) -> dict[str, str]:
    """What must be the same on all machines of a run: cache keys speak for the code of the machine that makes them."""
    engine, ours = Path(inspect.getfile(records)).parents[1], Path(__file__).parents[1]
    return {
        "python": ".".join(str(number) for number in sys.version_info[:2]),
        "engine's code": code_fingerprint(PROGRAMS[role], engine)[:12],
        "jobs' code": code_fingerprint("tasks.stages.jobs", ours)[:12],
    }


def _environment(plan: EnginePlan, settings: Settings) -> Mapping[str, str]:
    if plan.role == "rollout":
        return rollout_environment(
            settings, deterministic=plan.deterministic, gpus=plan.gpus, accompanied=plan.accompanied
        )
    if plan.role == "training":
        return training_environment(settings, num_ranks=plan.num_ranks, accompanied=plan.accompanied)
    return scoring_environment(settings)


def quiet(settings: Settings, *, wait: str | None = "passive") -> dict[str, str]:
    """What every engine gets: no telemetry, no socket but on loopback (all processes of an engine are on one machine),
    and threads that sleep while they wait: where engines overlap, spinning ones slow each other fivefold."""
    number = settings.engine_threads or (usable_cores() if quota_cores() else None)
    threads = {"OMP_NUM_THREADS": str(number)} if number else {}
    return {
        **ON_LOOPBACK,
        **({"OMP_WAIT_POLICY": wait} if wait else {}),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "DO_NOT_TRACK": "1",
        **threads,
    }


def scoring_environment(settings: Settings) -> dict[str, str]:
    """With the variables that this machine's owner passes on to reward functions.

    Raises InputError where one of them is not set.
    """
    passed = reward_environment(settings.reward_env)
    if missing := [name for name in settings.reward_env if name not in passed]:
        raise InputError(
            f"PPOFLOW_REWARD_ENV names {', '.join(missing)}, which is not set here: export it where ppoflow runs, or "
            "take it out of the list"
        )
    return {**passed, **quiet(settings)}


ONE_THREAD_PER_TOKENIZER = {"TOKENIZERS_PARALLELISM": "false"}
"""Of engines that fork and tokenize little. The scoring engine tokenizes whole data sets, on all cores."""


def rollout_environment(
    settings: Settings,
    *,
    deterministic: bool = False,
    gpus: tuple[int, ...] | None = None,
    accompanied: bool = False,
) -> dict[str, str]:
    """vLLM's switches: on CPU its core lives in the engine's own process and nothing is compiled."""
    common = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        **quiet(settings, wait=_waiting(settings, accompanied=accompanied)),
        **ONE_THREAD_PER_TOKENIZER,
    }
    if has_nvidia_gpu():
        names = dict(enumerate(visible_gpus()))
        seen = {} if gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(names.get(i, str(i)) for i in gpus)}
        return {**common, **seen, **({"VLLM_BATCH_INVARIANT": "1"} if deterministic else {})}
    switches = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCH_COMPILE_DISABLE": "1"}
    # Else vLLM cuts long contexts by the size of the batch, and logprobs depend in their last bits on the company.
    return {**common, **switches, "VLLM_CPU_ATTN_SPLIT_KV": "0"}


def training_environment(settings: Settings, *, num_ranks: int, accompanied: bool = False) -> dict[str, str]:
    """What DeepSpeed's first rank must find, launcher or not; it starts the other ranks itself."""
    return {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(num_ranks),
        "TRANSFORMERS_VERBOSITY": "error",
        # glibc otherwise gives each thread a heap that keeps what it freed: 16 % more memory in an update of 27M.
        "MALLOC_ARENA_MAX": "1",
        # oneDNN, which multiplies in bf16 on CPUs, keeps half a MiB for each of the last 1024 shapes of its products,
        # and every microbatch has another number of tokens. To make one again takes a third of a millisecond.
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
        **ONE_THREAD_PER_TOKENIZER,
        **quiet(settings, wait=_waiting(settings, accompanied=accompanied or num_ranks > 1)),
        # Torch asks for it before it makes cuBLAS deterministic, and any job may say so: one that replays updates has
        # the setting of their time. It costs a GPU a few MiB; without one nothing reads it.
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }


def _waiting(settings: Settings, *, accompanied: bool) -> str | None:
    """How an engine's threads wait: in OpenMP's own way, a short spin before they sleep, where the cores are theirs.

    At a million parameters that is a fifth to a third faster, in updates and in sampling. Other ranks, and engines that
    work at the same time, want the cores.
    """
    return settings.engine_wait_policy or ("passive" if accompanied else None)


def training_command(num_ranks: int) -> list[str]:
    """The training engine's command line."""
    return [sys.executable, "-m", PROGRAMS["training"], "--num-ranks", str(num_ranks)]
