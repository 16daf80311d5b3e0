"""Prompts with a temperature and a limit of their own: what vLLM samples from is what the trainer computes with."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch

from ppo_core.algorithms.ppo import PPO
from ppo_core.data.tables import read_rollouts, write_rollouts
from ppo_core.logprobs import response_logprobs
from ppo_core.models.forward import Models, Need
from ppo_core.models.packing import enable_packing
from ppo_core.processes.threads import Threads
from ppo_core.records import PromptRow, RolloutRow
from ppo_core.spec import TrainingSpec
from ppo_core.training.experience import predict, temperatures_of
from tests.ppo_core.engines.engine_jobs import Client
from tests.ppo_core.models.test_predict import Lonely, models
from tests.ppo_core.plain_torch import padded, plain_distributions, plain_entropy, plain_logprobs
from tests.ppo_core.tiny_models import CONFIGS, ragged_sequences, tiny_policy
from tests.ppo_core.tiny_policies import forward_logprobs, make_policy
from tests.ppo_core.written_tables import write_prompts

pytest_plugins = ["tests.ppo_core.engines.engine_fixtures"]

SEQUENCES = ragged_sequences(6)
TEMPERATURES = [0.5, 1.0, 2.0, 0.7, 1.5, 3.0]
WIDTH = max(len(response) for _, response in SEQUENCES)


def row_by_row(plain: Any, model: Any) -> torch.Tensor:
    """An oracle of one temperature, asked for each sequence at its own."""
    rows = [plain(model, [pair], t)[0] for pair, t in zip(SEQUENCES, TEMPERATURES, strict=True)]
    return padded(rows, WIDTH)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", CONFIGS)
def test_each_response_has_its_own_temperature(name: str, packed: bool) -> None:
    model, reference = tiny_policy(name), tiny_policy(name, seed=1)
    expected, entropy = row_by_row(plain_logprobs, model), row_by_row(plain_entropy, model)
    divergences = []
    for (prompt, response), temperature in zip(SEQUENCES, TEMPERATURES, strict=True):
        log_p, log_q = (plain_distributions(one, prompt, response, temperature) for one in (model, reference))
        divergences.append((log_p.exp() * (log_p - log_q.detach())).sum(1))
    kl = padded(divergences, WIDTH)
    (expected.sum() + entropy.sum() + kl.sum()).backward()
    plain = {key: p.grad.clone() for key, p in model.named_parameters()}
    model.zero_grad()
    if packed:
        enable_packing(model)
        enable_packing(reference)
    need, own = Need(logprobs=True, entropy="differentiable", kl=True), torch.tensor(TEMPERATURES)
    said = Models({"policy": model}, 9.0, reference).forward(SEQUENCES, need, own)
    for ours, theirs in ((said.logprobs, expected), (said.entropy, entropy), (said.kl, kl)):
        assert ours is not None
        torch.testing.assert_close(ours.double(), theirs.detach(), rtol=1e-4, atol=1e-5)
    (said.logprobs.sum() + said.entropy.sum() + said.kl.sum()).backward()
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, plain[key], rtol=1e-4, atol=1e-4)


def test_predictions_are_made_at_them() -> None:
    policy, reference, critic = models("llama")
    ours, ranks = [Models({"policy": policy, "critic": critic}, 9.0, reference)], cast(Any, Lonely(0, 1, Threads()))
    training, own = TrainingSpec(microbatch_size=4), torch.tensor(TEMPERATURES)
    found = predict(ours, PPO.predictions, SEQUENCES, training, ranks, lambda *_: None, own)
    with torch.no_grad():
        for table, model in ((found.old_logprobs, policy), (found.reference_logprobs, reference)):
            torch.testing.assert_close(table.double(), row_by_row(plain_logprobs, model), rtol=1e-5, atol=1e-5)


def test_a_temperature_of_zero_is_refused_among_others() -> None:
    with pytest.raises(ValueError, match="must be above 0: greedy"):
        response_logprobs(tiny_policy("llama"), SEQUENCES, temperature=torch.tensor([*TEMPERATURES[:-1], 0.0]))


def test_rows_keep_them_and_others_have_no_such_column(tmp_path: Path) -> None:
    rows = [RolloutRow("p", n, [3], [5, 1], "w5", [-1.0, -1.0], "stop", temperature=0.5 + n) for n in range(2)]
    write_rollouts(tmp_path / "own", rows)
    assert read_rollouts(tmp_path / "own") == rows
    own = temperatures_of(rows)
    assert own is not None
    assert own.tolist() == [0.5, 1.5]
    plain = [RolloutRow("p", 0, [3], [5, 1], "w5", [-1.0, -1.0], "stop")]
    write_rollouts(tmp_path / "plain", plain)
    assert b"temperature" not in (tmp_path / "plain").read_bytes()
    assert read_rollouts(tmp_path / "plain") == plain
    assert temperatures_of(plain) is None


def test_vllm_samples_each_prompt_as_its_columns_say(rollout: Client, tmp_path: Path) -> None:
    checkpoint, dataset = make_policy(tmp_path / "A" / "policy").parent, tmp_path / "dataset"
    dataset.mkdir()
    own: list[dict[str, Any]] = [{"heat": 0.4, "most": 3}, {"heat": "2"}, {"most": "5"}, {}]
    prompts = [PromptRow(f"p{n}", "?", [5 + n, 9], None, metadata) for n, metadata in enumerate(own)]
    for split in ("train", "eval"):
        write_prompts(dataset / f"{split}.parquet", prompts)
    columns = {"temperature_column": "heat", "max_response_tokens_column": "most"}
    rows = rollout.generate(checkpoint, dataset, samples_per_prompt=4, temperature=1.2, **columns)
    assert [row.temperature for row in rows[::4]] == [0.4, 2.0, 1.2, 1.2]
    lengths = [max(len(row.response_token_ids) for row in rows[first : first + 4]) for first in range(0, 16, 4)]
    assert (lengths[0], lengths[2]) == (3, 5)
    assert min(lengths[1], lengths[3]) > 5
    worst = 0.0
    for row in rows:
        assert row.temperature is not None
        expected = forward_logprobs(
            checkpoint / "policy", row.prompt_token_ids, row.response_token_ids, temperature=row.temperature
        )
        worst = max(worst, *(abs(a - b) for a, b in zip(row.sampler_logprobs, expected, strict=True)))
    assert 0.0 < worst < 1e-4
