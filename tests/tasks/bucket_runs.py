"""Toy runs whose store and records are on S3: every process works on a machine that has nothing yet."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from infra.artifacts import ArtifactRef
from infra.artifacts.download_cache import ArtifactCache
from infra.artifacts.s3_store import S3Store
from infra.gc.s3_collector import S3Collector
from infra.runs.s3_lease import acquire_lease
from infra.runs.s3_runs import S3Runs
from infra.settings import Settings
from infra.storage.objects import Objects, S3Address
from ppo_core.spec import RunSpec
from tasks.runs.iteration_record import IterationRecord, read_record
from tasks.runs.reachability import Reachability
from tasks.runs.run_state import effective_spec
from tasks.stages.context import RunContext
from tasks.stages.engines import PROGRAMS
from tests.infra.runs.leases import somebody
from tests.infra.storage.s3.memory_objects import MemoryObjects
from tests.tasks.run_contexts import ignore, smoke_spec
from tests.tasks.toy_checkpoints import PARTS
from tests.tasks.toy_engines import ToyEngines
from tests.tasks.toy_runs import ToyRun

LIMIT = 2**30
PREFIX = "team"


@dataclass
class BucketRun(ToyRun):
    """A run on S3; below `home` are the machines on which its processes ran, one after the other."""

    objects: Objects = field(default_factory=MemoryObjects)
    machines: Iterator[int] = field(default_factory=itertools.count)

    @property
    def address(self) -> S3Address:
        """Of the store."""
        return S3Address(self.objects.bucket, PREFIX)

    def store(self, machine: Path) -> S3Store:
        """The store as a machine sees it."""
        return S3Store(self.address, self.objects, ArtifactCache(machine / "cache", LIMIT), libraries={})

    def context(self, *overrides: str, spec: RunSpec | None = None) -> RunContext:
        """What a new process works with, on a new machine."""
        machine = self.home / f"machine{next(self.machines)}"
        settings = Settings(home=machine, store=self.address.uri, tracking_uri=f"sqlite:///{machine}/mlflow.db")
        store, runs = self.store(machine), S3Runs(self.address, self.objects)
        lease = acquire_lease(store.root, self.name, objects=self.objects, identity=somebody(), alive=lambda _: False)
        context = RunContext(
            spec=spec or smoke_spec(*self.overrides, *overrides),
            run=self.name,
            settings=settings,
            store=store,
            records=runs.records(self.name, lease=lease),
            engines=ToyEngines(self.engines.measures),
            tracker=self.tracker,
            on_progress=ignore,
            lease=lease,
        )
        context = context.with_spec(effective_spec(context.spec, context.records))
        vars(context).update(collector=S3Collector(self.address, self.objects))
        context.fingerprints.update(dict.fromkeys(PROGRAMS, self.code))
        return context

    def needs(self, context: RunContext) -> Reachability:
        """By records alone: no promotions, no pages."""
        return Reachability(context.store, S3Runs(self.address, self.objects), set)

    def records(self) -> list[IterationRecord]:
        """The committed ones."""
        return [read_record(record) for record in S3Runs(self.address, self.objects).records(self.name).all()]

    def place(self, ref: ArtifactRef) -> Path:
        """An artifact's folder on a machine that has nothing yet."""
        machine = self.home / f"machine{next(self.machines)}"
        return self.store(machine).fetch(ref.bare())

    def policies(self) -> list[str]:
        """The weights of each record's policy."""
        return [(self.place(record.checkpoint) / PARTS["policy"]).read_text() for record in self.records()]
