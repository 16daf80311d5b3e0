"""Logprobs, entropies and values of ragged batches against one plain forward pass per sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ppo_core.logprobs import response_logprobs, response_values
from ppo_core.models.layout import packed_layout, padded_layout
from ppo_core.models.loading import Critic
from ppo_core.records import TokenSequence
from tests.ppo_core.plain_torch import plain_entropy, plain_logprobs, plain_values
from tests.ppo_core.tiny_models import CONFIGS, CONTEXT, EOS, VOCABULARY, ragged_sequences, tiny_policy

BATCHES: dict[str, list[TokenSequence]] = {
    "ragged": ragged_sequences(7),
    "one token each": [TokenSequence([4], [5])],
    "pad and EOS inside": [TokenSequence([0, EOS, 0], [EOS, 0, 0, EOS]), TokenSequence([EOS], [EOS]), ([0], [0, EOS])],
    "an empty response": [TokenSequence([3, 4, 5, 6], []), TokenSequence([7], [8, 9])],
    "the whole context": [TokenSequence([2] * 20, [3] * (CONTEXT - 20)), TokenSequence([9], [8])],
}
TOLERANCE = {"rtol": 0.0, "atol": 1e-5}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("name", CONFIGS)
def test_logprobs_and_entropies_equal_plain_ones(name: str, temperature: float, batch: str) -> None:
    model, sequences = tiny_policy(name), BATCHES[batch]
    with torch.no_grad():
        logprobs, entropy = response_logprobs(model, sequences, temperature=temperature, with_entropy=True)
        alone = response_logprobs(model, sequences, temperature=temperature)
        torch.testing.assert_close(logprobs.double(), plain_logprobs(model, sequences, temperature), **TOLERANCE)
        torch.testing.assert_close(entropy.double(), plain_entropy(model, sequences, temperature), **TOLERANCE)
    assert torch.equal(alone, logprobs)
    assert logprobs.dtype == entropy.dtype == torch.float32


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_equal_plain_ones(name: str) -> None:
    sequences, weights = BATCHES["ragged"], torch.Generator().manual_seed(1)
    width = max(len(response) for _, response in sequences)
    factors = torch.randn((2, len(sequences), width), generator=weights)

    def gradients(logprobs: Tensor, entropy: Tensor) -> dict[str, Tensor]:
        model.zero_grad()
        (factors[0] * logprobs + factors[1] * entropy).sum().backward()
        return {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}

    model = tiny_policy(name)
    ours = gradients(*response_logprobs(model, sequences, temperature=0.7, with_entropy=True))
    plain = gradients(plain_logprobs(model, sequences, 0.7), plain_entropy(model, sequences, 0.7))
    assert len(ours) == len(list(model.parameters()))
    for key, gradient in plain.items():
        # Gradients are sums over the batch of up to a hundred in size, so float32's digits are counted from there.
        torch.testing.assert_close(ours[key], gradient, rtol=1e-4, atol=1e-4)


def test_a_detached_entropy_is_the_same_and_keeps_nothing_for_a_backward_pass() -> None:
    model = tiny_policy("llama")

    def kept(*, detach: bool) -> tuple[Tensor, Tensor, int]:
        """Logprobs, entropies and how many `[N, V]` tensors wait for the backward pass."""
        saved: list[Tensor] = []
        count = sum(len(response) for _, response in BATCHES["ragged"])
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
            logprobs, entropy = response_logprobs(
                model, BATCHES["ragged"], temperature=0.7, with_entropy=True, detach_entropy=detach
            )
        return logprobs, entropy, len({x.data_ptr() for x in saved if x.shape == (count, VOCABULARY)})

    logprobs, entropy, many = kept(detach=False)
    same_logprobs, detached, few = kept(detach=True)
    assert torch.equal(detached, entropy.detach())
    assert torch.equal(same_logprobs, logprobs)
    assert (entropy.requires_grad, detached.requires_grad, same_logprobs.requires_grad) == (True, False, True)
    assert (few, many > 2) == (1, True)  # the one is that of the logprobs


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", CONFIGS)
def test_values_equal_plain_ones(name: str, batch: str) -> None:
    trunk, sequences = tiny_policy(name).base_model, BATCHES[batch]
    critic = Critic(trunk)
    torch.nn.init.normal_(critic.value_head.weight, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        values, final = response_values(critic, sequences)
        expected_values, expected_final = plain_values(trunk, critic.value_head.weight, sequences)
    torch.testing.assert_close(values.double(), expected_values, **TOLERANCE)
    torch.testing.assert_close(final.double(), expected_final, **TOLERANCE)


def test_what_pads_a_row_does_not_matter() -> None:
    """A row has the same logprobs alone and beside one that is four times as long, whatever its config calls pad."""
    model = tiny_policy("gpt2")
    short, long = TokenSequence([3, EOS], [5, EOS]), TokenSequence([7] * 8, [8] * 8)
    with torch.no_grad():
        alone = response_logprobs(model, [short], temperature=1.0)
        beside = response_logprobs(model, [long, short], temperature=1.0)
    torch.testing.assert_close(beside[1, :2], alone[0], **TOLERANCE)
    assert beside[1, 2:].tolist() == [0.0] * 6


def test_the_model_is_left_as_it_was() -> None:
    model = tiny_policy("llama")
    ids = torch.tensor([[3, 4, 5]])
    before = model(input_ids=ids).logits
    response_logprobs(model, BATCHES["ragged"], temperature=1.0)
    assert torch.equal(model(input_ids=ids).logits, before)
    with pytest.raises(IndexError):
        response_logprobs(model, [TokenSequence([VOCABULARY], [3])], temperature=1.0)
    assert torch.equal(model(input_ids=ids).logits, before)


def test_half_precision_is_reduced_in_fp32() -> None:
    model = tiny_policy("llama", dtype="bfloat16")
    with torch.no_grad():
        logprobs = response_logprobs(model, BATCHES["one token each"], temperature=1.0)
        expected = plain_logprobs(model, BATCHES["one token each"], 1.0)
    torch.testing.assert_close(logprobs.double(), expected, **TOLERANCE)


@pytest.mark.parametrize("layout", [padded_layout, packed_layout])
def test_an_empty_prompt_is_refused(layout: Any) -> None:
    with pytest.raises(ValueError, match="sequence 1 has an empty prompt"):
        layout([([1], [2]), ([], [3])])


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_greedy_has_no_logprobs(temperature: float) -> None:
    with pytest.raises(ValueError, match=f"temperature={temperature} must be above 0"):
        response_logprobs(tiny_policy("llama"), BATCHES["ragged"], temperature=temperature)
