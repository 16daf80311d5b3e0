"""The training engine's own jobs on a made-up model and made-up rollouts, in this process; one line of JSON.

    python -m benchmarks.training_jobs SHAPE [--iterations 3] [--tokens 4096] [--compute-dtype auto] [--wait]

It needs torch, transformers, deepspeed, safetensors, pydantic and pyarrow, and no more, so that it runs on a bare
machine with a GPU. `benchmarks.update`, `scaling` and `gpu` compare several of these side by side.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.report import machine
from benchmarks.shapes import PROMPT, SHAPES, Shape, flop_of, write_rollouts_and_scores, write_tokenizer

OF_SHAPES = ("vocabulary", "responses", "shortest", "longest")


def measure(
    shape: Shape,
    *,
    iterations: int,
    training: dict[str, Any],
    dtype: str,
    threads: int | None = None,
    begun: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Seconds and useful FLOP of experience and update, medians without the first iteration, and memory.

    `begun` is called before the first, with the model and rollouts on the disk.
    """
    from benchmarks.matmul import matmul_rate
    from ppo_core.models.precision import products_in_bf16

    products = "bfloat16" if products_in_bf16(training["compute_dtype"], shape.config["hidden_size"]) else dtype
    engine = open_engine(training["num_ranks"], threads)
    try:
        with tempfile.TemporaryDirectory() as folder:
            work = Work(engine, Path(folder), shape, training, dtype)
            work.start()
            begun()
            rounds, rates = list[dict[str, float]](), list[float]()
            for number in range(iterations + 1):
                rounds.append(work.iterate(number))
                # On the threads that were at work: how many cores each may use is set for good.
                used = len(engine.learner.trainables["policy"].modules)
                rates.append(sum(engine.ranks.threads.map(lambda *_: matmul_rate(products), [None] * used)))
    finally:
        engine.ranks.dismiss()
    tokens, flop = sum(work.lengths), flop_of(shape, work.parameters, work.lengths)
    seconds = {name: statistics.median(one[name] for one in rounds[1:]) for name in rounds[0]}
    speed = {name: [flop[name] / one[name] for one in rounds[1:]] for name in flop}
    return {
        "tokens": tokens,
        "all_tokens": tokens + PROMPT * len(work.lengths),
        "seconds": seconds,
        "tokens_per_second": {name: tokens / spent for name, spent in seconds.items()},
        "useful_flop_per_second": {name: statistics.median(each) for name, each in speed.items()},
        "useful_flop_over_matmul_rate": {
            name: statistics.median(ours / rate for ours, rate in zip(each, rates[1:], strict=True))
            for name, each in speed.items()
        },
        "matmul_gflops": statistics.median(rates[1:]) / 1e9,
        "parameters": work.parameters,
        "memory_mib": {
            "idle": work.idle,
            "experience_above_idle": work.experience_peak - work.idle,
            "update_above_idle": work.peak - work.idle,
        },
        "machine": machine(),
    }


def open_engine(num_ranks: int, threads: int | None = None) -> Any:
    """Rank 0 in this process; the others start as in a run, and wait for its jobs. `threads` are of a single rank."""
    if num_ranks > 1 and threads:
        raise ValueError(f"threads={threads} and ranks={num_ranks}: set OMP_NUM_THREADS, which every rank sees")
    from ppo_core.processes.ranks import Ranks, open_meeting, start_other_ranks

    meeting = open_meeting() if num_ranks > 1 else None
    children = [] if meeting is None else start_other_ranks("ppo_core.engines.training", num_ranks, meeting)
    from ppo_core.processes.threads import Threads
    from ppo_core.training.service import TrainingEngine

    return TrainingEngine(Ranks(0, num_ranks, children, meeting, Threads(threads) if threads else Threads.of_machine()))


class Work:
    """Jobs in the order of a run's iterations. On the disk are the start and the last policy.

    `idle` is the memory in MiB with the networks, the reference and the optimizer held, before the first update; `peak`
    the highest in any update, `experience_peak` in any computing of advantages after the first.
    """

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
        self.idle = self.peak = self.experience_peak = 0.0

    def start(self) -> None:
        """Checkpoint 0, rollouts and scores."""
        write_tokenizer(self.shape.vocabulary, self.folder / "tokenizer")
        inputs = {"dataset": self.folder, "tokenizer": self.folder / "tokenizer"}
        made = self._do("start_policy", inputs, self.checkpoint, {"seed": 0, "model": self.model})
        self.parameters = made["num_parameters"]
        self.lengths = write_rollouts_and_scores(self.shape, self.folder)

    def iterate(self, number: int) -> dict[str, float]:
        """Experience, and the update on it; `steps` is the update without loading and writing."""
        began = time.perf_counter()
        with watched() as peak:
            experience = self.compute_advantages(number)
        computed = time.perf_counter()
        if number == 0:
            self.idle = idle_mib()
        else:  # the first loads the models
            self.experience_peak = max(self.experience_peak, *peak)
        updating = time.perf_counter()
        after, ticks = self.folder / f"checkpoint{number}", list[float]()
        # The engine holds what it goes on from: nothing reads an optimizer of a billion parameters on the disk.
        spec = {**self._job(), "seed": 0, "iteration": number, "update": self.update, "full": False}
        with watched() as peak:
            self._do("update_policy", {"checkpoint": self.checkpoint, "experience": experience}, after, spec, ticks)
        ended, self.peak = time.perf_counter(), max(self.peak, *peak)
        for used in (experience, *([] if number == 0 else [self.checkpoint])):
            shutil.rmtree(used)  # the start stays: it is the reference
        self.checkpoint = after
        # The first step has no tick before it: as long as the others.
        steps = (ticks[-1] - ticks[0]) * len(ticks) / max(len(ticks) - 1, 1)
        return {"experience": computed - began, "update": ended - updating, "steps": steps}

    def compute_advantages(self, number: int) -> Path:
        """The folder of the experience that the checkpoint makes of the rollouts."""
        from ppo_core.records import OptimizerSettings
        from ppo_core.spec import UpdateSpec

        optimizer = OptimizerSettings.of(UpdateSpec.model_validate(self.update)).model_dump(mode="json")
        inputs = {
            "checkpoint": self.checkpoint,
            "reference": self.folder / "start",
            "rollouts": self.folder,
            "scores": self.folder,
        }
        spec = {**self._job(), "advantages": {}, "optimizer": optimizer, "kl_coef": 0.01}
        spec["max_response_tokens"] = max(self.lengths)
        self._do("compute_advantages", inputs, experience := self.folder / f"experience{number}", spec)
        return experience

    def _job(self) -> dict[str, Any]:
        return {"model": self.model, "training": self.training, "temperature": 1.0}

    def _do(
        self, name: str, inputs: dict[str, Path], output: Path, spec: dict[str, Any], ticks: list[float] | None = None
    ) -> dict[str, Any]:
        from benchmarks.matmul import synchronize
        from ppo_core.processes.protocol import Job, JobInput
        from ppo_core.processes.ranks import leading

        output.mkdir()
        given = {key: JobInput(path, str(path)) for key, path in inputs.items()}

        def tick(*_: Any) -> None:
            if ticks is not None:
                ticks.append(time.perf_counter())

        made: dict[str, Any] = leading(self.engine, name)(Job(name, given, output, spec, tick))
        synchronize()
        return made


def memory_mib() -> float:
    """Resident memory of this process, or what torch has of the GPU."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.memory_allocated() / 2**20
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def idle_mib() -> float:
    """The same of what is in use: without what is free and not given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return memory_mib()


@contextmanager
def watched() -> Iterator[list[float]]:
    """The highest memory meanwhile, in the list's one entry: of a GPU torch's count, else a hundred looks a second."""
    import torch

    peak, ended = [memory_mib()], threading.Event()

    def watch() -> None:
        while not ended.wait(0.01):
            peak[0] = max(peak[0], memory_mib())

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        yield peak
        peak[0] = torch.cuda.max_memory_allocated() / 2**20
        return
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        ended.set()
        thread.join()


def wait_for_a_line() -> None:
    """Say that the model is made, and wait for a line on the standard input: others may be measured first."""
    print("ready", flush=True)
    if not sys.stdin.readline():
        raise SystemExit("whoever started this has ended")


def main() -> None:
    """One shape, one setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--tokens", type=int, help="in a microbatch, at most")
    parser.add_argument("--compute-dtype", choices=["auto", "float32", "bfloat16"], default="float32")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--zero-stage", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--threads", type=int, help="that share rows; else as the engine chooses")
    parser.add_argument("--wait", action="store_true", help="before the first iteration say so, and wait for a line")
    for name in OF_SHAPES:
        parser.add_argument(f"--{name}", type=int, help="another than the shape's")
    given = parser.parse_args()
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(given.ranks)}
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    changes = {name: vars(given)[name] for name in OF_SHAPES if vars(given)[name] is not None}
    training = {
        "microbatch_tokens": given.tokens,
        "compute_dtype": given.compute_dtype,
        "zero_stage": given.zero_stage,
        "num_ranks": given.ranks,
    }
    shape = replace(SHAPES[given.shape], **changes)
    settings = {"iterations": given.iterations, "training": training, "dtype": given.dtype, "threads": given.threads}
    if given.wait:
        settings["begun"] = wait_for_a_line
    print(json.dumps(measure(shape, **settings)), flush=True)


if __name__ == "__main__":
    main()
