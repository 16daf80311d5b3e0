"""`ppoflow fsck` on S3, where a local copy says nothing of what the bucket has."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from flows.fsck import remake
from infra.artifacts import ArtifactCorrupted
from infra.gc.s3_collector import S3Collector
from infra.runs.records import RecordCorrupted, RecordMissing
from infra.runs.s3_lease import acquire_lease as acquire_s3_lease
from infra.runs.s3_records import S3Records
from infra.runs.s3_runs import S3Runs
from infra.runs.tracked_as import note_tracking_id, tracking_id
from tasks.runs.findings import Findings
from tasks.runs.fsck import check_records
from tasks.runs.reachability import Reachability
from tasks.runs.record_chain import spec_in
from tests.infra.runs.leases import somebody
from tests.tasks.bucket_runs import BucketRun
from tests.tasks.toy_runs import digests

pytestmark = pytest.mark.usefixtures("prefect_server")
SETTINGS = ("iterations=4", "evaluation.every=2")


def test_on_s3_the_bytes_in_the_bucket_count_and_not_the_copies_here(tmp_path: Path) -> None:
    run = BucketRun(tmp_path, (*SETTINGS, "dataset.evaluation=null"))
    run.train()
    context = run.context()
    ref = run.records()[2].checkpoint.bare()
    context.store.fetch(ref)  # a copy on this machine
    (name,) = [
        entry.key
        for entry in run.objects.entries(f"team/checkpoint/{ref.key}/")
        if entry.key.endswith("model.safetensors") and "policy" in entry.key
    ] or [next(e.key for e in run.objects.entries(f"team/checkpoint/{ref.key}/") if "manifest" not in e.key)]
    found = run.objects.read(name)
    assert found is not None
    run.objects.write(name, bytes([found.content[0] ^ 1]) + found.content[1:])
    assert context.store.fetch(ref).is_dir()
    with pytest.raises(ArtifactCorrupted, match="expected sha256"):
        context.store.check(ref)
    assert (
        remake(context, run.console(), [(2, ref)])[0]
        == "checkpoint of iteration 2 is undamaged again, with the same digest"
    )
    assert context.store.check(ref) > 0


def test_a_lost_spec_and_a_lost_record_on_s3_are_found_and_mended(tmp_path: Path) -> None:
    run = BucketRun(tmp_path, (*SETTINGS, "dataset.evaluation=null"))
    before = digests(run.train())
    names = [entry.key for entry in run.objects.entries("team/runs/toy/") if "/spec/" in entry.key]
    run.objects.remove(names)
    records = records_on_s3(run)
    found = Findings("toy")
    assert len(check_records(records, records.contents(), found)) == 5
    assert [(told.what, told.repair) for told in found.damages] == [("spec", "spec")]
    run.train()
    assert "the spec of run toy was lost; it is restored" in run.said
    assert records_on_s3(run).read_spec() == spec_in(records_on_s3(run).read(0))
    run.objects.remove([e.key for e in run.objects.entries("team/runs/toy/iterations/000003")])
    with pytest.raises(RecordCorrupted, match="takes iteration 3 and those after it out of the run"):
        run.train()
    lease = acquire_s3_lease(run.address.uri, "toy", objects=run.objects, identity=somebody(), alive=lambda _: False)
    records = S3Runs(run.address, run.objects).records("toy", lease=lease)
    found = Findings("toy")
    assert len(check_records(records, records.contents(), found)) == 3
    assert [(told.repair, told.iteration) for told in found.damages] == [("records", 3)]
    records.supersede(2)
    lease.release()
    assert digests(run.train()) == before


def records_on_s3(run: BucketRun) -> S3Records:
    """To be read."""
    return S3Runs(run.address, run.objects).records(run.name)


def test_a_run_whose_head_cannot_be_read_keeps_what_it_may_need_and_is_among_the_names(tmp_path: Path) -> None:
    run = BucketRun(tmp_path, (*SETTINGS, "dataset.evaluation=null"))
    run.train()
    run.objects.write("team/runs/other/head.json", b"{")
    runs = S3Runs(run.address, run.objects)
    assert runs.names() == ["other", "toy"]
    context = run.context("checkpoint.keep_last=1", "iterations=5")
    needs = run.needs(context)
    wanted = {("checkpoint", record.checkpoint.key) for record in run.records()}
    assert context.collector.collect(wanted, needs.among(wanted)) == []
    assert list(needs.unreadable) == ["run other"]


def test_a_run_that_has_lost_its_head_keeps_everything_and_its_records_are_no_remains(tmp_path: Path) -> None:
    run = BucketRun(tmp_path, (*SETTINGS, "dataset.evaluation=null"))
    run.train()
    run.objects.remove(["team/runs/toy/head.json"])
    left = [entry.key for entry in run.objects.entries("team/runs/")]
    with pytest.raises(
        RecordMissing, match=r"head.json is gone.*: put back its last undamaged version .* remove s3://.*/toy/"
    ):
        run.train()
    assert [entry.key for entry in run.objects.entries("team/runs/")] == left
    run.objects.later(timedelta(days=2))
    collector = S3Collector(run.address, run.objects)
    needs = Reachability(run.store(tmp_path), S3Runs(run.address, run.objects), promoted=set)
    wanted = [(found.kind, found.key) for found in collector.artifacts()]
    assert needs.among(wanted)() == set(wanted) != set()
    assert "head.json is gone, and records that it named are there" in needs.unreadable["run toy"]
    assert collector.orphans() == []
    run.objects.remove([entry.key for entry in run.objects.entries("team/runs/")])
    assert needs.among(wanted)() == set(wanted)
    assert "put any object there" in needs.unreadable["any run"]
    run.objects.write("team/runs/none", b"")
    assert (needs.of_all(), needs.unreadable) == (set(), {})
    run.objects.write("team/runs/toy (old)/head.json", b"{}")
    assert (needs.of_all(), list(needs.unreadable)) == (set(), ["run toy (old)"])


def test_a_note_of_the_tracked_run_can_be_moved_away_as_its_remedy_says(tmp_path: Path) -> None:
    """The head names it all the same."""
    run = BucketRun(tmp_path, (*SETTINGS, "dataset.evaluation=null"))
    run.train()
    lease = acquire_s3_lease(run.address.uri, "toy", objects=run.objects, identity=somebody(), alive=lambda _: False)
    first = note_tracking_id(S3Runs(run.address, run.objects).records("toy", lease=lease))
    assert tracking_id(records_on_s3(run)) == first
    run.objects.remove([entry.key for entry in run.objects.entries("team/runs/toy/tracking/")])
    assert tracking_id(records_on_s3(run)) is None
    second = note_tracking_id(S3Runs(run.address, run.objects).records("toy", lease=lease))
    assert second != first
    assert tracking_id(records_on_s3(run)) == second
    lease.release()
