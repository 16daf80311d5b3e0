"""Runs whose artifacts and records are on S3: killed at any call and gone on with on a machine that has nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flows.iteration import Rerun
from flows.verify import verify_iteration
from infra.artifacts import open_store
from infra.artifacts.overlay_store import OverlayStore
from infra.backend import open_records, open_runs
from infra.settings import Settings
from infra.storage.objects import Entry, Found, Objects, StoreRefused
from infra.storage.outage import Outage
from infra.storage.waiting_client import WaitingObjects
from tasks.runs.fork import fork_run
from tasks.runs.guards import DivergedError
from tasks.runs.inspect import read_run
from tasks.runs.iteration_record import IterationRecord, read_record
from tasks.runs.retention import find_garbage, remove_garbage
from tasks.runs.run_state import spec_of_run
from tasks.runs.verification import check_recorded, require_verifiable
from tasks.stages.context import RunContext
from tasks.stages.engines import PROGRAMS
from tests.infra.storage.faulty_files import Died
from tests.infra.storage.s3.faulty_objects import FaultyObjects
from tests.infra.storage.s3.memory_objects import MemoryObjects
from tests.infra.storage.s3.s3_server import S3Server
from tests.tasks.bucket_runs import PREFIX, BucketRun
from tests.tasks.run_contexts import ignore
from tests.tasks.toy_engines import ToyEngines, healthy
from tests.tasks.toy_runs import ToyRun, digests, ended_well
from tests.tasks.toy_tracker import ToyTracker

pytestmark = pytest.mark.usefixtures("prefect_server")
SHORT = ("iterations=1",)
READING = {"read", "entries"}


def moments(trace: list[str]) -> list[int]:
    """The calls (from 1) before which a process can die with different things stored: the first, and those that follow
    one that stores or removes something, but none within the uploads or removals of a folder."""
    kinds = [
        (call.split()[0], call.split()[1].rpartition("/")[0] if "upload" in call or "remove" in call else str(number))
        for number, call in enumerate(trace)
    ]
    changing = [number for number, (call, _) in enumerate(kinds) if call not in READING]
    return [1, *(n + 2 for n in changing if n + 1 == len(kinds) or kinds[n] != kinds[n + 1])]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], list[str]]:
    """What the short run makes, and its calls to S3."""
    objects = FaultyObjects(MemoryObjects())
    records = BucketRun(tmp_path_factory.mktemp("undisturbed"), SHORT, objects=objects).train()
    return digests(records), objects.trace


def test_on_s3_it_is_the_same_run_as_in_a_folder(undisturbed: tuple[list[Any], list[str]], tmp_path: Path) -> None:
    assert digests(ToyRun(tmp_path / "home", SHORT).train()) == undisturbed[0]


class Refusing(MemoryObjects):
    """It refuses what is of the run `other`, from the `first` time that it is asked for that to the `last`."""

    asked, first, last = 0, 10**9, 10**9

    def read(self, key: str) -> Found | None:
        """An object, or what S3 says to who may not have it."""
        self.refuse(key)
        return super().read(key)

    def entries(self, prefix: str) -> Iterator[Entry]:
        """The same of a list."""
        self.refuse(prefix)
        return super().entries(prefix)

    def refuse(self, key: str) -> None:
        """Raise StoreRefused where it is to."""
        self.asked += "/runs/other/" in key
        if "/runs/other/" in key and self.first <= self.asked <= self.last:
            raise StoreRefused(f"S3 refuses {key} (AccessDenied)")


@pytest.mark.parametrize("times", [1, 10**9])
def test_what_s3_refuses_of_another_run_ends_nobodys_run_and_keeps_all_that_it_may_need(
    tmp_path: Path, times: int
) -> None:
    """Also where it refuses what that run uses, and a moment later no more."""
    objects, kept = Refusing(), ("checkpoint.keep_last=1", "dataset.evaluation=null", "registry.metric=score/mean")
    BucketRun(tmp_path / "other", SHORT, "other", objects=objects).train()
    objects.first, objects.last = objects.asked + 1, objects.asked + times
    run = BucketRun(tmp_path / "run", ("iterations=4", *kept), objects=objects)
    assert len(run.train()) == 5
    assert run.said.count("needs cannot be read, so no checkpoint is removed: S3 refuses ") == 1
    objects.first = objects.last = 0
    assert len(run.train("iterations=5")) == 6
    assert run.said.count("cannot be read") == 1


@pytest.fixture(scope="module")
def states(
    undisturbed: tuple[list[Any], list[str]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, MemoryObjects]:
    """What a process that dies at one of those moments leaves, by the call that it does not come to."""
    wanted, objects, kept = set(moments(undisturbed[1])), MemoryObjects(), dict[str, MemoryObjects]()

    def keep(number: int) -> None:
        if number in wanted:
            with objects.mutex:
                call = f"{number}: {faulty.trace[-1]}"
                kept[call] = MemoryObjects(content={**objects.content}, times={**objects.times})

    faulty = FaultyObjects(objects, before=keep)
    BucketRun(tmp_path_factory.mktemp("whole"), SHORT, objects=faulty).train()
    assert len(kept) == len(wanted)
    return kept


@pytest.mark.thorough
def test_killed_with_whatever_is_stored_it_goes_on_to_the_same_bytes(
    undisturbed: tuple[list[Any], list[str]], states: dict[str, MemoryObjects], tmp_path: Path
) -> None:
    for number, (call, objects) in enumerate(states.items()):
        assert digests(BucketRun(tmp_path / str(number), SHORT, objects=objects).train()) == undisturbed[0], call


@pytest.mark.thorough
def test_so_it_does_on_a_server(
    undisturbed: tuple[list[Any], list[str]], states: dict[str, MemoryObjects], s3_server: S3Server, tmp_path: Path
) -> None:
    """The contract suites say that both do the same: every seventh of those states."""
    for number, (call, left) in enumerate([*states.items()][::7]):
        objects = s3_server.objects(s3_server.make_bucket())
        for key, content in left.content.items():
            objects.write(key, content)
        assert digests(BucketRun(tmp_path / str(number), SHORT, objects=objects).train()) == undisturbed[0], call


def test_killed_again_and_again_it_gets_there(undisturbed: tuple[list[Any], list[str]], tmp_path: Path) -> None:
    """Process n dies at its call 5n; so going on is killed too, wherever it has got to."""
    objects = MemoryObjects()
    for number in range(1, 100):
        faulty = FaultyObjects(objects, 5 * number, "dies after")
        try:
            records = BucketRun(tmp_path / str(number), SHORT, objects=faulty).train()
        except Died:
            continue
        assert digests(records) == undisturbed[0]
        assert {record.lease for record in records} <= set(range(1, number + 1))
        break
    assert number > 5


@pytest.mark.thorough
def test_a_call_that_fails_for_a_while_costs_a_wait_at_most(
    undisturbed: tuple[list[Any], list[str]], tmp_path: Path
) -> None:
    made, trace = undisturbed
    commit = next(n for n, call in enumerate(trace, 1) if "iterations/000001" in call)
    for number in (commit, commit + 1):
        faulty = FaultyObjects(MemoryObjects(), number, "fails after")
        waiting = WaitingObjects(faulty, Outage(f"S3 at call {number}"), lambda: None, 60)
        assert digests(BucketRun(tmp_path / str(number), SHORT, objects=waiting).train()) == made


@pytest.fixture
def team(bucket: str, s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Objects:
    """A bucket on a real server that the settings name, on a machine of ours."""
    monkeypatch.setenv("PPOFLOW_STORE", f"s3://{bucket}/{PREFIX}")
    monkeypatch.setenv("PPOFLOW_HOME", str(tmp_path / "our-machine"))
    return s3_server.objects(bucket)


@pytest.mark.thorough
def test_runs_are_forked_done_again_verified_and_cleared_up_on_a_server(team: Objects, tmp_path: Path) -> None:
    run = BucketRun(tmp_path / "toy", ("iterations=2", "evaluation.every=2"), objects=team)
    records = run.train()
    root = Settings().store_root
    assert read_run("toy").records == records
    assert open_runs(root).names() == ["toy"]
    assert all(found.same for found in verified("toy", tmp_path / "verified"))
    fork_run("toy", 1, "new", ["update.learning_rate=0.01"])
    fork = BucketRun(tmp_path / "new", name="new", objects=team)
    forked = fork.train(spec=spec_of_run("new"))
    assert digests(forked)[:2] == digests(records)[:2]
    assert digests(forked)[2] != digests(records)[2]
    again = run.train(rerun=Rerun(iteration=2, start="score"))
    assert digests(again) == digests(records)
    assert {record.lease for record in again} == {1, 2}
    assert find_garbage().rows() == []
    other = BucketRun(tmp_path / "new", name="new", objects=team, code="another version")
    with other_code(other) as context:
        context.supersede(0)
    assert {kind for kind, _ in garbage()} <= {"rollouts", "scores", "experience", "checkpoint", "evaluation"}
    assert remove_garbage(find_garbage()) > 0
    assert (garbage(), digests(run.records())) == ([], digests(records))


def test_retention_removes_what_the_run_has_let_go(tmp_path: Path) -> None:
    run = BucketRun(tmp_path / "toy", ("iterations=5", "checkpoint.keep_last=2"))
    records = run.train()
    store = run.store(tmp_path / "another-machine")
    kept = [r.iteration for r in records if store.find("checkpoint", r.checkpoint.key) is not None]
    assert {4, 5, records[-1].best.iteration} <= set(kept) < set(range(6))
    assert digests(records) == digests(BucketRun(tmp_path / "all", ("iterations=5",)).train())
    keys = [entry.key.split("/") for entry in run.objects.entries(f"{PREFIX}/checkpoint/")]
    assert len({key[2] for key in keys if key[-1] != "manifest.json"}) == len(kept)


def test_the_evidence_of_a_divergence_is_named_by_its_address(tmp_path: Path) -> None:
    run = BucketRun(
        tmp_path, ("iterations=2", "guards.max_kl=0.001"), engines=ToyEngines(lambda *_: {"kl/reference": 1.0})
    )
    with pytest.raises(DivergedError, match=r"its evidence is kept: s3://memory/team/runs/toy/divergences/note-"):
        run.train()
    assert [record.iteration for record in run.records()] == [0]


def other_code(run: BucketRun) -> Any:
    """A process that holds a run."""
    return ended_well(run.context(spec=spec_of_run(run.name)))


def garbage() -> list[tuple[str, str]]:
    """The artifacts that nothing needs."""
    return [(found.kind, found.key) for found in find_garbage().artifacts]


def verified(run: str, scratch: Path) -> list[Any]:
    """What `flows.verify.verify` compares, with toy engines."""
    require_verifiable(run, None, None)
    settings = Settings().model_copy(update={"home": scratch, "cache": scratch / "cache"})
    original = open_store(settings.store_root, cache=settings.cache_folder)
    records = open_records(original.root, run)
    context = RunContext(
        spec=spec_of_run(run),
        run=run,
        settings=settings,
        store=OverlayStore(open_store(scratch / "store"), original),
        records=records,
        engines=ToyEngines(healthy),
        tracker=ToyTracker(),
        on_progress=ignore,
        fingerprints=dict.fromkeys(PROGRAMS, "toy"),
    )
    told: list[IterationRecord] = [read_record(record) for record in records.all()]
    for record in told:
        check_recorded(context, record)
    return [found for record in told for found in verify_iteration(context, record)]
