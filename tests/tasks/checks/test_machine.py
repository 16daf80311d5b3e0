"""A run says which settings have no effect on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.engines.hardware import has_bf16_units
from ppo_core.records import InputError
from ppo_core.spec import DpoSpec, RewardModelSpec, RlhfSpec, RunSpec
from tasks.checks import machine
from tasks.checks.any_spec import check_any
from tasks.checks.machine import check_gpus, machine_notes
from tasks.checks.preferences import before_start
from tests.tasks.run_contexts import ARITHMETIC, smoke_spec


@pytest.mark.parametrize(
    ("flags", "expected"),
    [("fpu amx_bf16 avx2", True), ("fpu avx512_bf16", True), ("fpu avx512f avx512_bf16x", False), ("", False)],
)
def test_units_are_read_from_the_processor(tmp_path: Path, flags: str, *, expected: bool) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nmodel name\t: amx_bf16\nflags\t\t: {flags}\n")
    assert has_bf16_units(cpuinfo) is expected
    assert not has_bf16_units(tmp_path / "none")


@pytest.mark.parametrize(
    ("dtype", "units", "gpu", "noted"),
    [
        ("bfloat16", False, False, True),
        ("bfloat16", True, False, False),
        ("bfloat16", False, True, False),
        ("auto", False, False, False),
        ("float32", False, False, False),
    ],
)
def test_products_in_bf16_without_units_are_noted(
    monkeypatch: pytest.MonkeyPatch, dtype: str, *, units: bool, gpu: bool, noted: bool
) -> None:
    monkeypatch.setattr(machine, "has_bf16_units", lambda: units)
    monkeypatch.setattr(machine, "has_nvidia_gpu", lambda: gpu)
    keys = ("training.compute_dtype", "rollout.dtype", *(["model.dtype"] if dtype != "auto" else []))
    for key in keys:
        notes = machine_notes(smoke_spec(f"{key}={dtype}", "training.zero_stage=1"))
        assert [note.startswith(f"{key}=bfloat16 is slow here") for note in notes] == [True] * noted


@pytest.mark.usefixtures("shared_engine")
def test_a_check_says_what_a_start_says_of_the_spec_and_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PPOFLOW_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(machine, "has_bf16_units", lambda: False)
    monkeypatch.setattr(machine, "has_nvidia_gpu", lambda: False)
    changes = ("iterations=2", "update.warmup_iterations=9", "training.compute_dtype=bfloat16")
    run = smoke_spec(*changes)
    assert len(said := [*run.notes(), *machine_notes(run)]) == 2
    whole = RlhfSpec.from_yaml(ARITHMETIC.parent / "helpful" / "rlhf.yaml", [f"run.{change}" for change in changes])
    for spec in (run, whole):
        assert [note for note in check_any(spec, "new").notes if note in said] == said


def test_the_number_of_ranks_that_is_named_divides_the_batches() -> None:
    """A minibatch of the smoke spec has 16 responses, an SFT batch 32: of what 6 GPUs could do, 4 divides both."""
    with pytest.raises(InputError, match=r"training.num_ranks=8 is more than the 6 GPUs here, .* lower it to 4$"):
        check_gpus(smoke_spec("training.num_ranks=8"), 6)


@pytest.mark.parametrize(("cores", "noted"), [(3, "lower it to 2"), (8, "")])
def test_more_ranks_than_cores_are_noted(monkeypatch: pytest.MonkeyPatch, cores: int, noted: str) -> None:
    monkeypatch.setattr(machine, "has_nvidia_gpu", lambda: False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    notes = machine_notes(smoke_spec("training.num_ranks=4"))
    assert [note.endswith(noted) for note in notes] == [True] * bool(noted)


def on_preferences(*overrides: str) -> tuple[RewardModelSpec, DpoSpec]:
    folder = ARITHMETIC.parent / "helpful"
    return (
        RewardModelSpec.from_yaml(folder / "reward_model.yaml", list(overrides)),
        DpoSpec.from_yaml(folder / "dpo.yaml", list(overrides)),
    )


def test_trainings_on_preferences_are_told_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PPOFLOW_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(machine, "has_nvidia_gpu", lambda: False)
    monkeypatch.setattr(machine, "has_bf16_units", lambda: False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    for spec in on_preferences("training.num_ranks=4", "training.compute_dtype=bfloat16"):
        ranks, products = before_start(spec, "new")
        assert ranks.startswith("training.num_ranks=4 is more than the 2 cores here")
        assert products.startswith("training.compute_dtype=bfloat16 is slow here")
    dpo = DpoSpec.from_yaml(ARITHMETIC.parent / "helpful" / "dpo.yaml", ["rollout.dtype=bfloat16"])
    assert before_start(dpo, "new")[0].startswith("rollout.dtype=bfloat16 is slow here")


def test_nor_do_they_get_more_gpus_than_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PPOFLOW_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(machine, "has_nvidia_gpu", lambda: True)
    monkeypatch.setattr(machine, "visible_gpus", lambda: ["0", "1"])
    for spec in on_preferences("training.num_ranks=4"):
        with pytest.raises(InputError, match=r"num_ranks=4 is more than the 2 GPUs here, .* lower it to 2$"):
            before_start(spec, "new")


def test_defaults_for_new_models_are_noted_beside_one_that_is_there() -> None:
    start = {"dataset": {"train": "p"}, "model": {"path": "folder"}, "reward": {"function": "r.py:f"}}
    rate, cut = machine_notes(RunSpec.model_validate(start))
    assert "update.learning_rate=0.0001, the default, is for small models" in rate
    assert cut == "responses are cut at 48 tokens, the default: set rollout.max_response_tokens"
    chosen = {"update": {"learning_rate": 2e-6}, "rollout": {"max_response_tokens": 512}}
    assert machine_notes(RunSpec.model_validate({**start, **chosen})) == []
    adapters = {"model": {"path": "folder", "lora": {"rank": 8}}}
    assert machine_notes(RunSpec.model_validate({**start, **adapters})) == [cut]
    new = {"model": {"config": {"model_type": "llama"}, "tokenizer": "t"}}
    assert machine_notes(RunSpec.model_validate({**start, **new})) == []
