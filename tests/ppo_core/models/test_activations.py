"""Layers that keep less for their backward pass: the same bits as the library's own, in less memory."""

from __future__ import annotations

import copy
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from ppo_core.models.activations import MODEL_TYPES, ROTATION, keep_less, rotate_in_one, train_what_recomputes
from ppo_core.models.loading import prepared
from ppo_core.models.lora import adapt
from ppo_core.models.precision import multiply_in
from ppo_core.processes.threads import twin_of
from ppo_core.spec import LoraSpec

HIDDEN, INNER, LAYERS, TOKENS = 16, 320, 2, 24


def model_of(kind: str = "llama", **config: Any) -> Any:
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS, "vocab_size": 50}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    words = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    settings = transformers.AutoConfig.for_model(kind, **{**sizes, **heads, **words, **config})
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(settings)


def gradients(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits, and the gradients of all that learns."""
    logits = model(input_ids=torch.arange(TOKENS)[None] % 50, use_cache=False).logits
    logits.float().log_softmax(-1)[..., 3].sum().backward()
    return logits, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same_bits(one: Any, other: Any) -> None:
    (logits, found), (plain, expected) = gradients(one), gradients(other)
    assert torch.equal(logits, plain)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("products", "weights"),
    [("float32", torch.float32), ("bfloat16", torch.float32), ("float32", torch.bfloat16)],
    ids=["float32", "products in bfloat16", "weights in bfloat16"],
)
@pytest.mark.parametrize("kind", sorted(MODEL_TYPES))
def test_the_same_bits_for_every_architecture(kind: str, products: str, weights: torch.dtype) -> None:
    """With norms that weigh, as those of trained models do: OLMo-2 rounds after that, the others before."""
    plain = model_of(kind)
    for name, parameter in plain.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.3)
    plain = plain.to(weights)
    lean = copy.deepcopy(plain)
    keep_less(lean)
    if products == "bfloat16":
        for model in (plain, lean):
            multiply_in(model, "bfloat16")
    assert_same_bits(lean, plain)


def test_adapters_beside_the_projections_give_the_same_bits() -> None:
    plain = model_of()
    adapt(plain, LoraSpec(rank=2, target_modules=("gate_proj", "up_proj", "down_proj")), seed=0)
    for name, parameter in plain.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    lean = copy.deepcopy(plain)
    keep_less(lean)
    assert_same_bits(lean, plain)


@pytest.mark.parametrize(
    ("layer", "width", "expected"),
    [("mlp", INNER, [4, 2]), ("input_layernorm", HIDDEN, [2, 1])],
    ids=["an MLP's gate and up", "a norm's output alone"],
)
def test_half_is_kept(layer: str, width: int, expected: list[int]) -> None:
    """In tensors of TOKENS * width numbers; smaller ones aside."""
    plain = model_of()
    lean = copy.deepcopy(plain)
    keep_less(lean)
    layers = [getattr(model.model.layers[0], layer) for model in (plain, lean)]
    assert [left_allocated(one) // (TOKENS * width * 4) for one in layers] == expected


def left_allocated(layer: Any) -> int:
    """Bytes that a forward pass leaves allocated, by torch's own count."""
    hidden = torch.ones(1, TOKENS, HIDDEN, requires_grad=True)
    with torch.profiler.profile(profile_memory=True) as profile:
        output = layer(hidden)
    assert output.requires_grad
    return sum(event.self_cpu_memory_usage for event in profile.events())


def test_a_twin_computes_by_its_own_modules() -> None:
    model = model_of()
    keep_less(model)
    twin: Any = twin_of(model)
    mlp, other = model.model.layers[0].mlp, twin.model.layers[0].mlp
    assert other.forward.__self__ is other is not mlp
    assert other.down_proj.weight is mlp.down_proj.weight
    assert_same_bits(twin, copy.deepcopy(model))


def test_an_mlp_with_another_activation_stays_as_it_is() -> None:
    plain = model_of(hidden_act="gelu")
    lean = copy.deepcopy(plain)
    keep_less(lean)
    assert "forward" not in vars(lean.model.layers[0].mlp)
    assert_same_bits(lean, plain)


def test_an_architecture_with_other_layers_stays_as_it_is() -> None:
    model = model_of("gemma")
    keep_less(model)
    assert all("forward" not in vars(module) for module in model.modules())


def test_routers_of_experts_draw_no_noise_where_activations_are_recomputed() -> None:
    model = prepared(model_of("mixtral", router_jitter_noise=0.1, num_local_experts=2, intermediate_size=16))
    ids = torch.tensor([[3, 4, 5, 6]])
    quiet = model(input_ids=ids).logits
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert not torch.equal(model.train()(input_ids=ids).logits, quiet)
    train_what_recomputes(model)
    assert torch.equal(model(input_ids=ids).logits, quiet)
    passes = []
    mlp = model.model.layers[0].mlp
    mlp.register_forward_pre_hook(lambda *_: passes.append(1))
    model(input_ids=ids).logits.sum().backward()
    assert len(passes) == 2  # and they are recomputed


def test_on_a_cpu_queries_and_keys_are_rotated_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    architecture = sys.modules[type(model.model.layers[0]).__module__]
    plain = vars(architecture)[ROTATION]
    monkeypatch.setattr(architecture, ROTATION, plain)  # and what follows is undone
    for _ in range(2):
        rotate_in_one(model)
    replaced = vars(architecture)[ROTATION]
    assert replaced.args == (plain,)  # once
    query, key, cos, sin = torch.randn((4, 1, 2, 3, 8), generator=torch.Generator().manual_seed(0))
    for ours, theirs in zip(replaced(query, key, cos[0], sin[0], 0), plain(query, key, cos[0], sin[0], 0), strict=True):
        assert torch.equal(ours, theirs)


def test_code_that_comes_with_a_model_rotates_as_it_likes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    architecture = sys.modules[type(model.model.layers[0]).__module__]
    plain = vars(architecture)[ROTATION]
    own = ModuleType("transformers_modules.own")
    vars(own)[ROTATION] = plain
    monkeypatch.setitem(sys.modules, own.__name__, own)
    monkeypatch.setattr(architecture, ROTATION, plain)
    monkeypatch.setattr(type(model.model.layers[0].self_attn), "__module__", own.__name__)
    rotate_in_one(model)
    assert vars(own)[ROTATION] is plain
