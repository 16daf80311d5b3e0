"""Engines that take turns on a GPU never hold it at the same time, and no result depends on it."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoConfig

from infra import settings as settings_module
from infra.engines.protocol import EngineDied
from ppo_core.engines.model_checks import dtype_of_sampler
from ppo_core.records import InputError
from ppo_core.spec import RunSpec, SpecError
from tasks.checks import machine
from tasks.checks.machine import check_job
from tasks.stages import engine_programs
from tasks.stages.dataset_job import dataset_job
from tasks.stages.engine_programs import plan_engines
from tests.tasks.run_contexts import smoke_spec
from tests.tasks.toy_runs import ToyRun, digests
from tests.tasks.toy_turns import CountingEngines

SHORT = ("iterations=2", "evaluation.every=2")


def with_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """A machine with so many, and another one that is not to be used."""
    for module in (settings_module, engine_programs, machine):
        monkeypatch.setattr(module, "has_nvidia_gpu", lambda: count > 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(str(number) for number in range(count)))


def trained(home: Path, *, together: bool, rollout_engines: int = 1) -> tuple[ToyRun, CountingEngines]:
    engines = CountingEngines(together=together, rollout_engines=rollout_engines)
    run = ToyRun(home, SHORT, engines=engines)
    run.train()
    return run, engines


@pytest.mark.parametrize("rollout_engines", [1, 2])
def test_one_side_holds_the_gpu_at_a_time_and_the_same_comes_out(
    tmp_path: Path, prefect_server: None, rollout_engines: int
) -> None:
    run, in_turns = trained(tmp_path / "together", together=True, rollout_engines=rollout_engines)
    apart, at_once = trained(tmp_path / "apart", together=False)
    assert all("training" not in held or held == ("training",) for held in in_turns.held)
    assert ("rollout", "training") in at_once.held
    assert digests(run.records()) == digests(apart.records())
    measured = run.records()[2].metrics
    assert measured["memory/rollout_freed_gib"] == 2.0 * rollout_engines
    assert measured["memory/training_freed_gib"] == 3.0
    assert not [name for name in apart.records()[2].metrics if name.startswith("memory/")]


def test_rewards_on_a_gpu_are_one_more_side(tmp_path: Path, prefect_server: None) -> None:
    engines = CountingEngines(together=True, rollout_engines=2, rewards_on_gpu=True)
    run = ToyRun(tmp_path / "together", SHORT, engines=engines)
    run.train()
    alone = {("training",), ("scoring",), ("rollout",), ("rollout-2",), ("rollout", "rollout-2")}
    assert {"training", "scoring", "rollout"} <= {name for held in engines.held for name in held}
    assert set(engines.held) <= alone
    apart, _ = trained(tmp_path / "apart", together=False)
    assert digests(run.records()) == digests(apart.records())
    measured = run.records()[2].metrics
    # With the scores of the rollouts, and those of the evaluation.
    assert measured["memory/scoring_freed_gib"] == 1.0


def test_an_engine_that_dies_making_room_is_not_asked_again(tmp_path: Path, prefect_server: None) -> None:
    engines = CountingEngines(together=True)
    run = ToyRun(tmp_path / "home", SHORT, engines=engines)

    def dies() -> None:
        engines.holds.pop("rollout")
        raise EngineDied("engine 'rollout', job 'make_room': the process was killed by SIGKILL")

    engines.before("make_room", 2, dies)
    assert len(run.train()) == 3
    assert all("training" not in held or held == ("training",) for held in engines.held)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["engines.backend=ray"], "placement=together with backend=ray: .* set backend to local"),
        (
            ["schedule=overlapped", "update.importance_correction=token"],
            "schedule=overlapped has .* engines.placement=together one after the other: set schedule to synchronous",
        ),
    ],
)
def test_engines_that_work_elsewhere_or_at_the_same_time_take_no_turns(changes: list[str], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        smoke_spec("engines.placement=together", *changes)


@pytest.mark.parametrize(
    ("gpus", "changes", "turns", "seen"),
    [
        (0, [], False, [None]),
        (1, [], True, [None]),
        (1, ["engines.placement=apart"], False, [None]),
        (1, ["schedule=overlapped", "update.importance_correction=token"], False, [None]),
        (2, [], False, [(1,)]),
        (2, ["engines.placement=together"], True, [None]),
        (4, ["training.num_ranks=2", "engines.rollout_engines=2"], False, [(2,), (3,)]),
        (3, ["training.num_ranks=2", "engines.rollout_engines=2"], True, [(0,), (1,)]),
        (4, ["training.num_ranks=2", "engines.tensor_parallel_size=2"], False, [(2, 3)]),
        (1, ["engines.backend=ray"], False, [None]),
    ],
)
def test_who_gets_which_gpus(
    monkeypatch: pytest.MonkeyPatch, gpus: int, changes: list[str], seen: list[object], *, turns: bool
) -> None:
    with_gpus(monkeypatch, gpus)
    rollout = [plan for plan in plan_engines(smoke_spec(*changes)).values() if plan.role == "rollout"]
    assert [plan.gpus for plan in rollout] == seen
    assert {plan.takes_turns for plan in rollout} == {turns}


@pytest.mark.parametrize(
    ("gpus", "changes", "turns"),
    [
        (1, [], True),
        (1, [("device", "cuda")], True),
        (1, [("device", "cpu")], False),
        (2, [], False),
        (0, [], False),
    ],
)
def test_scoring_takes_turns_where_its_models_are_on_gpus_that_engines_share(
    monkeypatch: pytest.MonkeyPatch, gpus: int, changes: list[tuple[str, str]], *, turns: bool
) -> None:
    with_gpus(monkeypatch, gpus)
    plan = plan_engines(scored_by_a_model(**dict(changes)))["scoring"]
    assert plan.takes_turns == turns
    assert plan_engines(smoke_spec())["scoring"].takes_turns is False


def scored_by_a_model(**options: object) -> RunSpec:
    spec = smoke_spec().model_dump()
    return RunSpec.model_validate(spec | {"reward": {"sources": [{"kind": "model", "path": "rm", **options}]}})


@pytest.mark.parametrize(
    ("gpus", "options", "message"),
    [
        (0, {"device": "cuda"}, "the reward model asks for device=cuda, and there is no GPU here: set it to cpu, or"),
        (1, {"num_ranks": 2}, "num_ranks=2 of the reward model is more than the 1 GPUs here, .* lower it to 1, or set"),
        (1, {"num_ranks": 2, "device": "cuda"}, "num_ranks=2 of the reward model is more than the 1 GPUs here"),
    ],
)
def test_a_reward_model_gets_no_more_gpus_than_there_are(gpus: int, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        machine.check_reward_gpus(scored_by_a_model(**options), gpus)


def test_the_check_refuses_a_reward_model_that_asks_for_a_gpu_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, 0)
    spec = scored_by_a_model(device="cuda")
    with pytest.raises(ValueError, match="asks for device=cuda, and there is no GPU here"):
        check_job(spec, dataset_job(spec))


def test_on_cpus_a_reward_model_has_as_many_ranks_as_it_likes() -> None:
    machine.check_reward_gpus(scored_by_a_model(num_ranks=8), 0)
    machine.check_reward_gpus(scored_by_a_model(num_ranks=8, device="cpu"), 1)


def test_gpus_keep_the_names_that_the_user_gave_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with_gpus(monkeypatch, 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    settings = engine_programs.Settings(home=tmp_path)
    assert engine_programs.rollout_environment(settings, gpus=(1,))["CUDA_VISIBLE_DEVICES"] == "5"


@pytest.mark.parametrize(
    ("gpus", "changes", "sharing"),
    [(1, [], "turns"), (1, ["engines.placement=apart"], "same"), (2, [], "own")],
)
def test_the_check_knows_how_engines_share_the_gpus(
    monkeypatch: pytest.MonkeyPatch, gpus: int, changes: list[str], sharing: str
) -> None:
    with_gpus(monkeypatch, gpus)
    table = "0, GPU-a, 81559\n1, GPU-b, 81559\n7, GPU-c, 4096\n"
    monkeypatch.setattr(machine, "nvidia_smi", lambda query: table if query == "index,uuid,memory.total" else "")
    spec = smoke_spec(*changes)
    job = check_job(spec, dataset_job(spec))
    assert (job.gpu, job.gpus, job.sharing) == (True, gpus, sharing)
    assert job.gpu_gib == pytest.approx(79.6, abs=0.1)
    assert job.learner is not None
    assert job.learner.training == spec.training
    assert job.fixed == ()


@pytest.mark.parametrize(
    ("asked", "capabilities", "counted"),
    [
        ("auto", "0, GPU-a, 8.0\n1, GPU-b, 9.0", "auto"),
        ("auto", "0, GPU-a, 7.5\n1, GPU-b, 9.0", "float32"),
        ("auto", "7, GPU-c, 7.5", "auto"),
        ("auto", "0, GPU-a, [N/A]", "auto"),
        ("auto", "", "auto"),
        ("bfloat16", "0, GPU-a, 7.5", "bfloat16"),
    ],
)
def test_the_check_counts_products_in_bf16_where_the_gpus_have_units_for_them(
    monkeypatch: pytest.MonkeyPatch, asked: str, capabilities: str, counted: str
) -> None:
    with_gpus(monkeypatch, 2)
    monkeypatch.setattr(machine, "nvidia_smi", lambda query: capabilities if query.endswith("compute_cap") else "")
    spec = smoke_spec(f"training.compute_dtype={asked}")
    if "bfloat16" in (asked, counted):
        with pytest.raises(
            InputError, match=r"bfloat16 only on GPUs of compute capability 8 .*: set rollout.dtype=float"
        ):
            check_job(spec, dataset_job(spec))
        spec = spec.with_overrides(["rollout.dtype=float32"])
        assert check_job(spec, dataset_job(spec)).sampler_dtype == "float32"
    else:
        assert check_job(spec, dataset_job(spec)).sampler_dtype == counted
    job = check_job(spec, dataset_job(spec))
    assert job.learner is not None
    assert job.learner.training.compute_dtype == counted
    assert ("rollout.dtype" in job.fixed) == ("0, GPU-a, 7.5" in capabilities)


def test_weights_in_bf16_are_not_sampled_from_on_gpus_without_units_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, 1)
    monkeypatch.setattr(machine, "nvidia_smi", lambda query: "0, GPU-a, 7.5" if query.endswith("compute_cap") else "")
    spec = smoke_spec("model.dtype=bfloat16", "training.zero_stage=1")
    with pytest.raises(InputError, match=r"one here has less: set model.dtype=float32$"):
        check_job(spec, dataset_job(spec))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_sampler_is_counted_as_the_spec_has_it(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    other = "float32" if dtype == "bfloat16" else "bfloat16"
    spec = smoke_spec(f"rollout.dtype={dtype}", f"training.compute_dtype={other}")
    for gpus in (0, 2):
        with_gpus(monkeypatch, gpus)
        job = check_job(spec, dataset_job(spec))
        assert job.sampler_dtype == dtype
        assert dtype_of_sampler(AutoConfig.for_model("llama", hidden_size=64), job) == dtype


def test_remedies_that_the_spec_would_refuse_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, 1)
    overlapped = smoke_spec("schedule=overlapped", "update.importance_correction=token", "algorithm.kind=ppo_shared")
    assert set(check_job(overlapped, dataset_job(overlapped)).fixed) == {"engines.placement", "model.lora.rank"}


def test_a_variable_alone_makes_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(settings_module, "has_nvidia_gpu", lambda: False)
    assert settings_module.visible_gpus() == []


def test_more_engines_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = smoke_spec("training.num_ranks=2", "engines.rollout_engines=3")
    with pytest.raises(ValueError, match=r"training.num_ranks=2 is more than the 1 GPUs here, .*: lower it to 1"):
        machine.check_gpus(spec, 1)
    with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES hides every GPU of this machine: unset it"):
        machine.check_gpus(spec, 0)
    with pytest.raises(ValueError, match="rollout_engines=3 of tensor_parallel_size=1 need 3 GPUs, and there are 2"):
        machine.check_gpus(spec, 2)
