"""vLLM starts while the policy is fine-tuned. Whatever comes of that, the run is the same."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import psutil
import pytest

from infra.engines.protocol import EngineClosed, EngineDied, EngineJob, EngineJobError, EngineProgress
from ppo_core.records import SamplingJob
from tasks.evaluate_policy import evaluate_policy
from tasks.finetune_policy import finetune_policy
from tasks.prepare_dataset import prepare_dataset
from tasks.stages import sharded_sampling
from tasks.stages.context import RunContext
from tasks.start_policy import start_policy
from tests.processes import outlived
from tests.tasks.run_contexts import run_context, smoke_spec
from tests.tasks.toy_engines import ToyEngines
from tests.tasks.toy_runs import ToyRun, digests, ended_well
from tests.waiting import LONG_S, until

SHORT = ("iterations=1",)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests are of a machine without."""
    monkeypatch.setattr(sharded_sampling, "has_nvidia_gpu", lambda: False)


def start(context: RunContext) -> None:
    """Iteration 0."""
    dataset = prepare_dataset.fn(context)
    checkpoint = start_policy.fn(context, dataset, finetune_policy.fn(context, dataset))
    evaluate_policy.fn(context, checkpoint, dataset)


def test_it_starts_beside_the_fine_tuning_and_the_first_sampling_waits_for_it(tmp_path: Path) -> None:
    run, tuning, wanted, order = ToyRun(tmp_path), Event(), Event(), list[str]()

    def starts_slowly() -> None:
        assert tuning.wait(LONG_S)
        assert wanted.wait(LONG_S)
        order.append("ready")

    def see(progress: EngineProgress) -> None:
        if progress.engine == "rollout":
            wanted.set()

    run.engines.before("prepare_sampling", 1, starts_slowly)
    run.engines.before("finetune_policy", 1, tuning.set)
    run.engines.before("answer_held_out", 1, lambda: order.append("sampled"))
    with ended_well(run.context()) as context:
        start(replace(context, on_progress=see))
    assert order == ["ready", "sampled"]
    assert context.preparing == {}
    assert list((tmp_path / "store" / "scratch").iterdir()) == []


@pytest.mark.parametrize(
    "failure",
    [
        lambda: EngineDied("engine 'rollout': the process was killed by SIGKILL"),
        lambda: EngineJobError("engine 'rollout': EngineDefect: no memory", error_type="EngineDefect"),
    ],
    ids=["dies", "refuses"],
)
def test_a_run_whose_preparation_fails_is_the_same(
    tmp_path: Path, prefect_server: None, failure: Callable[[], Exception]
) -> None:
    well, ill = ToyRun(tmp_path / "well", SHORT), ToyRun(tmp_path / "ill", SHORT)

    def fails() -> None:
        raise failure()

    ill.engines.before("prepare_sampling", 1, fails)
    assert digests(ill.train()) == digests(well.train())
    assert ill.engines.done == well.engines.done
    assert ill.engines.asked["prepare_sampling"] == well.engines.asked["prepare_sampling"] == 1


def test_every_engine_that_samples_is_prepared_for_the_jobs_that_come(tmp_path: Path) -> None:
    seen: list[EngineJob] = []

    def note(engines: ToyEngines, job: EngineJob) -> dict[str, Any]:
        seen.append(job)
        return {}

    run = ToyRun(tmp_path, ("rollout.stop=[';']", "rollout.dtype=bfloat16"), engines=ToyEngines(rollout_engines=3))
    run.engines.jobs["prepare_sampling"] = note
    with ended_well(run.context()) as context:
        start(context)
    spec = context.spec
    wanted = SamplingJob(
        max_response_tokens=spec.rollout.max_response_tokens,
        stop=(";",),
        model=spec.model,
        compute_dtype="bfloat16",
        kv_cache_gib=spec.engines.kv_cache_gib,
        tensor_parallel_size=1,
    )
    assert [job.spec for job in seen] == [wanted.model_dump(mode="json")] * 3
    assert len({job.output for job in seen}) == 3


def test_where_nothing_is_fine_tuned_or_nothing_sampled_there_is_nothing_to_prepare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ToyRun(tmp_path)
    with ended_well(run.context()) as context:
        start(context)
    with ended_well(run.context()) as context:  # all is in the store
        start(context)
    assert run.engines.asked["prepare_sampling"] == 1
    del run.engines.handles["rollout"]  # as in a flow that only fine-tunes
    with ended_well(run.context("seed=1")) as context:
        finetune_policy.fn(context, prepare_dataset.fn(context))
    monkeypatch.setattr(sharded_sampling, "has_nvidia_gpu", lambda: True)
    other = ToyRun(tmp_path / "gpu")
    with ended_well(other.context()) as context:
        start(context)
    assert run.engines.asked["prepare_sampling"] == 1
    assert other.engines.asked["prepare_sampling"] == 0


def test_with_the_engines_the_preparation_ends(tmp_path: Path) -> None:
    before, context = children(), run_context(smoke_spec(), tmp_path)
    job = EngineJob("prepare_sampling", {}, context.store.scratch(), {})
    context.prepare("rollout", job)
    under_way: Future[Any] = context.preparing["rollout"]
    until(lambda: bool(children() - before), "the engine is started")
    started = children() - before
    context.engines.close()
    with pytest.raises(EngineClosed):
        under_way.result(LONG_S)
    assert outlived(started) == []
    assert job.output is not None
    assert not job.output.exists()


def children() -> set[int]:
    """The processes that this one has started."""
    return {process.pid for process in psutil.Process().children()}
