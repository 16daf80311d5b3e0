"""A rollout engine that started vLLM before there was a policy: what it samples, and what it leaves to others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from infra.engines.process import EngineJobError
from ppo_core.data.tokenization import load_tokenizer
from ppo_core.models.loading import load_policy, save_policy, starting_policy
from ppo_core.spec import ModelSpec
from tests.ppo_core.engines.engine_jobs import Client, generate_spec, open_engine, write_dataset
from tests.ppo_core.tiny_policies import CONTEXT, greedy_tokens, make_policy, make_tokenizer

pytest_plugins = ["tests.ppo_core.engines.engine_fixtures"]
pytestmark = pytest.mark.thorough

SHARED = ("max_response_tokens", "stop", "model", "kv_cache_gib", "tensor_parallel_size")
PROMPTS = [[4 + (13 * n + k) % 60 for k in range(3 + n)] for n in range(4)]
CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": True,
    "initializer_range": 0.4,
    "attention_dropout": 0.1,  # policies are written without
}


def save(policy: Any, tokenizer: Any, folder: Path) -> Path:
    save_policy(policy, {name: p.detach() for name, p in policy.named_parameters()}, tokenizer, folder)
    return folder


def trained(spec: ModelSpec, given: Path | None, tokenizer: Path, folder: Path) -> Path:
    """A checkpoint with other weights than a run begins with: written, read and written again, as after SFT."""
    words = load_tokenizer(tokenizer)
    policy = starting_policy(spec, given, words, seed=5)
    for parameter in policy.parameters():
        parameter.data.mul_(1.25)
    tuned = save(policy, words, folder / "model")
    save(load_policy(tuned, dtype=spec.dtype), words, folder / "checkpoint" / "policy")
    return folder / "checkpoint"


@pytest.mark.parametrize("made", ["from a configuration", "from a folder"])
def test_what_it_samples_is_what_an_engine_samples_that_loaded_the_weights_itself(
    rollout: Client, tmp_path: Path, made: str
) -> None:
    words = tmp_path / "words"
    if made == "from a folder":
        given: Path | None = make_policy(words, architecture="gpt2", tied=False)
        model: dict[str, Any] = {"path": str(given)}
    else:
        make_tokenizer().save_pretrained(words)
        given, model = None, {"config": CONFIG, "tokenizer": str(words)}
    checkpoint = trained(ModelSpec(**model), given, words, tmp_path)
    dataset = write_dataset(tmp_path / "dataset", PROMPTS)
    # A stop makes vLLM read a tokenizer; that much cache the shared engine never had, so it starts vLLM anew.
    spec = generate_spec(model=model, samples_per_prompt=3, stop=["w7 w7"], kv_cache_gib=0.0625)
    inputs = {"dataset": dataset, "tokenizer": words, **({"model": given} if given else {})}
    prepared = open_engine("rollout", tmp_path / "prepared")
    try:
        early = prepared.run(
            "prepare_sampling", inputs, {name: spec[name] for name in SHARED}, written := prepared.output()
        )
        outputs = {}
        for client in (prepared, rollout):
            done = client.run(
                "generate_rollouts", {"checkpoint": checkpoint, "dataset": dataset}, spec, client.output()
            )
            outputs[client.folder] = done, client.folder / f"job-{next(client.numbers) - 1}" / "rollouts.parquet"
        greedy = prepared.generate(checkpoint, dataset, **{**spec, "samples_per_prompt": 1, "temperature": 0.0})
    finally:
        prepared.engine.close()
    (swapped, ours), (loaded, theirs) = outputs[prepared.folder], outputs[rollout.folder]
    assert ours.read_bytes() == theirs.read_bytes()
    assert swapped.result == loaded.result
    for row, ids in zip(greedy, PROMPTS, strict=True):
        assert row.response_token_ids == greedy_tokens(checkpoint / "policy", ids, 16)[: len(row.response_token_ids)]
    # Else vLLM would be started twice.
    assert (written / "config.json").read_text() == (checkpoint / "policy" / "config.json").read_text()
    assert swapped.seconds < min(early.seconds, loaded.seconds) / 2


def test_one_that_cannot_start_ends_and_leaves_the_complaint_to_the_first_job(tmp_path: Path) -> None:
    dataset, policy = write_dataset(tmp_path / "dataset", PROMPTS), make_policy(tmp_path / "start" / "policy")
    spec = generate_spec(model={"path": str(policy)}, kv_cache_gib=0.0001)
    client = open_engine("rollout", tmp_path / "engine")
    try:
        inputs = {"dataset": dataset, "tokenizer": policy, "model": policy}
        early = {name: spec[name] for name in SHARED if name in spec}
        with pytest.raises(EngineJobError, match="too small") as failed:
            client.run("prepare_sampling", inputs, early, client.output())
        assert failed.value.error_type == "EngineDefect"
        with pytest.raises(EngineJobError, match=r"kv_cache_gib=0\.0001 is too small for one sequence") as refused:
            client.generate(policy.parent, dataset, kv_cache_gib=0.0001)
        assert refused.value.error_type == "InputError"
        assert len(client.generate(policy.parent, dataset)) == len(PROMPTS)
    finally:
        client.engine.close()
