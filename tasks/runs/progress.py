"""What a run is doing now, in a small file of its folder on this machine: for `ppoflow status` in another shell."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from infra.backend import open_leases
from infra.process_identity import ProcessIdentity, is_alive, this_process
from infra.runs.holder import holder_of
from infra.runs.owner import describe
from infra.settings import Settings
from tasks.stages.holding import DPO, REWARD_MODEL, RLHF, lease_name

FILE = "progress.json"
EVERY_S = 2.0


class Doing(BaseModel):
    """What a process does at the Unix time `at`; `to_go` is how long it takes yet, as far as that is known."""

    model_config = ConfigDict(frozen=True)

    process: ProcessIdentity
    at: float
    stage: str
    to_go: str = ""


class ProgressFile:
    """Written by the process that has the run, and gone when that ends. A file that cannot be written is no reason to
    end. Safe for several threads."""

    def __init__(self, run: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = progress_path(run)
        self._clock = clock
        self._process = this_process()
        self._written: float | None = None
        self._mutex = threading.Lock()

    def write(self, stage: str, to_go: str = "", *, at_once: bool = False) -> None:
        """Every few seconds at most, or `at_once`."""
        with self._mutex, suppress(OSError):
            now = self._clock()
            if not at_once and self._written is not None and now - self._written < EVERY_S:
                return
            self._written = now
            doing = Doing(process=self._process, at=time.time(), stage=stage, to_go=to_go)
            self._path.parent.mkdir(parents=True, exist_ok=True)
            partial = self._path.with_name(f".{FILE}-{self._process.pid}")
            partial.write_text(doing.model_dump_json())
            partial.replace(self._path)

    def remove(self) -> None:
        """Unless it is another process's."""
        with self._mutex, suppress(OSError):
            if self._whose() == self._process:
                self._path.unlink()

    def is_free(self) -> bool:
        """Whether no other process that lives has written it."""
        process = self._whose()
        return process is None or process == self._process or is_alive(process) is False

    def _whose(self) -> ProcessIdentity | None:
        doing = read_progress(self._path)
        return None if doing is None else doing.process


@contextmanager
def announced(run: str, stage: str) -> Iterator[None]:
    """While this process gets ready to take the run, `ppoflow status` says so, unless the run is another one's now.

    Folders that are made for that and are empty at the end are gone again.
    """
    file, folder, made = ProgressFile(run), progress_path(run).parent, []
    with suppress(OSError):
        made = [place for place in (folder, *folder.parents) if not place.exists()]
    if file.is_free():
        file.write(stage)
    try:
        yield
    finally:
        file.remove()
        with suppress(OSError):
            for place in made:
                place.rmdir()


def progress_path(run: str) -> Path:
    """Where the file of a run lies."""
    return Settings().run_folder(run) / FILE


def read_progress(path: Path) -> Doing | None:
    """What the file says; None where there is none that can be read."""
    try:
        return Doing.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None


def doing_now(run: str) -> list[str]:
    """What the process that has the run, or trains what it begins with, or is about to, does now, in lines; none where
    there is none."""
    root, doing = Settings().store_root, read_progress(progress_path(run))
    names = (run, *(lease_name(flow, run) for flow in (DPO, REWARD_MODEL, RLHF)))
    holders = {one.identity: one for name in names if (one := holder_of(open_leases(root, name))) is not None}
    if doing is None or not is_alive(doing.process) or (holders and doing.process not in holders):
        return [f"  at work            {describe(one)}; {elsewhere(run)}" for one in holders.values()]
    holder = holders.get(doing.process)
    since = describe(holder) if holder is not None else f"process {doing.process.pid} on {doing.process.host}"
    return [
        f"  doing now          {doing.stage} ({max(0.0, time.time() - doing.at):.0f} s ago)",
        *([f"  how long           {doing.to_go}"] if doing.to_go else []),
        f"  at work            {since}",
    ]


def elsewhere(run: str) -> str:
    """Where to ask, of a process whose file is not here."""
    return f"ppoflow status {run} says more there, with that process's PPOFLOW_HOME"
