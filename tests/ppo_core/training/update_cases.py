"""Jobs and experience for the training tests: the same in the test process and in the program that trains."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ppo_core.data.batches import minibatches
from ppo_core.records import TokenSequence, UpdatePolicyJob
from ppo_core.spec import ModelSpec, TrainingSpec, UpdateSpec
from ppo_core.training.experience import Experience
from tests.ppo_core.plain_torch import FIXED_LENGTH, plain_logprobs
from tests.ppo_core.tiny_models import ragged_sequences, tiny_policy

ROWS = 8
TEMPERATURE = 0.7
FP32 = [(0, "float32"), (1, "float32"), (2, "float32"), (3, "float32")]
BF16 = [(1, "bfloat16"), (2, "bfloat16"), (3, "bfloat16")]


def update_job(
    *, zero_stage: int = 0, dtype: str = "float32", microbatch_size: int = 4, iteration: int = 0, **update: Any
) -> UpdatePolicyJob:
    settings = {"num_ppo_epochs": 1, "num_minibatches": 1, "warmup_iterations": 0, "decay_iterations": 4, **update}
    rates = {"learning_rate": 1e-3, "critic_learning_rate": 2e-3, "final_lr_fraction": 1.0}
    return UpdatePolicyJob(
        seed=5,
        iteration=iteration,
        model=ModelSpec(path="policy", dtype=dtype),
        update=UpdateSpec(**{**rates, **settings}),
        training=TrainingSpec(zero_stage=zero_stage, microbatch_size=microbatch_size, compute_dtype="float32"),
        max_response_tokens=FIXED_LENGTH,
        temperature=TEMPERATURE,
    )


def make_experience(name: str = "llama-tied", *, noise: float = 0.3, rows: int = ROWS) -> Experience:
    """Old logprobs near those of the untrained policy, everything else random; zeros past each response's end."""
    sequences = ragged_sequences(rows)
    generator = torch.Generator().manual_seed(9)
    width = max(len(response) for _, response in sequences)
    mask = torch.tensor([[t < len(response) for t in range(width)] for _, response in sequences])
    with torch.no_grad():
        logprobs = plain_logprobs(tiny_policy(name), sequences, TEMPERATURE).float()

    def random(scale: float) -> Tensor:
        return torch.where(mask, scale * torch.randn(mask.shape, generator=generator), 0.0)

    return Experience(
        **token_ids(sequences),
        response_mask=mask,
        old_logprobs=logprobs + random(noise),
        reference_logprobs=logprobs,
        sampler_logprobs=logprobs,
        values=random(0.1),
        rewards=random(1.0),
        advantages=random(1.0),
        returns=random(1.0),
    )


def save_experience(experience: Experience, folder: Path) -> None:
    """As the engine writes it, where no two tensors share their memory."""
    folder.mkdir(parents=True)
    tensors = {name: tensor for name, tensor in vars(experience).items() if tensor is not None}
    Experience(**{name: tensor.clone() for name, tensor in tensors.items()}).save(folder)


def token_ids(sequences: list[TokenSequence]) -> dict[str, Tensor]:
    return {
        "prompt_ids": torch.tensor([token for prompt, _ in sequences for token in prompt]),
        "prompt_lengths": torch.tensor([len(prompt) for prompt, _ in sequences]),
        "response_ids": torch.tensor([token for _, response in sequences for token in response]),
        "response_lengths": torch.tensor([len(response) for _, response in sequences]),
    }


def without_scores(experience: Experience, rows: list[int]) -> Experience:
    """The same with rows that do not count, and garbage in them."""
    mask, advantages, returns = (
        tensor.clone() for tensor in (experience.response_mask, experience.advantages, experience.returns)
    )
    mask[rows] = False
    advantages[rows] = torch.nan
    returns[rows] = torch.inf
    return replace(experience, response_mask=mask, advantages=advantages, returns=returns)


def whitened_by_hand(experience: Experience, job: UpdatePolicyJob, kind: str) -> Experience:
    """The advantages of each minibatch of the only epoch whitened among themselves, by Python's own statistics."""
    advantages, mask = torch.zeros_like(experience.advantages), experience.response_mask
    for rows in minibatches(ROWS, job.update.num_minibatches, job.seed, job.iteration, "update", 0):
        slots = [(row, t) for row in rows for t in range(mask.shape[1]) if mask[row, t]]
        kept = [float(experience.advantages[slot]) for slot in slots]
        mean = statistics.fmean(kept) if kind == "centred" else 0.0
        spread = statistics.variance(kept) if kind == "centred" else statistics.fmean(a * a for a in kept)
        for slot, advantage in zip(slots, kept, strict=True):
            advantages[slot] = (advantage - mean) / math.sqrt(spread + 1e-8)
    return replace(experience, advantages=advantages)


def only_rows(experience: Experience, rows: list[int]) -> Experience:
    """The experience as if the other rows had never been sampled."""
    sequences = experience.sequences()
    kept = token_ids([sequences[row] for row in rows])
    others = {f.name: vars(experience)[f.name] for f in fields(experience) if f.name not in kept}
    return Experience(**kept, **{name: tensor[rows] for name, tensor in others.items() if tensor is not None})


def checkpoint_folder(root: Path, zero_stage: int, dtype: str, name: str) -> Path:
    return root / f"stage{zero_stage}-{dtype}-{name}"


def facts_of(made: Path, scenario: str, ranks: int = 1) -> dict[str, Any]:
    """What rank 0 of a training program noted of a scenario."""
    facts: dict[str, Any] = json.loads((made / f"{scenario}-{ranks}.json").read_text())
    return facts
