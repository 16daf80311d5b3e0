"""Whole runs with toy engines, on a real store: trained, killed, gone on with, looked at and damaged."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from flows.console import RunConsole
from flows.iteration import Rerun
from flows.ppo import finish_interrupted, train_to_the_end
from infra.artifacts import ArtifactRef
from infra.runs.checksummed_json import CHECKSUM, encode
from infra.runs.local_records import LAST, last_document
from infra.runs.records import RecordError
from infra.storage.filesystem import FileSystem
from infra.storage.objects import StoreUnavailable
from ppo_core.spec import RunSpec
from tasks.runs.iteration_record import IterationRecord, read_record
from tasks.runs.reachability import Reachability
from tasks.runs.run_state import effective_spec
from tasks.stages.context import RunContext
from tasks.stages.engines import PROGRAMS
from tasks.stages.references import StageRef
from tests.tasks.run_contexts import QuickFiles, run_context, smoke_spec
from tests.tasks.toy_checkpoints import PARTS
from tests.tasks.toy_engines import Measures, ToyEngines, healthy
from tests.tasks.toy_tracker import ToyTracker


class Killed(BaseException):
    """The process ends here, without any last word."""


def killed() -> None:
    """As an act of an engine."""
    raise Killed


@contextmanager
def ended_well(context: RunContext) -> Iterator[RunContext]:
    """Release the run at the end, also after an error; but not where the process is killed."""
    assert context.lease is not None
    try:
        yield context
    except Exception:
        with suppress(StoreUnavailable):
            context.lease.release()
        raise
    context.lease.release()


@dataclass
class ToyRun:
    """A run and the processes that work on it one after the other; each finds the one before dead.

    `code` stands for that of the engines: cache keys change with it. `flow_run` is the flow run of all of them.
    """

    home: Path
    overrides: tuple[str, ...] = ()
    name: str = "toy"
    engines: ToyEngines = field(default_factory=ToyEngines)
    tracker: Any = field(default_factory=ToyTracker)
    files: FileSystem = field(default_factory=QuickFiles)
    code: str = "toy"
    flow_run: str | None = None
    written: io.StringIO = field(default_factory=io.StringIO)

    @property
    def said(self) -> str:
        """All that people were told."""
        return self.written.getvalue()

    @property
    def folder(self) -> Path:
        """Its records."""
        return self.home / "store" / "runs" / self.name

    def console(self) -> RunConsole:
        """Writes into `said`."""
        return RunConsole(self.name, 0, Console(file=self.written, width=1000))

    def context(self, *overrides: str, spec: RunSpec | None = None) -> RunContext:
        """What a new process works with."""
        spec = spec or smoke_spec(*self.overrides, *overrides)
        context = run_context(
            spec, self.home, self.name, self.engines, self.tracker, files=self.files, taking_over=True
        )
        try:
            context = context.with_spec(effective_spec(context.spec, context.records))
        except RecordError:  # a process that ends so gives its lease back
            assert context.lease is not None
            context.lease.release()
            raise
        context.fingerprints.update(dict.fromkeys(PROGRAMS, self.code))
        self.engines.serve(context.spec)
        return context

    def needs(self, context: RunContext) -> Reachability:
        """What the runs of its store need."""
        return Reachability(context.store)

    def train(self, *overrides: str, rerun: Rerun | None = None, spec: RunSpec | None = None) -> list[IterationRecord]:
        """What `flows.ppo.train` does in a new process, but for the end; the records that the run has then."""
        with ended_well(self.context(*overrides, spec=spec)) as context:
            console = self.console()
            finish_interrupted(context, console)
            train_to_the_end(context, console, self.needs(context), rerun, self.flow_run)
        return self.records()

    def train_until_killed(self, *overrides: str) -> None:
        """The process dies where the engines were told to let it."""
        with pytest.raises(Killed):
            self.train(*overrides)

    def copy(self, home: Path, measures: Measures = healthy) -> ToyRun:
        """Its store and records in another place, with engines of their own."""
        shutil.copytree(self.home, home)
        return ToyRun(home, self.overrides, self.name, ToyEngines(measures))

    def own_copy(self, home: Path, patch: pytest.MonkeyPatch) -> ToyRun:
        """Its copy, where commands of this test find and keep their state."""
        patch.setenv("PPOFLOW_HOME", str(home))
        patch.delenv("PPOFLOW_STORE", raising=False)
        return self.copy(home)

    def records(self) -> list[IterationRecord]:
        """The committed ones, as they lie there."""
        return [stored_record(file) for file in sorted((self.folder / "iterations").glob("*.json"))]

    def record_bytes(self) -> dict[str, bytes]:
        """The files of all records."""
        return {file.name: file.read_bytes() for file in sorted((self.folder / "iterations").glob("*.json"))}

    def notes(self, kind: str) -> list[dict[str, Any]]:
        """Rollbacks or divergences."""
        return [json.loads(file.read_text()) for file in sorted((self.folder / kind).glob("*.json"))]

    def place(self, ref: ArtifactRef) -> Path:
        """The folder of an artifact."""
        return self.home / "store" / ref.kind / ref.key

    def policies(self) -> list[str]:
        """The weights of each record's policy."""
        return [self.policy_at(record.iteration) for record in self.records()]

    def policy_at(self, iteration: int) -> str:
        """The weights of an iteration's policy."""
        return (self.place(self.records()[iteration].checkpoint) / PARTS["policy"]).read_text()

    def forge(self, iteration: int, **changes: Any) -> None:
        """Change what a record says, with a checksum that holds."""
        self.rewrite(f"iterations/{iteration:06d}.json", lambda record: record | changes)

    def rewrite(self, name: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        """Change a checksummed document of the run; `last.json` names the last record as it is then."""
        document = json.loads((self.folder / name).read_text())
        document.pop(CHECKSUM)
        replace(self.folder / name, encode(name, change(document)))
        if name.startswith("iterations/"):
            last = max((self.folder / "iterations").glob("*.json"))
            document = json.loads(last.read_text())
            document.pop(CHECKSUM)
            replace(self.folder / LAST, encode(LAST, last_document(int(last.stem), document)))


def finished(home: Path, overrides: tuple[str, ...], measures: Measures = healthy) -> ToyRun:
    """A run that has done all of its iterations."""
    run = ToyRun(home, overrides, engines=ToyEngines(measures))
    run.train()
    return run


def with_artifact(record: dict[str, Any], stage: str, ref: StageRef) -> dict[str, Any]:
    """The record's document, saying that a stage made something else."""
    return record | {"artifacts": record["artifacts"] | {stage: ref.model_dump(mode="json")}}


def old_form(record: dict[str, Any]) -> dict[str, Any]:
    """The document as versions wrote it that did not yet name stages."""
    others = {key: value for key, value in record.items() if key != "artifacts"}
    return {**others, **{ref["kind"]: ref for ref in record["artifacts"].values()}}


def stored_record(file: Path) -> IterationRecord:
    """A record as it lies there."""
    return read_record({key: value for key, value in json.loads(file.read_text()).items() if key != CHECKSUM})


def digests(records: list[IterationRecord]) -> list[tuple[str | None, ...]]:
    """What each record's stages made."""
    parts = [(r.made("rollouts"), r.made("scores"), r.made("experience"), r.checkpoint, r.evaluation) for r in records]
    return [tuple(ref.digest if ref is not None else None for ref in record) for record in parts]


def replace(file: Path, content: bytes) -> None:
    """Other content for a read-only file."""
    file.chmod(0o644)
    file.write_bytes(content)


def flip_a_bit(folder: Path) -> None:
    """In the middle of the artifact's largest file."""
    file = max((path for path in folder.rglob("*") if path.name != "manifest.json" and path.is_file()), key=size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    replace(file, bytes(content))


def lose_a_file(folder: Path) -> None:
    """Any but the manifest."""
    next(path for path in sorted(folder.rglob("*")) if path.name != "manifest.json" and path.is_file()).unlink()


def lose_the_manifest(folder: Path) -> None:
    """Without it there is no artifact."""
    (folder / "manifest.json").unlink()


def lose_it(folder: Path) -> None:
    """The whole folder."""
    shutil.rmtree(folder)


DAMAGES = (flip_a_bit, lose_a_file, lose_the_manifest, lose_it)


def size(path: Path) -> int:
    """In bytes."""
    return path.stat().st_size


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, but for locks."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
