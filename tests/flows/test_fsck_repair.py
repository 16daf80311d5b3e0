"""What `ppoflow fsck --repair` leaves alone, and what fsck does not call damage."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows.fsck import repair, repair_run
from infra.artifacts.manifest import sha256_of
from infra.backend import open_leases
from infra.engines.protocol import EngineJob
from infra.runs.checksummed_json import CHECKSUM
from infra.runs.lease import Heartbeat
from infra.runs.local_lease import acquire_lease
from tasks.runs.findings import Findings
from tasks.runs.fork import fork_run
from tasks.runs.fsck import check_records, check_run, check_store
from tasks.runs.record_chain import made_with
from tasks.runs.repair import repair_records
from tests.tasks.toy_engines import JOBS, ToyEngines, write_responses
from tests.tasks.toy_runs import ToyRun, flip_a_bit, lose_it, old_form, replace, snapshot, with_artifact
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("prefect_server")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> ToyRun:
    """A finished run."""
    run = ToyRun(tmp_path_factory.mktemp("trained") / "home", ("iterations=4", "evaluation.every=2"))
    run.train()
    return run


@pytest.fixture
def run(trained: ToyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ToyRun:
    """Its copy, where ppoflow keeps its state."""
    return trained.own_copy(tmp_path / "home", monkeypatch)


def check(name: str = "toy") -> Findings:
    """What is found, without a word on the way."""
    return check_run(name, lambda text: None)


def damaged(name: str = "toy") -> list[str]:
    """What is damaged, and how it is repaired."""
    return [f"{damage.what}: {damage.repair}" for damage in check(name).damages]


def test_a_first_record_that_is_not_believed_is_no_source_of_the_spec(run: ToyRun) -> None:
    """Neither another run's, nor one that was written over: the spec that is there stays."""
    spec = (run.folder / "spec.json").read_bytes()

    def forged(record: dict[str, Any]) -> dict[str, Any]:
        changed = record["spec"] | {"seed": 99}
        return record | {"spec": changed, "spec_digest": made_with(changed, {})}

    run.rewrite("iterations/000000.json", forged)
    assert damaged() == ["record of iteration 0: records"]
    repair_records("toy")
    assert (run.folder / "spec.json").read_bytes() == spec
    run.train()
    assert damaged() == []
    (run.folder / "spec.json").unlink()
    run.rewrite("iterations/000000.json", lambda record: record | {"run": "other"})
    assert damaged() == ["record of iteration 0: records", "spec: None"]


def test_what_retention_has_removed_is_not_missed(run: ToyRun) -> None:
    """Nor where the rule has changed since, or a fork begins before the last iteration."""
    kept = ToyRun(run.home, ("iterations=6", "dataset.evaluation=null", "checkpoint.keep_last=2"), name="kept")
    kept.train()
    assert damaged("kept") == []
    fork_run("kept", 5, "forked", [])
    assert damaged("forked") == []
    kept.train("iterations=7", "checkpoint.keep_last=4")
    assert damaged("kept") == []
    lose_it(kept.place(kept.records()[7].checkpoint))
    assert damaged("kept") == ["checkpoint of iteration 7: artifact"]


def test_a_run_of_an_earlier_version_is_left_alone_and_stops_nothing(run: ToyRun) -> None:
    before = run.records()
    for number in range(5):
        run.rewrite(f"iterations/{number:06d}.json", old_form)
    (told,) = check().damages
    assert "use the version of ppoflow that wrote it" in told.complaint
    assert told.repair is None
    assert repair_records("toy") == []
    other = ToyRun(run.home, ("iterations=3", "dataset.evaluation=null", "checkpoint.keep_last=1"), name="other")
    records = other.train()
    assert all(other.place(record.checkpoint).is_dir() for record in records)  # what the first needs cannot be told
    assert all(run.place(record.checkpoint).is_dir() for record in before)


def test_a_repair_looks_again_once_it_has_the_run(run: ToyRun) -> None:
    (run.folder / "iterations/000003.json").unlink()
    found = check()
    list(repair_run("toy", found))
    run.train()
    before = run.record_bytes()
    assert list(repair_run("toy", found)) == []
    assert run.record_bytes() == before


def while_it_reads(patch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Something happens once a repair has the run, before it reads the records."""

    def read(*given: Any) -> Any:
        act()
        return check_records(*given)

    patch.setattr("tasks.runs.repair.check_records", read)


def test_a_repair_that_reads_for_long_keeps_the_run(run: ToyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    (run.folder / "iterations/000003.json").unlink()
    monkeypatch.setattr(Heartbeat.__init__, "__kwdefaults__", {"every_s": 0.005})
    leases = open_leases(run.home / "store", "toy")

    def beats() -> int:
        return int(json.loads(leases.heartbeat(leases.live()[-1]) or b'{"beat": 0}')["beat"])

    while_it_reads(monkeypatch, lambda: until(lambda: beats() >= 3, "three beats"))
    assert repair_records("toy") != []


def test_a_repair_from_which_the_run_is_taken_says_so(run: ToyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    (run.folder / "iterations/000003.json").unlink()
    found, before = check(), run.record_bytes()
    while_it_reads(monkeypatch, lambda: acquire_lease(run.home / "store", "toy", alive=lambda _: False))
    (line,) = repair(found)
    assert line.startswith("run toy: not repaired: run toy: this process no longer has the run")
    assert run.record_bytes() == before


def test_a_run_that_somebody_has_does_not_keep_others_from_repair(run: ToyRun) -> None:
    (run.folder / "iterations/000003.json").unlink()
    lease = acquire_lease(run.home / "store", "toy")
    (line,) = repair(check())
    assert line.startswith("run toy: not repaired: run toy: process ")
    lease.release()


def test_an_artifact_of_another_digest_is_found_whoever_has_the_right_one(run: ToyRun) -> None:
    fork_run("toy", 4, "zz", ["iterations=5"])
    scores = run.records()[4].made("scores")
    assert scores is not None
    forged = scores.model_copy(update={"digest": "0" * 64})
    ToyRun(run.home, name="zz").rewrite(
        "iterations/000004.json", lambda record: with_artifact(record, "score_rollouts", forged)
    )
    everything = {found.run: [damage.what for damage in found.damages] for found in check_store(lambda text: None)}
    assert everything["toy"] == []
    assert "scores of iteration 4" in everything["zz"]


def test_what_is_needed_is_never_called_unneeded(run: ToyRun) -> None:
    """While records of any run cannot be read, they may need whatever no other record does."""
    replace(run.folder / "iterations/000000.json", b"{}")
    flip_a_bit(next((run.home / "store" / "scores").iterdir()))
    *_, rest = check_store(lambda text: None)
    assert [damage.repair for damage in rest.damages] == [None]


def test_what_one_run_may_have_removed_is_missed_in_another(run: ToyRun) -> None:
    """Also where the whole store is read, and the run that does not miss it comes first."""
    keeping = ("iterations=3", "dataset.evaluation=null")
    ToyRun(run.home, (*keeping, "checkpoint.keep_last=2"), name="a").train()
    ToyRun(run.home, keeping, name="b").train()
    lost = ToyRun(run.home, name="b").records()[2].checkpoint
    assert lost == ToyRun(run.home, name="a").records()[2].checkpoint  # kept by both, gone on from by neither
    lose_it(run.place(lost))
    everything = {found.run: [damage.what for damage in found.damages] for found in check_store(lambda text: None)}
    assert everything["a"] == []
    assert everything["b"] == ["checkpoint of iteration 2"]


def test_policies_that_answer_alike_are_each_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As while the critic warms up: an evaluation that two records share can be of one of their checkpoints only."""
    monkeypatch.setenv("PPOFLOW_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("PPOFLOW_STORE", raising=False)
    run, sample = ToyRun(tmp_path / "home", ("iterations=4", "evaluation.every=2")), JOBS["generate_rollouts"]

    def answer(engines: ToyEngines, job: EngineJob) -> dict[str, Any]:
        if job.spec["stream"] != "evaluation":
            return sample(engines, job)
        return write_responses(job, [str(number) for number in range(job.spec["num_prompts"])], job.spec)

    run.engines.jobs["generate_rollouts"] = answer
    records = run.train()
    assert len({ref.key for record in records if (ref := record.evaluation) is not None}) == 3
    assert check().damages == []


def of_newer_format(run: ToyRun, name: str) -> None:
    """Write a document as a version with another format may."""
    document = json.loads((run.folder / name).read_text())
    document.pop(CHECKSUM)
    seal = {"format": 2, "sha256": sha256_of({"name": name, "record": document})}
    replace(run.folder / name, json.dumps({**document, CHECKSUM: seal}).encode())


def of_newer_fields(run: ToyRun, name: str) -> None:
    """As one may that records more."""
    run.rewrite(name, lambda record: record | {"more": 1})


@pytest.mark.parametrize(
    ("newer", "names"),
    [
        (of_newer_format, ["iterations/000003.json", "iterations/000004.json"]),
        (of_newer_format, ["spec.json"]),
        (of_newer_format, ["rollbacks/000001.json"]),
        (of_newer_fields, ["iterations/000003.json", "iterations/000004.json"]),
        (of_newer_fields, ["rollbacks/000001.json"]),
    ],
)
@pytest.mark.parametrize("damage_too", [False, True])
def test_what_a_newer_version_wrote_is_left_to_it(
    run: ToyRun, newer: Callable[[ToyRun, str], None], names: list[str], damage_too: bool
) -> None:
    if names == ["rollbacks/000001.json"]:
        context = run.context()
        context.records.note("rollbacks", {"after": 4, "attempt": {"number": 1, "rate_factor": 0.5}, "passed": []})
        assert context.lease is not None
        context.lease.release()
    for name in names:
        newer(run, name)
    if damage_too:
        replace(run.folder / "iterations/000002.json", b"{}")
    before = snapshot(run.folder)
    found = check()
    assert {damage.repair for damage in found.damages} == {None}
    assert any("use " in damage.complaint and "ppoflow" in damage.complaint for damage in found.damages)
    assert repair(found) == []
    assert repair_records("toy") == []
    after = snapshot(run.folder)
    assert {name: after[name] for name in before if not name.startswith("leases")} == {
        name: content for name, content in before.items() if not name.startswith("leases")
    }


def test_a_format_that_is_too_new_is_damage_where_its_checksum_does_not_hold(run: ToyRun) -> None:
    of_newer_format(run, "iterations/000004.json")
    content = (run.folder / "iterations/000004.json").read_bytes()
    replace(run.folder / "iterations/000004.json", content.replace(b'"iteration": 4', b'"iteration": 5', 1))
    assert damaged() == ["record of iteration 4: records"]
