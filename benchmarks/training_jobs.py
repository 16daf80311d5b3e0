"""The training engine's own jobs on a made-up model and made-up rollouts, in this process; one line of JSON.

    python -m benchmarks.training_jobs SHAPE [--iterations 3] [--tokens 4096] [--compute-dtype auto]

It needs torch, transformers, deepspeed, safetensors, pydantic and pyarrow, and no more, so that it runs on a bare
machine with a GPU. `benchmarks.training` compares several of these side by side.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.shapes import PROMPT, SHAPES, Shape, write_rollouts_and_scores, write_tokenizer


def measure(shape: Shape, *, iterations: int, training: dict[str, Any], dtype: str, threads: int = 0) -> dict[str, Any]:
    """Seconds and useful FLOP of experience and update, medians without the first iteration, and memory."""
    from ppo_core.training.ranks import Ranks
    from ppo_core.training.service import TrainingEngine
    from ppo_core.training.threads import Threads

    rate = matmul_rate(dtype)
    with tempfile.TemporaryDirectory() as folder:
        engine = TrainingEngine(Ranks(0, 1, threads=Threads(threads) if threads else Threads.of_machine()))
        work = Work(engine, Path(folder), shape, training, dtype)
        work.start()
        idle = memory_mib()
        with watched() as peak:
            rounds = [work.iterate(number) for number in range(iterations + 1)]
    tokens, flop = sum(work.lengths), flop_of(shape, work.parameters, work.lengths)
    seconds = {name: statistics.median(one[name] for one in rounds[1:]) for name in rounds[0]}
    return {
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": {name: tokens / spent for name, spent in seconds.items()},
        "useful_flop_over_matmul_rate": {
            name: flop["update" if name == "steps" else name] / seconds[name] / rate for name in ("experience", "steps")
        },
        "matmul_gflops": rate / 1e9,
        "parameters": work.parameters,
        "memory_mib": {"idle": idle, "peak_above_idle": peak[0] - idle},
        "machine": machine(),
    }


class Work:
    """Jobs in the order of a run's iterations."""

    def __init__(self, engine: Any, folder: Path, shape: Shape, training: dict[str, Any], dtype: str) -> None:
        from ppo_core.spec import TrainingSpec, UpdateSpec

        self.engine, self.folder, self.shape = engine, folder, shape
        self.model = {"config": shape.config, "tokenizer": "tokenizer", "dtype": dtype}
        self.training = TrainingSpec(**training).model_dump(mode="json")
        update = UpdateSpec(
            num_ppo_epochs=shape.epochs, num_minibatches=shape.minibatches, warmup_iterations=0, decay_iterations=1000
        )
        self.update = update.model_dump(mode="json")
        self.checkpoint, self.parameters, self.lengths = folder / "start", 0, list[int]()

    def start(self) -> None:
        """Checkpoint 0, rollouts and scores."""
        write_tokenizer(self.shape.vocabulary, self.folder / "tokenizer")
        inputs = {"dataset": self.folder, "tokenizer": self.folder / "tokenizer"}
        made = self._do("start_policy", inputs, self.checkpoint, {"seed": 0, "model": self.model})
        self.parameters = made["num_parameters"]
        self.lengths = write_rollouts_and_scores(self.shape, self.folder)

    def iterate(self, number: int) -> dict[str, float]:
        """Experience, and the update on it; `steps` is the update without loading and writing."""
        from ppo_core.records import OptimizerSettings
        from ppo_core.spec import UpdateSpec

        experience, after = self.folder / f"experience{number}", self.folder / f"checkpoint{number}"
        job = {"model": self.model, "training": self.training, "temperature": 1.0}
        optimizer = OptimizerSettings.of(UpdateSpec.model_validate(self.update)).model_dump(mode="json")
        inputs = {
            "checkpoint": self.checkpoint,
            "reference": self.folder / "start",
            "rollouts": self.folder,
            "scores": self.folder,
        }
        began = time.perf_counter()
        spec = {**job, "advantages": {}, "optimizer": optimizer, "kl_coef": 0.01}
        spec["max_response_tokens"] = max(self.lengths)
        self._do("compute_advantages", inputs, experience, spec)
        computed = time.perf_counter()
        spec = {**job, "seed": 0, "iteration": number, "update": self.update, "full": number == 0}
        ticks = list[float]()
        inputs = {"checkpoint": self.checkpoint, "experience": experience}
        self._do("update_policy", inputs, after, spec, ticks)
        self.checkpoint, ended = after, time.perf_counter()
        # The first step has no tick before it: as long as the others.
        steps = (ticks[-1] - ticks[0]) * len(ticks) / max(len(ticks) - 1, 1)
        return {"experience": computed - began, "update": ended - computed, "steps": steps}

    def _do(
        self, name: str, inputs: dict[str, Path], output: Path, spec: dict[str, Any], ticks: list[float] | None = None
    ) -> dict[str, Any]:
        from ppo_core.engines.protocol import Job, JobInput

        output.mkdir()
        given = {key: JobInput(path, path.name) for key, path in inputs.items()}

        def tick(*_: Any) -> None:
            if ticks is not None:
                ticks.append(time.perf_counter())

        made: dict[str, Any] = self.engine.handlers[name](Job(name, given, output, spec, tick))
        synchronize()
        return made


def flop_of(shape: Shape, parameters: int, lengths: list[int]) -> dict[str, float]:
    """Of real tokens alone: linear layers, causal attention, and the policy's head at response positions.

    A backward pass is two forward passes; nothing that is recomputed counts. `parameters` are the policy's.
    """
    hidden, layers = shape.config["hidden_size"], shape.config["num_hidden_layers"]
    linear = parameters - shape.vocabulary * hidden
    totals = [PROMPT + length for length in lengths]
    trunk = sum(2 * linear * total + 2 * total * total * hidden * layers for total in totals)
    policy, critic = trunk + 2 * sum(lengths) * hidden * shape.vocabulary, trunk
    return {"experience": 2 * policy + critic, "update": 3 * (policy + critic) * shape.epochs}


def matmul_rate(dtype: str, size: int = 2048) -> float:
    """FLOP/s of a large matrix product here: what no update can pass."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    size *= 4 if device == "cuda" else 1
    a = torch.randn(size, size, dtype=getattr(torch, dtype), device=device)
    times = []
    for _ in range(8):
        synchronize()
        began = time.perf_counter()
        a @ a
        synchronize()
        times.append(time.perf_counter() - began)
    return 2 * size**3 / statistics.median(times[2:])


def synchronize() -> None:
    """Wait for the GPU, where there is one."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def memory_mib() -> float:
    """Resident memory of this process, or what torch has reserved of the GPU."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_reserved() / 2**20
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@contextmanager
def watched() -> Iterator[list[float]]:
    """The highest memory meanwhile, looked at a hundred times a second, in the list's one entry."""
    peak, ended = [memory_mib()], threading.Event()

    def watch() -> None:
        while not ended.wait(0.01):
            peak[0] = max(peak[0], memory_mib())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        ended.set()
        thread.join()


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "gpu": gpu,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def main() -> None:
    """One shape, one setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--tokens", type=int, help="in a microbatch, at most")
    parser.add_argument("--compute-dtype", choices=["auto", "float32", "bfloat16"], default="float32")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--zero-stage", type=int, default=0)
    parser.add_argument("--threads", type=int, default=0, help="that share rows; 0: as the engine chooses")
    given = parser.parse_args()
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    print(
        json.dumps(
            measure(
                SHAPES[given.shape],
                iterations=given.iterations,
                training={
                    "microbatch_tokens": given.tokens,
                    "compute_dtype": given.compute_dtype,
                    "zero_stage": given.zero_stage,
                },
                dtype=given.dtype,
                threads=given.threads,
            )
        )
    )


if __name__ == "__main__":
    main()
