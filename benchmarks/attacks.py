"""A training run under attack: which process dies at which moment, and what is there afterwards."""

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
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from infra.artifacts import ArtifactError, open_store
from infra.backend import open_collector

ROOT = Path(__file__).parents[1]
SPEC = ROOT / "examples" / "arithmetic" / "smoke.yaml"
RUN = "chaos"
KINDS = {"generate": "rollouts", "score": "scores", "advantages": "experience", "update": "checkpoint"}
MOMENTS = (*KINDS, "mid-write")
LONGEST_DELAY_S = {"generate": 0.2, "score": 0.02, "advantages": 0.1, "update": 0.4, "mid-write": 0.01}
DEADLINE_S = 1200.0
ORPHANS_S = 60.0
POLL_S = 0.002
IN_SHARED_MEMORY = re.compile(r"/dev/shm/(\S+)")


@dataclass(frozen=True)
class Attack:
    """One kill: `victim` is flow, rollout, training, rank 1 or scoring; `how` is kill (SIGKILL) or stop (it hangs)."""

    victim: str
    moment: str
    how: str = "kill"


@dataclass(frozen=True)
class Outcome:
    """What an attack did. `recovered_s`: until the next iteration was committed."""

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

    def __init__(self, home: Path, options: list[str]) -> None:
        self.home, self.options = home, options
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
        """Number of records."""
        return len(list((self.store / "runs" / RUN / "iterations").glob("*.json")))

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
        command = [sys.executable, "-m", "flows.cli", "train", str(SPEC), "--run", RUN, *self.options]
        with (self.home / "run.log").open("ab") as log:
            return subprocess.Popen(
                ["env", f"PPOFLOW_HOME={self.home}", *command],
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
            time.sleep(POLL_S)
        return True

    def _at(self, moment: str) -> bool:
        """Whether a stage is under way: what it makes is pinned and not yet in the store."""
        if self.committed() == 0:
            return False
        if moment == "mid-write":
            return any(self.store.glob("scratch/*/stats.json")) or any(self.store.glob("scratch/*/manifest*"))
        pins = self.store.glob(f"runs/{RUN}/leases/*/pins/{KINDS[moment]}.*")
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
    if "flows.cli" in line and "train" in line:
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


def delay(attack: Attack, random_numbers: random.Random) -> float:
    """How long after the beginning of its stage an attack strikes."""
    return random_numbers.uniform(0.0, LONGEST_DELAY_S[attack.moment])


def require(held: bool, complaint: str) -> None:
    """Raise RuntimeError unless something held."""
    if not held:
        raise RuntimeError(complaint)
