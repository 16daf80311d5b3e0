"""The three engines of a run: which program, in which environment. Heavy ones start early, side by side."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from infra.engine_protocol import Engine, EngineJob, EngineJobError, EngineProgress, EngineReply
from infra.engines import EngineProcess
from infra.hardware import free_port, has_nvidia_gpu
from infra.settings import Settings
from ppo_core.records import InputError
from ppo_core.spec import RunSpec

PROGRAMS = {name: f"ppo_core.engines.{name}" for name in ("rollout", "training", "scoring")}


def ask(
    engine: Engine, job: EngineJob, *, silence_s: float, watch: Callable[[EngineProgress], None] | None = None
) -> EngineReply:
    """Have an engine do a job. Raises InputError (in the engine's words) for a user's mistake, else EngineError."""
    try:
        return engine.run(job, timeout_s=silence_s, on_progress=watch)
    except EngineJobError as error:
        if error.error_type == "InputError":
            raise InputError(error.reason) from None
        raise


class Engines:
    """Starts all engines at once and ends them together."""

    def __init__(self, spec: RunSpec, settings: Settings, logs: Path) -> None:
        self.by_name = {
            "rollout": EngineProcess(
                "rollout",
                PROGRAMS["rollout"],
                log=logs / "rollout.log",
                environment=rollout_environment(settings, deterministic=spec.engines.deterministic),
            ),
            "training": EngineProcess(
                "training",
                PROGRAMS["training"],
                log=logs / "training.log",
                environment=training_environment(spec, settings),
                command=training_command(spec),
            ),
            "scoring": EngineProcess(
                "scoring", PROGRAMS["scoring"], log=logs / "scoring.log", environment=quiet(settings)
            ),
        }

    def start(self) -> None:
        """Start them; they import while the caller goes on. The scoring engine is needed first."""
        for name in ("scoring", "training", "rollout"):
            self.by_name[name].start()

    def close(self) -> None:
        """End them and everything below them, all at once."""
        with ThreadPoolExecutor(len(self.by_name)) as pool:
            list(pool.map(EngineProcess.close, self.by_name.values()))


def quiet(settings: Settings) -> dict[str, str]:
    """What every engine gets: passive threads (spinning ones slow a shared machine fivefold), no telemetry."""
    threads = {"OMP_NUM_THREADS": str(settings.engine_threads)} if settings.engine_threads else {}
    return {
        "OMP_WAIT_POLICY": "passive",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "DO_NOT_TRACK": "1",
        **threads,
    }


def rollout_environment(settings: Settings, *, deterministic: bool = False) -> dict[str, str]:
    """vLLM's switches: on CPU its core lives in the engine's own process and nothing is compiled."""
    common = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING", **quiet(settings)}
    if has_nvidia_gpu():
        return {**common, **({"VLLM_BATCH_INVARIANT": "1"} if deterministic else {})}
    return {**common, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCH_COMPILE_DISABLE": "1"}


def training_environment(spec: RunSpec, settings: Settings) -> Mapping[str, str]:
    """What DeepSpeed's first rank must find, launcher or not; it starts the other ranks itself."""
    return {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(spec.training.num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "TRANSFORMERS_VERBOSITY": "error",
        # What torch asks for before it makes cuBLAS deterministic; without a GPU nothing reads it.
        **({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if spec.engines.deterministic else {}),
        **quiet(settings),
    }


def training_command(spec: RunSpec) -> list[str]:
    """The training engine's command line."""
    return [sys.executable, "-m", PROGRAMS["training"], "--num-ranks", str(spec.training.num_ranks)]
