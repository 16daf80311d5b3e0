"""Records that cannot lie: what is missing, exchanged or forged among them is told before anything is built on it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infra.artifacts.local_store import LocalStore
from infra.artifacts.manifest import sha256_of
from infra.process_identity import ProcessIdentity, this_process
from infra.runs.checksummed_json import CHECKSUM
from infra.runs.local_lease import acquire_lease
from infra.runs.local_records import LocalRecords
from infra.runs.records import RecordCorrupted, RecordMissing
from ppo_core.records import InputError, content_digest
from tasks.runs.fork import fork_run
from tasks.runs.inspect import read_run
from tasks.runs.record_chain import made_with, read_chain
from tasks.runs.retention import find_garbage, release, remove_garbage
from tasks.runs.run_state import spec_of_run
from tests.infra.runs.leases import somebody
from tests.tasks.run_contexts import smoke_spec
from tests.tasks.toy_runs import ToyRun, old_form, replace, snapshot, with_artifact

pytestmark = pytest.mark.usefixtures("prefect_server")
SHORT = ("iterations=4", "dataset.evaluation=null", "registry.metric=policy/quality")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two finished runs in one store."""
    home = tmp_path_factory.mktemp("trained") / "home"
    ToyRun(home, SHORT).train()
    ToyRun(home, (*SHORT, "seed=7"), name="other").train()
    return home


@pytest.fixture
def run(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ToyRun:
    """The first of them, where ppoflow keeps its state."""
    shutil.copytree(trained, tmp_path / "home")
    monkeypatch.setenv("PPOFLOW_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("PPOFLOW_STORE", raising=False)
    return ToyRun(tmp_path / "home", SHORT, code="toy")


def record_file(run: ToyRun, iteration: int) -> Path:
    """Where a record lies."""
    return run.folder / f"iterations/{iteration:06d}.json"


def test_a_run_whose_spec_is_lost_keeps_it(run: ToyRun) -> None:
    spec = run.folder / "spec.json"
    before = spec.read_bytes()
    spec.unlink()
    with pytest.raises(InputError, match=r"seed: 0 -> 99"):
        run.train("seed=99", "iterations=5")
    assert not spec.exists()
    assert read_run("toy").iterations == 4
    assert spec_of_run("toy").seed == 0
    run.train("iterations=5")
    assert spec.read_bytes() == before
    assert "the spec of run toy was lost; it is restored" in run.said
    assert [record.iteration for record in run.records()] == [0, 1, 2, 3, 4, 5]
    assert run.records()[-1].changed == {"iterations": 5}


def test_another_spec_in_its_place_is_refused(run: ToyRun) -> None:
    run.rewrite("spec.json", lambda spec: spec | {"seed": 99})
    with pytest.raises(RecordCorrupted, match=r"not the one that its first record has: `ppoflow fsck toy --repair`"):
        run.train("seed=99")


@pytest.mark.parametrize("iteration", [0, 2, 3])
def test_a_gap_is_told_at_once_with_its_remedy(run: ToyRun, iteration: int) -> None:
    record_file(run, iteration).unlink()
    remedy = rf"none of iteration {iteration}: `ppoflow fsck toy --repair` takes iteration {iteration} and those after"
    with pytest.raises(RecordMissing, match=remedy):
        read_run("toy")
    before = snapshot(run.home / "store" / "runs" / "toy" / "iterations")
    with pytest.raises(RecordMissing, match=remedy):
        run.train("iterations=5")
    with pytest.raises(RecordMissing, match=remedy):
        fork_run("toy", 3, "new", [])
    assert snapshot(run.home / "store" / "runs" / "toy" / "iterations") == before


def test_nothing_that_a_gap_might_need_is_garbage(run: ToyRun) -> None:
    lost = run.records()[2]
    record_file(run, 2).unlink()
    garbage = find_garbage()
    assert garbage.artifacts == []
    assert "none of iteration 2" in garbage.unreadable["run toy"]
    remove_garbage(garbage)
    assert run.place(lost.checkpoint).is_dir()


def other_spec(record: dict[str, Any]) -> dict[str, Any]:
    """One of a run with another seed."""
    return record | {"spec_digest": content_digest(smoke_spec(*SHORT, "seed=9").document())}


FORGERIES: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "run": (lambda record: record | {"run": "other"}, "is one of run other"),
    "iteration": (lambda record: record | {"iteration": 3}, "is one of iteration 3"),
    "spec digest": (other_spec, "was made with another spec"),
    "changed keys": (lambda record: record | {"changed": {"seed": 9}}, "was made with another spec"),
    "predecessor": (lambda record: record | {"previous": "0" * 64}, "follows another record"),
    "no predecessor": (lambda record: record | {"previous": None}, "names neither spec nor predecessor"),
    "no checkpoint": (lambda record: record | {"artifacts": {}}, "none that this version can read"),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_record_that_is_not_of_this_run_in_this_place_is_refused(run: ToyRun, forgery: str) -> None:
    change, complaint = FORGERIES[forgery]
    run.rewrite("iterations/000004.json", change)
    with pytest.raises(RecordCorrupted, match=rf"the record of iteration \d of run toy .*{complaint}"):
        read_run("toy")


def test_a_record_of_another_run_is_refused_with_every_byte_that_it_had(run: ToyRun) -> None:
    ours = {"run": "toy", "spec_digest": run.records()[3].spec_digest}
    last = {"run": "toy", "previous": run.records()[4].previous}
    replace(record_file(run, 4), (run.home / "store/runs/other/iterations/000004.json").read_bytes())
    with pytest.raises(RecordCorrupted, match="iteration 4 of run toy is one of run other"):
        read_run("toy")
    document = json.loads((run.home / "store/runs/other/iterations/000004.json").read_text())
    document.pop(CHECKSUM)
    run.rewrite("iterations/000004.json", lambda record: document | ours)
    with pytest.raises(RecordCorrupted, match="iteration 4 of run toy follows another record"):
        read_run("toy")
    run.rewrite("iterations/000004.json", lambda record: document | last)
    with pytest.raises(RecordCorrupted, match="iteration 4 of run toy was made with another spec"):
        read_run("toy")


def test_one_that_was_written_over_is_noticed_by_the_next(run: ToyRun) -> None:
    checkpoint = run.records()[1].checkpoint
    run.rewrite("iterations/000003.json", lambda record: with_artifact(record, "update_policy", checkpoint))
    with pytest.raises(RecordCorrupted, match="iteration 4 of run toy follows another record"):
        read_run("toy")


def test_the_chain_by_hand(run: ToyRun) -> None:
    """Computed from the files alone."""
    documents = [json.loads(record_file(run, number).read_text()) for number in range(5)]
    for document in documents:
        document.pop(CHECKSUM)
    spec = json.loads((run.folder / "spec.json").read_text())
    spec.pop(CHECKSUM)
    assert documents[0]["spec"] == spec
    assert documents[0]["previous"] is None
    assert [document["previous"] for document in documents[1:]] == [sha256_of(before) for before in documents[:-1]]
    assert {document["spec_digest"] for document in documents} == {
        content_digest({name: value for name, value in spec.items() if name != "folder"})
    }
    assert all(document["spec"] is None for document in documents[1:])


def test_what_had_changed_counts_for_the_digest_of_the_spec(run: ToyRun) -> None:
    run.train("iterations=5", "engines.timeout_s=77", "checkpoint.every=2")
    spec, last = read_chain(LocalRecords(run.home / "store", "toy")).spec, run.records()[-1]
    assert spec is not None
    assert last.changed == {"iterations": 5, "engines.timeout_s": 77.0, "checkpoint.every": 2}
    now = ("iterations=5", "engines.timeout_s=77", "checkpoint.every=2", "update.decay_iterations=4")
    assert last.spec_digest == made_with(spec, last.changed)
    assert last.spec_digest == content_digest(smoke_spec(*SHORT, *now).document())


def test_a_fork_has_a_chain_of_its_own(run: ToyRun) -> None:
    fork_run("toy", 2, "new", ["update.learning_rate=0.01", "engines.timeout_s=5"])
    chain = read_chain(LocalRecords(run.home / "store", "new"))
    assert [record.iteration for record in chain.records] == [0, 1, 2]
    assert chain.records[2].spec_digest == run.records()[2].spec_digest  # it was made with the settings of its time
    fork = ToyRun(run.home, name="new", engines=run.engines)
    fork.train(spec=spec_of_run("new"))
    fork_run("new", 3, "newer", ["update.learning_rate=0.02"])
    assert len(read_chain(LocalRecords(run.home / "store", "newer")).records) == 4


def test_records_of_an_earlier_form_are_refused_in_one_line(run: ToyRun) -> None:
    for number in range(5):
        run.rewrite(f"iterations/{number:06d}.json", old_form)
    with pytest.raises(RecordCorrupted, match="is of a form that this version does not read") as refusal:
        read_run("toy")
    assert "\n" not in str(refusal.value)


def test_another_runs_trouble_is_a_warning(run: ToyRun) -> None:
    """A damaged record of another run neither ends this one nor lets anything go that the other may need."""
    damaged = run.home / "store/runs/other/iterations/000002.json"
    replace(damaged, damaged.read_bytes()[:-20])
    records = ToyRun(run.home, (*SHORT, "checkpoint.keep_last=1"), name="third", written=run.written).train()
    assert [record.iteration for record in records] == [0, 1, 2, 3, 4]
    assert run.said.count("what run other needs cannot be read, so no checkpoint is removed") == 1
    third = ToyRun(run.home, name="third")
    assert all(third.place(record.checkpoint).is_dir() for record in records)
    shutil.rmtree(damaged.parent.parent)  # the trouble is over, and what was kept goes
    context = third.context(*SHORT, "checkpoint.keep_last=1")
    needs = third.needs(context)
    release(context, needs)
    assert needs.unreadable == {}


def test_a_reader_amid_a_rollback_looks_again(run: ToyRun) -> None:
    """Records that are taken out and made again between two reads are no damage."""
    records = LocalRecords(run.home / "store", "toy")
    original = records.marked
    writing = LocalRecords(
        run.home / "store",
        "toy",
        lease=acquire_lease(run.home / "store", "toy", identity=somebody(), alive=nobody),
    )
    documents = {number: records.read(number) for number in range(5)}

    def while_rolled_back(marks: Any) -> Any:
        """The first look finds the old records up to 3, and a new one in the place of 4."""
        records.marked = original  # type: ignore[method-assign]
        writing.supersede(3)
        writing.commit(4, documents[4] | {"committed_at_ms": 7})
        torn = original(marks)
        return [*torn[:4], documents[3] | {"iteration": 4}]

    records.marked = while_rolled_back  # type: ignore[method-assign]
    assert read_chain(records).records[-1].committed_at_ms == 7


def nobody(identity: ProcessIdentity) -> bool:
    """Nobody lives."""
    return False


def test_scratch_of_a_dead_writer_goes_with_the_next_start_of_any_run(run: ToyRun) -> None:
    dead = this_process().model_copy(update={"started": 1})  # whose number this process has now
    left = LocalStore(run.home / "store", writer=dead).scratch()
    (left / "half").write_bytes(b"x" * 1000)
    mine = LocalStore(run.home / "store").scratch()
    ToyRun(run.home, SHORT, name="third", written=run.written).train()
    assert not left.exists()
    assert mine.is_dir()
    assert "removed leftovers of dead processes from the store" in run.said
