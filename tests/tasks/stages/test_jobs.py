"""An order is plain data: it can be done elsewhere, with the user's folders shipped along, and gives the same."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from infra.artifacts import open_store
from infra.artifacts.download_cache import ArtifactCache
from infra.artifacts.export import export_part
from infra.artifacts.s3_store import S3Store
from infra.engines.protocol import EngineDied, EngineInput, EngineJob, EngineProgress, EngineReply, OnProgress
from infra.storage.objects import S3Address
from ppo_core.records import InputError, ScoreJob
from tasks.stages import jobs
from tasks.stages.context import RunContext, open_run_context
from tasks.stages.engine_programs import code_facts, plan_engines
from tasks.stages.engines import resources_of
from tasks.stages.jobs import DiskSpaceError, StageJob, StageResult, UploadedSource, run_job
from tasks.stages.references import RolloutsRef
from tasks.stages.source_upload import upload_source
from tasks.stages.stage import LASTING, StageSpec, job_of
from tasks.stages.table import START_POLICY
from tests.infra.storage.s3.memory_objects import MemoryObjects
from tests.tasks.run_contexts import ignore, run_context, smoke_spec
from tests.tasks.toy_engines import ToyEngines


@pytest.fixture
def context(tmp_path: Path) -> RunContext:
    """Means with toy engines."""
    return run_context(smoke_spec(), tmp_path / "home", engines=ToyEngines())


@pytest.fixture
def folder(context: RunContext, tmp_path: Path) -> EngineInput:
    """A user's model, with what a download leaves beside it."""
    files = {
        "config.json": "{}",
        "onnx/model.onnx": "weights",
        ".git/config": "x",
        ".env": "SECRET=1",
        "a/.cache/x": "",
    }
    for name, text in files.items():
        (tmp_path / "model" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "model" / name).write_text(text)
    return context.folder_input(str(tmp_path / "model"))


def stored(context: RunContext, shipped: UploadedSource) -> dict[str, str]:
    """The files of a shipped folder."""
    place = context.store.fetch(shipped.ref)
    files = [path for path in place.rglob("*") if path.is_file() and path.name != "manifest.json"]
    return {path.relative_to(place).as_posix(): path.read_text() for path in files}


def test_a_shipped_folder_is_stored_once_without_what_is_hidden(context: RunContext, folder: EngineInput) -> None:
    shipped = upload_source(context, folder)
    assert stored(context, shipped) == {"config.json": "{}", "onnx/model.onnx": "weights"}
    assert (shipped.digest, shipped.ref.kind, shipped.ref.key) == (folder.digest, "source", folder.digest)
    (folder.path / "config.json").write_text("changed")
    assert upload_source(context, folder) == shipped  # what is in the store is what the key says


def test_a_copy_of_a_policy_is_shipped_without_the_manifest_that_says_when_it_was_made(
    context: RunContext, tmp_path: Path
) -> None:
    made = context.store.scratch()
    (made / "policy").mkdir()
    (made / "policy/config.json").write_text("{}")
    ref = context.store.put(made, "checkpoint", "c" * 64)
    copy = tmp_path / "best-policy"
    export_part(context.store.fetch(ref), context.store.manifest(ref), ref, "policy", copy)
    shipped = upload_source(context, context.folder_input(str(copy)))
    assert stored(context, shipped) == {"config.json": "{}"}
    assert shipped.digest == context.folder_input(str(copy)).digest


def test_a_folder_that_has_changed_meanwhile_is_refused(context: RunContext, folder: EngineInput) -> None:
    (folder.path / "config.json").write_text("changed")
    with pytest.raises(InputError, match="has changed since this run read it"):
        upload_source(context, folder)
    assert context.store.find("source", folder.digest) is None


def test_an_order_survives_pickling_and_a_shipped_folder_tells_its_own_digest(
    context: RunContext, folder: EngineInput
) -> None:
    job = ScoreJob(reward=context.spec.reward, answer_column="answer", split="train")
    work = StageSpec(replace(START_POLICY, job="echo", made=RolloutsRef), job, paths={"model": folder})
    here = job_of(context, work, "k")
    assert here.folders == {"model": folder}
    there = StageJob(**{**vars(here), "folders": {"model": upload_source(context, folder)}})
    assert pickle.loads(pickle.dumps(there)) == there
    assert there.folders["model"].digest == folder.digest


@pytest.mark.parametrize("failure", [EngineDied("no output"), OSError(errno.ENOSPC, "No space left on device")])
def test_a_disk_that_is_full_is_named_and_the_job_not_tried_again(
    context: RunContext, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    """An engine that cannot even write its log only dies."""

    class Engine:
        def run(self, *_: Any, **__: Any) -> EngineReply:
            raise failure

    job = StageJob(job="echo", spec={}, kind="rollouts", key="0" * 64, inputs={})
    with pytest.raises(type(failure)) if isinstance(failure, EngineDied) else pytest.raises(DiskSpaceError):
        run_job(job, context.store, cast(Any, Engine()), silence_s=1, on_progress=None)
    usage = shutil.disk_usage(context.store.root)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=2**20))
    with pytest.raises(DiskSpaceError, match=r"1.0 MiB are free at .*, and job echo failed there: make room") as full:
        run_job(job, context.store, cast(Any, Engine()), silence_s=1, on_progress=None)
    assert full.value.__cause__ is failure
    assert DiskSpaceError in LASTING
    assert list((Path(context.store.root) / "scratch").iterdir()) == []


def test_what_a_long_job_reads_late_is_there_although_the_cache_makes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "FETCH_AGAIN_S", 0.0)
    clock = [0.0]
    cache = ArtifactCache(tmp_path / "cache", 0, held_s=10.0, now=lambda: clock[0])
    store = S3Store(S3Address.parse("s3://memory/store"), MemoryObjects(), cache, libraries={})
    made = store.scratch()
    (made / "late").write_text("content")
    ref = store.put(made, "experience", "e" * 64)

    class Engine:
        def run(self, job: EngineJob, *, on_progress: OnProgress, **_: Any) -> EngineReply:
            late, clock[0] = job.inputs["replay_1"].path / "late", 100.0
            cache.make_room()
            assert not late.exists()
            os.utime(job.output, (0, 0))
            on_progress(EngineProgress("training", job.name, 1, 2, "replay"))
            assert job.output.stat().st_mtime > 0, "another machine would take it for abandoned"
            return EngineReply({"read": late.read_text()}, 0.0)

    job = StageJob(job="echo", spec={}, kind="rollouts", key="0" * 64, inputs={"replay_1": ref})
    done = run_job(job, store, cast(Any, Engine()), silence_s=1, on_progress=None)
    assert done.result == {"read": "content"}


def test_what_fails_when_the_store_has_the_folder_is_told_as_it_is(context: RunContext) -> None:
    class Engine:
        def run(self, job: EngineJob, **_: Any) -> EngineReply:
            shutil.rmtree(job.output)
            raise OSError(errno.EIO, "Input/output error")

    job = StageJob(job="echo", spec={}, kind="rollouts", key="0" * 64, inputs={})
    with pytest.raises(OSError, match="Input/output error"):
        run_job(job, context.store, cast(Any, Engine()), silence_s=1, on_progress=None)


def test_engines_on_other_machines_need_a_store_that_all_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PPOFLOW_HOME", str(tmp_path / "home"))
    refused = pytest.raises(InputError, match=r"engines\.backend=ray with the store .*home/store.*PPOFLOW_STORE=s3://")
    with refused, open_run_context(RunContext, smoke_spec("engines.backend=ray"), "test", ignore):
        raise AssertionError("opened")
    assert not (tmp_path / "home").exists()


def test_engines_ask_for_their_gpus_unless_the_spec_says_otherwise() -> None:
    spec = smoke_spec("engines.tensor_parallel_size=2", "training.num_ranks=4", "training.microbatch_size=4")
    assert (resources_of("rollout", spec), resources_of("training", spec)) == ({"GPU": 2.0}, {"GPU": 4.0})
    named = smoke_spec("engines.rollout_resources.rollout=1", "engines.training_resources.training=2")
    assert (resources_of("rollout", named), resources_of("training", named)) == ({"rollout": 1.0}, {"training": 2.0})


def test_several_rollout_engines_on_one_machine_take_its_gpus_in_turn() -> None:
    two = ["engines.rollout_engines=2", "engines.tensor_parallel_size=2"]
    plans = plan_engines(smoke_spec(*two))
    assert [plans[name].gpus for name in ("rollout", "rollout-2", "training")] == [(0, 1), (2, 3), None]
    assert plan_engines(smoke_spec())["rollout"].gpus is None
    assert plan_engines(smoke_spec(*two, "engines.backend=ray"))["rollout-2"].gpus is None


def test_the_facts_of_the_code_name_all_that_a_job_runs() -> None:
    facts = code_facts("rollout")
    assert facts == code_facts("rollout")
    assert facts["engine's code"] != code_facts("training")["engine's code"]
    assert facts["jobs' code"] == code_facts("training")["jobs' code"]


@pytest.mark.parametrize("same", [True, False])
def test_where_another_process_has_stored_its_own_that_one_counts(context: RunContext, same: bool) -> None:
    """Its facts are those of the result; an engine that goes on with what it has made is told to forget it."""

    class Engine:
        def __init__(self, loss: float, meanwhile: Callable[[], object] = lambda: None) -> None:
            self.loss, self.meanwhile, self.jobs = loss, meanwhile, list[str]()

        def run(self, job: EngineJob, **_: Any) -> EngineReply:
            self.jobs.append(job.name)
            if job.output is None:
                return EngineReply({}, 0.0)
            (job.output / "weights").write_text(str(self.loss))
            self.meanwhile()
            return EngineReply({"metrics": {"loss": self.loss, "norm": float("nan")}}, 0.0)

    job = StageJob(job="update_policy", spec={}, kind="checkpoint", key="0" * 64, holds=True)
    first = Engine(0.25)
    engine = Engine(0.25 if same else 0.75, lambda: done(first))

    def done(engine: Engine) -> StageResult:
        return run_job(job, open_store(context.store.root), cast(Any, engine), silence_s=1, on_progress=None)

    result = done(engine)
    assert (context.store.fetch(result.ref) / "weights").read_text() == "0.25"
    assert result.result["metrics"]["loss"] == 0.25
    assert first.jobs == ["update_policy"]
    assert engine.jobs == ["update_policy", *([] if same else ["forget"])]
