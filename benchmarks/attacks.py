"""A run of PPO or DPO under attack: which process dies at which moment, and what is there afterwards."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from infra.artifacts import ArtifactError, open_store
from infra.backend import open_collector
from tasks.stages import holding

ROOT = Path(__file__).parents[1]
RUN = "chaos"
DEADLINE_S = 1200.0
ORPHANS_S = 60.0
POLL_S, WRITING_S = 0.01, 0.002
"""How often a stage is looked for, and an artifact that is being written, which takes milliseconds."""
IN_SHARED_MEMORY = re.compile(r"/dev/shm/(\S+)")


class Moment(NamedTuple):
    """While an artifact of a kind is being made (without one: of any kind, while it is written): who is struck then,
    and at most how long after its beginning; with `after` only once there is one of that kind.

    With `first` before the run has a record, so before all others.
    """

    kind: str | None
    victims: tuple[str, ...]
    longest_delay_s: float
    after: str | None = None
    first: bool = False


class Flow(NamedTuple):
    """What is attacked. `lease` is the name that it holds while it works, `progress` the files that it is measured by.

    With `once` its moments come one after the other, each once; else again and again.
    """

    command: str
    spec: Path
    lease: str
    progress: str
    moments: Mapping[str, Moment]
    once: bool = False


MID_WRITE = Moment(None, ("flow",), 0.01)
TRAINING = Flow(
    "train",
    ROOT / "examples/arithmetic/smoke.yaml",
    RUN,
    f"runs/{RUN}/iterations/*.json",
    {
        "finetune": Moment("model", ("flow", "training", "rank 1"), 4.0, first=True),
        "generate": Moment("rollouts", ("flow", "rollout"), 0.2),
        "score": Moment("scores", ("flow", "scoring"), 0.02),
        "advantages": Moment("experience", ("flow", "training", "rank 1"), 0.1),
        "update": Moment("checkpoint", ("flow", "training", "rank 1"), 0.4),
        "evaluate": Moment("evaluation", ("flow", "scoring"), 0.02),
        "mid-write": MID_WRITE,
    },
)
DPO = Flow(
    "dpo",
    ROOT / "examples/helpful/dpo.yaml",
    holding.lease_name(holding.DPO, RUN),
    "*/*/manifest.json",
    {
        "finetune": Moment("model", ("flow", "training", "rank 1"), 4.0),
        "mid-write": MID_WRITE,
        "answer": Moment("rollouts", ("flow", "rollout"), 0.2),
        "evaluate": Moment("evaluation", ("flow", "scoring"), 0.02),
        "train": Moment("dpo_policy", ("flow", "training", "rank 1"), 8.0),
        "answer again": Moment("rollouts", ("flow", "rollout"), 0.2, after="dpo_policy"),
        "evaluate again": Moment("evaluation", ("flow", "scoring"), 0.02, after="dpo_policy"),
    },
    once=True,
)


@dataclass(frozen=True)
class Attack:
    """One kill: `victim` is flow, rollout, training, rank 1 or scoring; `how` is kill (SIGKILL) or stop (it hangs)."""

    victim: str
    moment: str
    how: str = "kill"


@dataclass(frozen=True)
class Outcome:
    """What an attack did. `iteration`: number of records (of DPO: artifacts) then; `recovered_s`: until one more."""

    attack: Attack
    iteration: int
    recovered_s: float
    orphans: int
    half_artifacts: int

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {**asdict(self.attack), **{k: v for k, v in asdict(self).items() if k != "attack"}}


class Victim:
    """A run that is started again whenever it dies, until it is done."""

    def __init__(self, home: Path, options: list[str], flow: Flow = TRAINING) -> None:
        self.home, self.options, self.flow = home, options, flow
        self.store = home / "store"
        self.starts = 0
        self.process = self._start()

    def ended(self) -> bool:
        """Whether the run is done; one that died or failed is started again."""
        status = self.process.poll()
        if status is not None and status != 0:
            self.process = self._start()
        return status == 0

    def suffer(self, attack: Attack, delay_s: float) -> Outcome | None:
        """Wait for the moment, strike, and wait until the run has got over it; None where it was done before."""
        while True:
            if not self._wait_for(attack.moment):
                return None
            time.sleep(delay_s)
            struck = [process for process in self.processes() if role_of(process) == attack.victim]
            if struck:
                break
        before, shared_memory, started = self.committed(), set(os.listdir("/dev/shm")), time.monotonic()
        for process in struck:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL if attack.how == "kill" else signal.SIGSTOP)
        orphans = self._orphans(shared_memory) if attack.victim == "flow" else 0
        half = self.half_artifacts() if attack.victim == "flow" else 0
        self._wait_for_commit(before)
        return Outcome(attack, before, time.monotonic() - started, orphans, half)

    def committed(self) -> int:
        """Number of records, or of artifacts of a flow without."""
        return len(list(self.store.glob(self.flow.progress)))

    def processes(self) -> Iterator[psutil.Process]:
        """Every live process of the run."""
        for process in psutil.process_iter():
            try:
                ours = process.environ().get("PPOFLOW_HOME") == str(self.home)
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    yield process
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue

    def half_artifacts(self) -> int:
        """Artifacts in the store that are not whole, byte for byte."""
        store = open_store(self.store)
        return sum(not is_whole(store, found.kind, found.key) for found in open_collector(self.store).artifacts())

    def finish(self) -> None:
        """Run to the end."""
        deadline = time.monotonic() + DEADLINE_S
        while not self.ended():
            require(time.monotonic() < deadline, f"the run is not done after {DEADLINE_S} s; see {self.home}/run.log")
            time.sleep(0.05)

    def _start(self) -> subprocess.Popen[bytes]:
        self.starts += 1
        self.home.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "flows.cli", self.flow.command, str(self.flow.spec), "--run", RUN]
        with (self.home / "run.log").open("ab") as log:
            return subprocess.Popen(
                ["env", f"PPOFLOW_HOME={self.home}", *command, *self.options],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _wait_for(self, moment: str) -> bool:
        deadline = time.monotonic() + DEADLINE_S
        while not self._at(moment):
            if self.ended():
                return False
            require(time.monotonic() < deadline, f"{moment} not within {DEADLINE_S} s; see {self.home}/run.log")
            time.sleep(POLL_S if self.flow.moments[moment].kind else WRITING_S)
        return True

    def _at(self, moment: str) -> bool:
        """Whether a stage is under way: what it makes is pinned and not yet in the store."""
        kind, _, _, after, first = self.flow.moments[moment]
        if self.committed() == 0 and not first:
            return False
        if after is not None and not any((self.store / after).glob("*")):
            return False
        if kind is None:
            return any(self.store.glob("scratch/*/stats.json")) or any(self.store.glob("scratch/*/manifest*"))
        pins = self.store.glob(f"runs/{self.flow.lease}/leases/*/pins/{kind}.*")
        names = [pin.name.partition(".") for pin in pins if not pin.parent.parent.name.endswith(".ended")]
        return any(not (self.store / kind / key).exists() for kind, _, key in names)

    def _wait_for_commit(self, before: int) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while self.committed() <= before and not self.ended():
            require(time.monotonic() < deadline, f"no commit within {DEADLINE_S} s; see {self.home}/run.log")
            time.sleep(0.02)

    def _orphans(self, shared_memory: set[str]) -> int:
        """What a dead flow process leaves behind: processes, and shared memory that was not there before."""
        deadline = time.monotonic() + ORPHANS_S
        self.process.wait()
        while (left := self._left_behind(shared_memory)) and time.monotonic() < deadline:
            time.sleep(0.02)
        return left

    def _left_behind(self, shared_memory: set[str]) -> int:
        return len(list(self.processes())) + len(held_by_nobody(set(os.listdir("/dev/shm")) - shared_memory))


def held_by_nobody(shared_memory: set[str]) -> set[str]:
    """What no process uses: other runs of this machine have shared memory too, and come and go as they like."""
    held: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps") if shared_memory else ():
        with suppress(OSError):
            held |= set(IN_SHARED_MEMORY.findall(maps.read_text(errors="replace")))
    return shared_memory - held


def role_of(process: psutil.Process) -> str:
    """What a process of a run is: flow, an engine's name, `rank N`, or else its name."""
    try:
        line = process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return "gone"
    if "flows.cli" in line and {TRAINING.command, DPO.command} & set(line):
        return "flow"
    if line[1:2] == ["-m"] and line[2].startswith("ppo_core.engines."):
        return f"rank {line[line.index('--rank') + 1]}" if "--rank" in line else line[2].rpartition(".")[2]
    return process.name()


def is_whole(store: Any, kind: str, key: str) -> bool:
    """Whether an artifact passes every check."""
    try:
        ref = store.find(kind, key)
        return ref is not None and store.fetch(ref) is not None
    except ArtifactError:
        return False


def policies(store: Path) -> list[str]:
    """sha256 of the policy's weights at every iteration of the run."""
    digests = []
    for path in sorted((store / "runs" / RUN / "iterations").glob("*.json")):
        made = json.loads(path.read_text())["artifacts"].values()
        key = next(ref["uri"] for ref in made if ref["kind"] == "checkpoint").rpartition("/")[2]
        weights = (store / "checkpoint" / key / "policy" / "model.safetensors").read_bytes()
        digests.append(hashlib.sha256(weights).hexdigest())
    return digests


def made(store: Path) -> list[str]:
    """What a flow without iterations made: every file of its artifacts, with its sha256."""
    manifests = {path.parent: json.loads(path.read_text())["files"] for path in store.glob("*/*/manifest.json")}
    return sorted(
        f"{folder.relative_to(store)}/{name} {file['sha256']}"
        for folder, files in manifests.items()
        for name, file in files.items()
    )


def delay(attack: Attack, random_numbers: random.Random, flow: Flow = TRAINING) -> float:
    """How long after the beginning of its stage an attack strikes."""
    return random_numbers.uniform(0.0, flow.moments[attack.moment].longest_delay_s)


def require(held: bool, complaint: str) -> None:
    """Raise RuntimeError unless something held."""
    if not held:
        raise RuntimeError(complaint)
