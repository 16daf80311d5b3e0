"""Packed rows: every architecture of the list against padded rows, and the fused head against plain autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ppo_core.logprobs import LaidOut, response_logprobs, response_values
from ppo_core.models import divergence
from ppo_core.models.head import TokenLogprobs
from ppo_core.models.loading import Critic, create_policy
from ppo_core.models.packing import MODEL_TYPES, Packing, enable_packing, has_kernel, packs
from tests.ppo_core.plain_torch import plain_entropy, plain_logprobs
from tests.ppo_core.tiny_models import SIZES, VOCABULARY, ragged_sequences, tiny_config

SEQUENCES = ragged_sequences(9)
CPU = torch.device("cpu")


def config_of(kind: str, **changes: Any) -> dict[str, Any]:
    """With grouped heads where the architecture has them, and no window."""
    if kind == "gpt2":
        return {**tiny_config("gpt2"), **changes}
    own = {"gpt_neox": {}, "mistral": {"num_key_value_heads": 2, "sliding_window": None}}
    heads = {**SIZES, "num_attention_heads": 4, **own.get(kind, {"num_key_value_heads": 2})}
    ends = {"eos_token_id": 1, "bos_token_id": None, "pad_token_id": 1, "max_position_embeddings": 64}
    return {"model_type": kind, **heads, **ends, "initializer_range": 0.3, **changes}


def policy(kind: str, **changes: Any) -> Any:
    return create_policy(config_of(kind, **changes), vocab_size=VOCABULARY, seed=0, dtype="float32")


def gradients(model: Any, logprobs: Tensor, entropy: Tensor) -> dict[str, Tensor]:
    """Of a sum with a factor of its own for every token."""
    model.zero_grad()
    factors = torch.randn((2, *logprobs.shape), generator=torch.Generator().manual_seed(1))
    (factors[0] * logprobs + factors[1] * entropy).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("kind", sorted(MODEL_TYPES))
def test_packed_rows_give_what_plain_passes_give(kind: str) -> None:
    model, same = policy(kind), policy(kind)
    enable_packing(model)
    assert (packs(model), packs(same)) == (True, False)

    logprobs, entropy = response_logprobs(model, SEQUENCES, temperature=0.7, with_entropy=True)
    expected = plain_logprobs(same, SEQUENCES, 0.7), plain_entropy(same, SEQUENCES, 0.7)

    torch.testing.assert_close(logprobs.double(), expected[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(entropy.double(), expected[1], rtol=0, atol=1e-5)
    plain = gradients(same, *expected)
    for name, gradient in gradients(model, logprobs, entropy).items():
        torch.testing.assert_close(gradient, plain[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_packed_critic_gives_the_same_values(kind: str) -> None:
    critic = Critic(policy(kind).base_model)
    torch.nn.init.normal_(critic.value_head.weight)
    padded = response_values(critic, SEQUENCES)
    enable_packing(critic)
    assert packs(critic)
    for observed, expected in zip(response_values(critic, SEQUENCES), padded, strict=True):
        torch.testing.assert_close(observed, expected, rtol=1e-5, atol=1e-5)


def test_a_packed_row_holds_real_tokens_only() -> None:
    seen: list[Tensor] = []
    model = policy("llama")
    enable_packing(model)
    model.model.layers[0].mlp.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0]))
    response_logprobs(model, SEQUENCES, temperature=1.0)
    assert [tuple(x.shape[:2]) for x in seen] == [(1, sum(len(p) + len(r) for p, r in SEQUENCES))]


def test_a_prepared_model_still_takes_padded_rows_and_masks() -> None:
    """As transformers' own generate gives them: on the left, with a mask."""
    model, same = policy("llama"), policy("llama")
    enable_packing(model)
    ids, mask = torch.tensor([[0, 0, 5, 6], [7, 8, 9, 3]]), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    observed, expected = (m(input_ids=ids, attention_mask=mask).logits for m in (model, same))
    torch.testing.assert_close(observed[mask.bool()], expected[mask.bool()])


@pytest.mark.parametrize(
    "config",
    [
        config_of("mistral", sliding_window=4),
        config_of("gemma2", head_dim=8),
        config_of("qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=0),
    ],
)
def test_models_that_do_not_attend_to_all_are_padded(config: dict[str, Any]) -> None:
    model = create_policy(config, vocab_size=VOCABULARY, seed=0, dtype="float32")
    enable_packing(model)
    assert not packs(model)
    logprobs = response_logprobs(model, SEQUENCES, temperature=1.0)
    torch.testing.assert_close(logprobs.double(), plain_logprobs(model, SEQUENCES, 1.0), rtol=0, atol=1e-5)


def test_groups_hold_sequences_of_similar_length() -> None:
    packing = Packing.of([1, 2, 3, 4, 10, 12, 13], "cpu")
    assert [(group.count, group.width) for group in packing.groups] == [(1, 1), (1, 2), (2, 4), (3, 13)]
    assert packing.ends.tolist() == [0, 1, 3, 6, 10, 20, 32, 45]
    assert packing.longest == 13


def test_groups_are_made_where_they_are_asked_for() -> None:
    packing = Packing.of([1, 2, 3], "cpu")
    assert "groups" not in vars(packing)
    assert packing.groups is packing.groups


def test_models_of_one_form_compute_on_one_layout() -> None:
    packed, other, padded = policy("llama"), policy("llama"), policy("llama")
    enable_packing(packed)
    enable_packing(other)
    batch = LaidOut(SEQUENCES)
    assert batch.layout_for(packed) is batch.layout_for(other)
    assert "packing" not in batch.layout_for(padded).inputs
    with torch.no_grad():
        for model in (packed, padded):
            alone = response_logprobs(model, SEQUENCES, temperature=1.0)
            assert torch.equal(response_logprobs(model, batch, temperature=1.0), alone)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("limits", [{}, {"kept": 0, "chunk": 90, "block": 1}, {"block": 90}])
def test_the_fused_head_is_plain_autograd(
    limits: dict[str, int], temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(divergence, "ON_CPU", divergence.ON_CPU._replace(**limits))
    dice = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(size, generator=dice).requires_grad_() for size in ((7, 5), (30, 5)))
    targets, factors = torch.randint(0, 30, (7,), generator=dice), torch.randn((2, 7), generator=dice)

    made = TokenLogprobs.apply(hidden, weight, targets, temperature, "differentiable", True)
    (factors * made.T).sum().backward()
    observed = [made.detach(), hidden.grad, weight.grad]
    hidden.grad = weight.grad = None
    table = ((hidden.double() @ weight.double().T) / temperature).log_softmax(1)
    plain = torch.stack([table.gather(1, targets[:, None])[:, 0], -(table.exp() * table).sum(1)], 1)
    (factors * plain.T).sum().backward()

    for ours, expected in zip(observed, [plain.detach(), hidden.grad, weight.grad], strict=True):
        assert ours is not None
        torch.testing.assert_close(ours.double(), expected.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("keep", [True, False])
def test_the_sizes_of_a_gpu_change_nothing_but_rounding(*, keep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU a chunk of this vocabulary has 83 rows, and a block ten."""
    dice = torch.Generator().manual_seed(0)
    hidden, weight, factors = (torch.randn(size, generator=dice) for size in ((90, 4), (100_000, 4), (90, 2)))
    targets, found = torch.randint(0, 100_000, (90,), generator=dice), list[list[Tensor]]()
    for sizes in (divergence.ON_CPU, divergence.ON_CUDA):
        monkeypatch.setattr(divergence, "ON_CPU", sizes)
        parts = [part.clone().requires_grad_() for part in (hidden, weight)]
        made = TokenLogprobs.apply(*parts, targets, 0.7, "differentiable", keep)
        kl = divergence.TokenDivergence.apply(*parts, hidden / 2, weight, 0.7)
        (made * factors).sum().backward(retain_graph=True)
        kl.sum().backward()
        found.append([made.detach(), kl.detach(), *(part.grad for part in parts if part.grad is not None)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_the_fused_head_keeps_logits_once() -> None:
    saved: list[Tensor] = []
    model = policy("llama")
    enable_packing(model)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        logprobs, entropy = response_logprobs(model, SEQUENCES, temperature=1.0, with_entropy=True, detach_entropy=True)
    count = sum(len(response) for _, response in SEQUENCES)
    assert not [x for x in saved if x.shape == (count, VOCABULARY)]
    assert (logprobs.requires_grad, entropy.requires_grad) == (True, False)
    with torch.no_grad():
        alone = response_logprobs(model, SEQUENCES, temperature=1.0)
    assert torch.equal(alone, logprobs)
    assert "forward" not in vars(model.get_output_embeddings())


@pytest.mark.parametrize(
    ("size", "capability", "taken"),
    [
        (64, (8, 0), True),
        (80, (9, 0), True),
        (256, (8, 6), True),
        (264, (9, 0), False),
        (20, (9, 0), False),
        (64, (7, 5), False),
        (128, (12, 0), True),
    ],
)
def test_the_kernel_for_variable_lengths_is_for_some_heads_and_gpus(
    size: int, capability: tuple[int, int], taken: bool
) -> None:
    assert has_kernel(size, capability) is taken
