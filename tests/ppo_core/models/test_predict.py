"""What the three models say of rollouts, against forward passes of plain transformers, one sequence at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from ppo_core.algorithms.ppo import PPO
from ppo_core.models.forward import Models
from ppo_core.models.loading import Critic
from ppo_core.processes.threads import Threads, twin_of
from ppo_core.spec import TrainingSpec
from ppo_core.training.experience import Predictions, predict
from tests.ppo_core.plain_torch import plain_logprobs, plain_values
from tests.ppo_core.tiny_models import ragged_sequences, tiny_policy

SEQUENCES = ragged_sequences(8)
TEMPERATURE = 0.7
FIELDS = ("old_logprobs", "reference_logprobs", "values", "final_values")


@dataclass
class Lonely:
    """One of several ranks whose sum over ranks is its own part."""

    rank: int
    world_size: int

    threads: Threads

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor


def models(name: str) -> tuple[Any, Any, Critic]:
    critic = Critic(tiny_policy(name, seed=2).base_model)
    torch.nn.init.normal_(critic.value_head.weight, generator=torch.Generator().manual_seed(3))
    return tiny_policy(name), tiny_policy(name, seed=1), critic


def predicted(
    name: str, *, microbatch_size: int = 3, rank: int = 0, world_size: int = 1, threads: int = 1
) -> Predictions:
    policy, reference, critic = models(name)
    ours = [Models({"policy": policy, "critic": critic}, TEMPERATURE, reference)]
    for _ in range(threads - 1):
        twins = {name: twin_of(network) for name, network in ours[0].networks.items()}
        ours.append(Models(twins, TEMPERATURE, twin_of(reference)))
    training = TrainingSpec(microbatch_size=microbatch_size)
    ticks: list[tuple[int, int]] = []
    ranks: Any = Lonely(rank, world_size, Threads(threads))
    result = predict(
        ours, PPO.predictions, SEQUENCES, training, ranks, lambda done, total, _: ticks.append((done, total))
    )
    assert sorted(ticks) == [(done, len(ticks)) for done in range(1, len(ticks) + 1)]
    return result


@pytest.mark.parametrize("name", ["llama-tied", "llama", "qwen2", "gpt2"])
@pytest.mark.parametrize("microbatch_size", [1, 3, 8])
def test_predictions_are_those_of_plain_forward_passes(name: str, microbatch_size: int) -> None:
    policy, reference, critic = models(name)
    with torch.no_grad():
        values, final = plain_values(critic.backbone, critic.value_head.weight, SEQUENCES)
        expected = (
            plain_logprobs(policy, SEQUENCES, TEMPERATURE),
            plain_logprobs(reference, SEQUENCES, TEMPERATURE),
            values,
            final,
        )
    observed = predicted(name, microbatch_size=microbatch_size)
    for field, tensor in zip(FIELDS, expected, strict=True):
        assert vars(observed)[field].dtype == torch.float32
        torch.testing.assert_close(vars(observed)[field].double(), tensor, rtol=1e-5, atol=1e-5)
    assert (expected[0] - expected[1]).abs().max() > 0.1, "policy and reference differ, or mixing them up would pass"
    for row, (_, response) in enumerate(SEQUENCES):
        assert not observed.old_logprobs[row, len(response) :].any()
        assert not observed.values[row, len(response) :].any()


@pytest.mark.parametrize("name", ["llama-tied", "gpt2"])
@pytest.mark.parametrize("threads", [2, 3])
def test_threads_say_what_one_says(name: str, threads: int) -> None:
    alone, together = predicted(name), predicted(name, threads=threads)
    for field in FIELDS:
        torch.testing.assert_close(vars(together)[field], vars(alone)[field], rtol=1e-5, atol=1e-5)


def test_every_rank_fills_its_own_rows_and_zeros_elsewhere() -> None:
    whole, parts = predicted("llama"), [predicted("llama", rank=rank, world_size=3) for rank in range(3)]
    for field in FIELDS:
        torch.testing.assert_close(sum(vars(p)[field] for p in parts), vars(whole)[field], rtol=1e-5, atol=1e-5)
        filled = [vars(part)[field].reshape(len(SEQUENCES), -1).any(1) for part in parts]
        assert torch.stack(filled).sum(0).tolist() == [1] * len(SEQUENCES)
