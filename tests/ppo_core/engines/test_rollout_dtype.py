"""The sampler in bf16, while the policy's weights stay fp32: the same distribution, within what rounding does."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from infra.engines.hardware import has_bf16_units
from ppo_core.engines.rollout_limits import sampling_dtype
from ppo_core.records import RolloutRow
from ppo_core.spec import RolloutSpec, TrainingSpec
from ppo_core.spec.sections import ComputeDtype
from tests.ppo_core.engines.engine_jobs import Client, write_dataset
from tests.ppo_core.tiny_policies import forward_logprobs, make_policy

pytest_plugins = ["tests.ppo_core.engines.engine_fixtures"]

PROMPTS = [[4 + (13 * n + k) % 60 for k in range(3 + n)] for n in range(4)]
SAMPLES = {"samples_per_prompt": 8, "max_response_tokens": 24}


def difference(checkpoint: Path, rows: list[RolloutRow]) -> float:
    """The largest of the sampler's logprobs to those of a pass in fp32."""
    return max(
        abs(told - exact)
        for row in rows
        for told, exact in zip(
            row.sampler_logprobs,
            forward_logprobs(checkpoint / "policy", row.prompt_token_ids, row.response_token_ids, temperature=1.0),
            strict=True,
        )
    )


def test_logprobs_are_those_of_the_weights_swapped_in_but_for_rounding(rollout: Client, tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path / "dataset", PROMPTS)
    checkpoints = [tmp_path / name for name in "AB"]
    for seed, checkpoint in enumerate(checkpoints):
        weights = make_policy(checkpoint / "policy", tied=True, seed=seed) / "model.safetensors"
        mild = {name: tensor * 0.2 if tensor.ndim == 2 else tensor for name, tensor in load_file(weights).items()}
        save_file(mild, weights, metadata={"format": "pt"})
    answers: dict[ComputeDtype, list[list[RolloutRow]]] = {
        dtype: [
            rollout.generate(checkpoint, dataset, num_prompts=len(PROMPTS), compute_dtype=dtype, **SAMPLES)
            for checkpoint in checkpoints
        ]
        for dtype in ("bfloat16", "float32", "auto")
    }
    for number, checkpoint in enumerate(checkpoints):
        assert 1e-4 < difference(checkpoint, answers["bfloat16"][number]) < 0.05
        assert difference(checkpoint, answers["float32"][number]) < 1e-5
    # Swapped weights that were left half old would show: B's tokens are not likely under A.
    assert difference(checkpoints[0], answers["bfloat16"][1]) > 0.5
    assert answers["auto"] == answers["float32"]  # so small a model gains nothing by bf16 on a CPU


@pytest.mark.parametrize(
    ("sampler", "trainer", "wanted"),
    [
        ("auto", "auto", "auto"),
        ("auto", "float32", "float32"),
        ("auto", "bfloat16", "bfloat16"),
        ("float32", "bfloat16", "float32"),
        ("bfloat16", "float32", "bfloat16"),
    ],
)
def test_it_follows_the_training_unless_it_is_said(
    sampler: ComputeDtype, trainer: ComputeDtype, wanted: ComputeDtype
) -> None:
    assert RolloutSpec(dtype=sampler).compute_dtype(TrainingSpec(compute_dtype=trainer)) == wanted


def test_weights_in_bf16_are_computed_with_in_bf16_and_others_where_it_pays() -> None:
    small, large = (AutoConfig.for_model("llama", hidden_size=size) for size in (128, 256))
    assert sampling_dtype(small, "bfloat16", "auto") == sampling_dtype(small, "float32", "bfloat16") == "bfloat16"
    assert sampling_dtype(small, "float32", "auto") == sampling_dtype(large, "float32", "float32") == "float32"
    assert sampling_dtype(large, "float32", "auto") == ("bfloat16" if has_bf16_units() else "float32")
