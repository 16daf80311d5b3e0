"""Checkpoints: exact over a restart in every ZeRO stage, the same from any number of ranks, readable by all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.ppo_core.tiny_models import tiny_policy
from tests.ppo_core.training.update_cases import BF16, FP32, checkpoint_folder

NAMES = ("policy/model", "critic/model", "critic/value_head", "optimizer/policy-00000", "optimizer/critic-00000")
FP32_STAGES = range(4)


def tensors_of(folder: Path) -> dict[str, Tensor]:
    files = {name: load_file(folder / f"{name}.safetensors") for name in NAMES}
    return {f"{name}:{key}": tensor for name, tensors in files.items() for key, tensor in tensors.items()}


def largest_difference(one: Path, other: Path) -> float:
    left, right = tensors_of(one), tensors_of(other)
    assert left.keys() == right.keys()
    return max(float((left[key].double() - right[key].double()).abs().max()) for key in left)


def assert_identical(one: Path, other: Path) -> None:
    for name in NAMES:
        file = f"{name}.safetensors"
        assert (one / file).read_bytes() == (other / file).read_bytes(), file


@pytest.mark.parametrize(("stage", "dtype"), FP32 + BF16)
def test_a_fresh_engine_continues_bit_for_bit(trained: Path, stage: int, dtype: str) -> None:
    def at(name: str) -> Path:
        return checkpoint_folder(trained, stage, dtype, name)

    facts = json.loads((trained / "resume-1.json").read_text())
    assert_identical(at("first"), at("again"))
    assert_identical(at("second"), at("resumed"))
    assert facts[at("second").name] == facts[at("resumed").name]
    assert largest_difference(at("first"), at("second")) > 1e-4
    state = json.loads((at("resumed") / "state.json").read_text())
    assert (state["num_steps"], state["format"]) == ({"policy": 4, "critic": 4}, 3)


@pytest.mark.parametrize(("stage", "dtype"), FP32 + BF16)
def test_the_optimizer_is_stored_in_fp32_and_by_name(trained: Path, stage: int, dtype: str) -> None:
    folder = checkpoint_folder(trained, stage, dtype, "first")
    weights = load_file(folder / "policy/model.safetensors")
    optimizer = load_file(folder / "optimizer/policy-00000.safetensors")
    kinds = {"exp_avg", "exp_avg_sq"} | ({"master"} if dtype == "bfloat16" else set())
    assert {key.partition("/")[0] for key in optimizer} == kinds
    assert {tensor.dtype for tensor in optimizer.values()} == {torch.float32}
    for name, weight in weights.items():
        assert str(weight.dtype) == f"torch.{dtype}"
        assert optimizer[f"exp_avg/{name}"].shape == weight.shape
        if dtype == "bfloat16":
            assert torch.equal(optimizer[f"master/{name}"].bfloat16(), weight)


@pytest.mark.parametrize("stage", FP32_STAGES)
def test_ranks_and_stages_change_nothing_but_rounding(trained: Path, stage: int) -> None:
    alone = checkpoint_folder(trained, stage, "float32", "ranks1")
    assert largest_difference(alone, checkpoint_folder(trained, stage, "float32", "ranks2")) < 1e-6
    assert largest_difference(alone, checkpoint_folder(trained, 0, "float32", "ranks1")) < 1e-6
    start = trained / "start-llama-tied-float32-1/policy/model.safetensors"
    assert not torch.equal(
        load_file(start)["model.norm.weight"], load_file(alone / "policy/model.safetensors")["model.norm.weight"]
    )


@pytest.mark.parametrize("stage", FP32_STAGES)
def test_ranks_change_no_metric(trained: Path, stage: int) -> None:
    metrics = [
        json.loads((trained / f"spread-{ranks}.json").read_text())[f"stage{stage}-float32-ranks{ranks}"]
        for ranks in (1, 2)
    ]
    assert metrics[1] == pytest.approx(metrics[0], rel=1e-5, abs=1e-6)
    assert metrics[0]["policy/loss"] != 0.0


@pytest.mark.parametrize("stage", [0, 3])
def test_a_checkpoint_moves_to_another_stage_and_rank_count_unchanged(trained: Path, stage: int) -> None:
    assert_identical(
        checkpoint_folder(trained, 2, "float32", "ranks2"), checkpoint_folder(trained, stage, "float32", "moved")
    )


@pytest.mark.parametrize("stage", range(4))
def test_gradients_accumulate_and_their_norm_is_that_before_clipping(trained: Path, stage: int) -> None:
    """The norm of the critic's output, summed over three tokens, with respect to all its weights, by autograd alone."""
    trunk = tiny_policy("llama-tied").base_model
    head = torch.ones(32, requires_grad=True)
    (trunk(input_ids=torch.tensor([[3, 4, 5]])).last_hidden_state @ head).sum().backward()
    gradients = [head.grad, *(parameter.grad for parameter in trunk.parameters())]
    expected = sum(float(gradient.double().square().sum()) for gradient in gradients if gradient is not None) ** 0.5
    facts = json.loads((trained / "accumulate-1.json").read_text())
    assert [facts[f"{stage} float32 {parts}"] for parts in (1, 2)] == pytest.approx([expected] * 2, rel=1e-5)
    assert facts[f"{stage} steps"] == 1


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_of_weights_in_bf16_add_up_in_fp32(trained: Path, stage: int) -> None:
    """A gradient and sixteen of its 1024th: in bf16 each of these is less than half of the last digit, and lost."""
    facts = json.loads((trained / "accumulate-1.json").read_text())
    once = facts[f"{stage} bfloat16 1"]
    assert once == pytest.approx(facts["0 float32 1"], rel=0.02)  # but for the rounding of weights
    assert facts[f"{stage} bfloat16 17"] == pytest.approx(once * (1 + 16 / 1024), rel=1e-4)


@pytest.mark.parametrize(("stage", "dtype"), BF16)
def test_policy_and_reference_of_the_same_folder_agree(trained: Path, stage: int, dtype: str) -> None:
    """Bit for bit: in bf16 that needs the same buffers too, such as the frequencies of rotary positions."""
    assert json.loads((trained / "agree-1.json").read_text())[f"{stage} {dtype}"] == 0.0


def test_transformers_reads_a_trained_policy(trained: Path) -> None:
    folder = checkpoint_folder(trained, 3, "float32", "ranks2") / "policy"
    weights = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in weights, "tied embeddings are stored once"
    model = AutoModelForCausalLM.from_pretrained(folder)
    plain = tiny_policy("llama-tied", seed=1)
    plain.load_state_dict({**weights, "lm_head.weight": weights["model.embed_tokens.weight"]})
    ids = torch.tensor([[3, 4, 5, 6]])
    assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)
