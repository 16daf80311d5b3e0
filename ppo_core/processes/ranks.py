"""Ranks of one program: rank 0 serves jobs, the others do the same work on their share of the rows."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ppo_core.processes.protocol import EngineDefect, Handler, Job, JobInput
from ppo_core.processes.threads import Threads
from ppo_core.records import InputError

IDLE = datetime.timedelta(days=365)
BUCKET = 500_000_000
"""Gradients that are averaged over ranks together, at most: DeepSpeed's own."""


@dataclass
class Ranks:
    """This process's place among `world_size`; small messages go through gloo on the CPU on every kind of machine.

    Several ranks meet in the file of the descriptor `meeting`, see `open_meeting`. `kind` is what messages call a rank.
    """

    rank: int
    world_size: int
    children: list[subprocess.Popen[bytes]] = field(default_factory=list)
    meeting: int | None = None
    threads: Threads = field(default_factory=Threads)
    dismissed: bool = False
    kind: str = "training"

    def __post_init__(self) -> None:
        if self.world_size > 1:
            self._end_with_children()  # also one that never comes to the meeting
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        if torch.cuda.is_available():
            torch.cuda.set_device(self.rank % torch.cuda.device_count())
        store = _store(self.world_size, self.meeting)
        # The others wait idle for jobs.
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.world_size, timeout=IDLE)
        self.control = dist.new_group(backend="gloo", timeout=IDLE)

    @property
    def is_first(self) -> bool:
        """Whether this rank reads jobs and writes files."""
        return self.rank == 0

    def require(self, num_ranks: int) -> None:
        """Raise InputError for a job that says another number of ranks: they round otherwise than its key tells."""
        if num_ranks != self.world_size:
            raise InputError(
                f"the job says training.num_ranks={num_ranks}, but this engine was started with {self.world_size}, "
                f"which would round otherwise: start an engine for it, with --num-ranks {num_ranks}"
            )

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, on the CPU. Exact where all but one rank hold zeros."""
        total = tensor.detach().cpu().contiguous()
        if self.world_size > 1:
            dist.all_reduce(total, group=self.control)
        return total

    def largest(self, value: float) -> float:
        """Maximum over ranks."""
        tensor = torch.tensor(value, dtype=torch.float64)
        if self.world_size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.control)
        return float(tensor)

    def broadcast(self, document: Any = None) -> Any:
        """Rank 0's JSON document on every rank."""
        if self.world_size == 1:
            return document
        texts = [json.dumps(document) if self.is_first else None]
        dist.broadcast_object_list(texts, src=0, group=self.control)
        return json.loads(str(texts[0]))

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        if self.world_size > 1:
            dist.barrier(group=self.control)

    @contextmanager
    def first_alone(self) -> Iterator[None]:
        """Around reading files: rank 0 does it before the others, so that what it refuses ends no other rank."""
        if not self.is_first:
            self.barrier()
        yield
        if self.is_first:
            self.barrier()

    def check_children(self) -> None:
        """Raise EngineDefect when another rank has ended: the engine must start anew."""
        for rank, child in enumerate(self.children, 1):
            if child.poll() is not None:
                raise EngineDefect(f"{self.kind} rank {rank} of {self.world_size} ended with status {child.returncode}")

    def _end_with_children(self) -> None:
        """From now on end this process when another rank ends: a collective call could wait for it for ever."""
        for rank, child in enumerate(self.children, 1):
            threading.Thread(target=self._end_with, args=(rank, child), daemon=True, name=f"rank-{rank}").start()

    def _end_with(self, rank: int, child: subprocess.Popen[bytes]) -> None:
        status = child.wait()
        if not self.dismissed:
            message = f"{self.kind} rank {rank} of {self.world_size} ended with status {status}"
            with suppress(OSError):  # of a full disk
                print(message, file=sys.stderr, flush=True)
            os._exit(1)

    def dismiss(self) -> None:
        """End the other ranks: after an error that perhaps not all of them saw, the next job needs a new engine."""
        self.dismissed = True
        for child in self.children:
            child.kill()
            child.wait()


@contextmanager
def first_rank_only() -> Iterator[None]:
    """Around work of rank 0 for which the others wait in a barrier: any error ends the engine, not the job alone."""
    try:
        yield
    except Exception as error:
        raise EngineDefect(f"{type(error).__name__}: {error}") from error


def open_meeting() -> int:
    """The descriptor of a file without a name, in memory, in which ranks tell one another where they are.

    torch's usual store listens on every address of the machine, and whoever reaches it reads and writes keys. This one
    can be opened by nobody who does not inherit it or may look into our processes, and ends with them.
    """
    descriptor = os.memfd_create("ranks")
    os.fchmod(descriptor, 0o600)
    return descriptor


def _store(world_size: int, meeting: int | None) -> dist.Store:
    if meeting is not None:
        return dist.FileStore(f"/proc/self/fd/{meeting}", world_size)
    if world_size > 1:
        raise ValueError(f"{world_size} ranks need a meeting: give each of them the descriptor of open_meeting()")
    return dist.HashStore()


def start_other_ranks(module: str, world_size: int, meeting: int, *options: str) -> list[subprocess.Popen[bytes]]:
    """Start ranks 1..N-1 of the program `module`; `env` adds their place to the environment they inherit."""
    program = [sys.executable, "-m", module, "--num-ranks", str(world_size), *options]
    return [
        subprocess.Popen(
            ["env", f"RANK={rank}", f"LOCAL_RANK={rank}", *program, "--rank", str(rank), "--meeting", str(meeting)],
            stdin=subprocess.DEVNULL,
            stdout=2,
            pass_fds=[meeting],
        )
        for rank in range(1, world_size)
    ]


class Follower(Protocol):
    """What does jobs on one rank, by the same handlers as on every other."""

    @property
    def ranks(self) -> Ranks: ...

    @property
    def handlers(self) -> Mapping[str, Handler]: ...


def leading(engine: Follower, name: str) -> Handler:
    """Rank 0's handler: tell the others, then do the own share."""

    def handle(job: Job) -> dict[str, Any]:
        engine.ranks.check_children()
        inputs = {key: [str(i.path), i.digest] for key, i in job.inputs.items()}
        try:
            engine.ranks.broadcast({"name": name, "inputs": inputs, "output": str(job.output), "spec": dict(job.spec)})
            return engine.handlers[name](job)
        except InputError:
            engine.ranks.dismiss()
            raise
        except EngineDefect:
            raise
        except Exception as error:
            # Collective calls may hang half way, and weights may have moved: only a new process is known to be sound.
            # There numbers that are not finite would come out the same again.
            retryable = not isinstance(error, FloatingPointError)
            raise EngineDefect(f"{type(error).__name__}: {error}", retryable=retryable) from error

    return handle


def follow(engine: Follower) -> NoReturn:
    """Do what rank 0 broadcasts, for ever; any error ends this rank, and so the engine.

    Also bad input: nothing says that rank 0 found it bad too, and it would wait for this rank in a collective call.
    """
    while True:
        document = engine.ranks.broadcast()
        inputs = {key: JobInput(Path(path), digest) for key, (path, digest) in document["inputs"].items()}
        job = Job(document["name"], inputs, Path(document["output"]), document["spec"], lambda *_: None)
        engine.handlers[job.name](job)
