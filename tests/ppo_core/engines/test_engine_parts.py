"""What an engine is besides its jobs: the code that counts in its key, how much room it makes, what ends it; and what
rewards are tried on."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from infra.artifacts.fingerprint import code_fingerprint
from ppo_core.engines.rollout import needed_context
from ppo_core.engines.rollout_limits import stored_dtype
from ppo_core.engines.start import as_rewards_see
from ppo_core.processes.protocol import EngineDefect, Job, JobInput
from ppo_core.processes.ranks import Ranks, first_rank_only, leading
from ppo_core.records import GenerateJob, InputError, OptimizerSettings, PromptRow
from ppo_core.spec import UpdateSpec
from ppo_core.training.service import TrainingEngine
from tests.ppo_core.engines.engine_jobs import ROOT, generate_spec
from tests.ppo_core.tiny_models import tiny_tokenizer
from tests.ppo_core.written_tables import write_prompts
from tests.waiting import FOR_EVER_S


def test_what_runs_inside_vllms_workers_counts_as_the_rollout_engines_code(tmp_path: Path) -> None:
    package = tmp_path / "ppo_core"
    shutil.copytree(ROOT / "ppo_core", package, ignore=shutil.ignore_patterns("__pycache__"))
    before = code_fingerprint("ppo_core.engines.rollout", package)
    worker = package / "engines" / "vllm_worker.py"
    text, old = worker.read_text(), "self.model_runner.reload_weights(weights_path=folder)"
    assert text.count(old) == 1
    worker.write_text(text.replace(old, "pass"))
    assert code_fingerprint("ppo_core.engines.rollout", package) != before


def test_there_is_room_for_the_longest_prompt_of_both_splits(tmp_path: Path) -> None:
    spec = GenerateJob.model_validate(generate_spec(max_response_tokens=16))
    write_prompts(
        tmp_path / "train.parquet", [PromptRow("a", "x", [1] * 3, None, {}), PromptRow("b", "", [], None, {})]
    )
    assert needed_context(tmp_path, spec) == 3 + 16
    write_prompts(tmp_path / "eval.parquet", [PromptRow("c", "x", [1] * 7, None, {})])
    for split in ("train", "eval"):
        assert needed_context(tmp_path, spec.model_copy(update={"split": split})) == 7 + 16


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "float32"}, "float32"),
        ({"dtype": None}, "float32"),
        ({}, "float32"),
    ],
)
def test_a_policy_is_sampled_in_the_precision_it_is_stored_in(
    tmp_path: Path, config: dict[str, Any], expected: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert stored_dtype(tmp_path) == expected


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[TrainingEngine]:
    """Rank 0 with a process that stands for another rank, waiting for it."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    child = subprocess.Popen(["sleep", str(FOR_EVER_S)])
    yield TrainingEngine(Ranks(0, 1, [child]))
    dist.destroy_process_group()
    child.kill()
    child.wait()


def job_reading(folder: Path) -> Job:
    spec = {"seed": 0, "model": {"path": str(folder)}}
    inputs = {"tokenizer": JobInput(folder, ""), "model": JobInput(folder, "")}
    return Job("start_policy", inputs, folder, spec, lambda *_: None)


def test_after_bad_input_no_rank_is_left_waiting_and_the_next_job_asks_for_a_new_engine(
    engine: TrainingEngine, tmp_path: Path
) -> None:
    handle = leading(engine, "start_policy")
    with pytest.raises(InputError, match="has no tokenizer"):
        handle(job_reading(tmp_path))
    with pytest.raises(EngineDefect, match="training rank 1 of 1 ended") as next_time:
        handle(job_reading(tmp_path))
    assert next_time.value.retryable


@pytest.mark.parametrize(("error", "retryable"), [(MemoryError("full"), True), (FloatingPointError("nan"), False)])
def test_other_errors_end_the_engine(engine: TrainingEngine, tmp_path: Path, error: Exception, retryable: bool) -> None:
    def fail(job: Job) -> dict[str, Any]:
        raise error

    handlers: dict[str, Callable[[Job], dict[str, Any]]] = {"fail": fail}
    engine.handlers |= handlers
    with pytest.raises(EngineDefect, match=f"{type(error).__name__}: {error}") as defect:
        leading(engine, "fail")(job_reading(tmp_path))
    assert defect.value.retryable == retryable


TRAINED: dict[str, dict[str, Any]] = {
    "finetune_policy": {"model": {"path": "m"}, "sft": {"data": "a"}},
    "train_reward_model": {"model": {"path": "m"}, "fit": {}},
    "train_dpo": {"dtype": "float32", "dpo": {}},
    "update_policy": {"model": {"path": "m"}, "iteration": 0, "update": {}, "temperature": 1.0},
}


@pytest.mark.parametrize("name", [*TRAINED, "compute_advantages"])
def test_a_job_of_another_number_of_ranks_is_refused_before_anything_is_read(
    name: str, engine: TrainingEngine, tmp_path: Path
) -> None:
    spec = {"seed": 0, **TRAINED.get(name, {}), "training": {"num_ranks": 2}}
    if name == "compute_advantages":
        update = UpdateSpec.model_validate({})
        spec = {
            **{"model": {"path": "m"}, "training": {"num_ranks": 2}, "temperature": 1.0, "advantages": {}},
            **{"max_response_tokens": 8, "optimizer": OptimizerSettings.of(update).model_dump(), "kl_coef": 0.1},
        }
    complaint = "training.num_ranks=2, but this engine was started with 1, .*: start an engine .* --num-ranks 2"
    with pytest.raises(InputError, match=complaint):
        engine.handlers[name](Job(name, {}, tmp_path / "nowhere", spec, lambda *_: None))


def test_several_ranks_never_meet_at_a_port() -> None:
    with pytest.raises(ValueError, match=r"2 ranks need a meeting.*open_meeting"):
        Ranks(0, 2)


def test_an_error_that_only_rank_0_can_have_ends_the_engine() -> None:
    with pytest.raises(EngineDefect, match="InputError: no causal LM"), first_rank_only():
        raise InputError("no causal LM")


def test_a_trial_shows_rewards_what_they_will_see_of_a_response() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>"]})
    assert as_rewards_see(tokenizer, "<think> w3 <eos>") == "w3"
    assert as_rewards_see(tokenizer, "w3, as it is") == "w3, as it is"
