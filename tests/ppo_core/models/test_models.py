"""Policies and critics: the same from the same seed, and unchanged by a trip through a folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from ppo_core.models.loading import (
    BAD_FOLDER,
    add_value_head,
    create_policy,
    critic_from_policy,
    load_critic,
    load_policy,
    save_critic,
    save_policy,
)
from ppo_core.records import InputError
from tests.ppo_core.tiny_models import CONFIGS, tiny_config, tiny_folder, tiny_policy, tiny_tokenizer

IDS = torch.tensor([[3, 4, 5, 6, 1]])
DTYPES = ("float32", "bfloat16")
DROPOUT = {
    "gpt2": {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5},
    "llama": {"attention_dropout": 0.5},
    "opt": {"dropout": 0.5, "attention_dropout": 0.5, "layerdrop": 0.5},
    "bloom": {"hidden_dropout": 0.5, "attention_dropout": 0.5},
    "falcon": {"hidden_dropout": 0.5, "attention_dropout": 0.5},
}
OTHER_CONFIGS = {
    "opt": {"model_type": "opt", "hidden_size": 32, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "bloom": {"model_type": "bloom", "hidden_size": 32, "n_layer": 2, "n_head": 2},
    "falcon": {"model_type": "falcon", "hidden_size": 32, "num_hidden_layers": 2},
}
OTHER_CONFIGS["opt"] |= {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 32}
OTHER_CONFIGS["falcon"] |= {"num_attention_heads": 2, "parallel_attn": False, "new_decoder_architecture": False}


def parameters_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def test_the_same_seed_makes_the_same_policy_and_leaves_the_process_alone() -> None:
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    one, same, other = tiny_policy("llama"), tiny_policy("llama"), tiny_policy("llama", seed=1)
    assert torch.equal(torch.rand(3), expected), "the process's own random numbers went on as if nothing had happened"
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter, same.get_parameter(name))
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_policy_survives_its_folder_bit_for_bit(name: str, dtype: str, tmp_path: Path) -> None:
    policy = tiny_policy(name, dtype=dtype)
    save_policy(policy, parameters_of(policy), tiny_tokenizer(), tmp_path)
    loaded = load_policy(tmp_path, dtype=dtype)
    for key, parameter in policy.named_parameters():
        assert torch.equal(parameter, loaded.get_parameter(key))
        assert str(parameter.dtype) == f"torch.{dtype}"
    for key, buffer in policy.named_buffers():
        assert torch.equal(buffer, loaded.get_buffer(key)), key
    expected = policy(input_ids=IDS).logits
    assert torch.equal(loaded(input_ids=IDS).logits, expected)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(input_ids=IDS).logits, expected)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_weights_of_the_moment_are_saved_not_those_of_the_module(name: str, tmp_path: Path) -> None:
    policy, other = tiny_policy(name), tiny_policy(name, seed=1)
    save_policy(policy, parameters_of(other), tiny_tokenizer(), tmp_path)
    assert torch.equal(load_policy(tmp_path, dtype="float32")(input_ids=IDS).logits, other(input_ids=IDS).logits)


@pytest.mark.parametrize("name", CONFIGS)
def test_tied_embeddings_are_saved_once(name: str, tmp_path: Path) -> None:
    policy = tiny_policy(name)
    save_policy(policy, parameters_of(policy), tiny_tokenizer(), tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    vocabulary_sized = [key for key, tensor in stored.items() if tensor.shape[0] == policy.config.vocab_size]
    assert len(vocabulary_sized) == (1 if policy.config.tie_word_embeddings else 2)
    assert sum(tensor.numel() for tensor in stored.values()) == sum(p.numel() for p in policy.parameters())


@pytest.mark.parametrize("name", CONFIGS)
def test_a_critic_has_the_policys_trunk_and_says_nothing_at_first(name: str, tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, name)
    policy, critic = load_policy(folder, dtype="float32"), critic_from_policy(folder, dtype="float32")
    for key, parameter in policy.base_model.named_parameters():
        assert torch.equal(parameter, critic.backbone.get_parameter(key))
    assert critic(IDS).tolist() == [[0.0] * 5]
    assert [key for key, _ in critic.named_parameters() if not key.startswith("backbone.")] == ["value_head.weight"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_critic_survives_its_folder_bit_for_bit(name: str, dtype: str, tmp_path: Path) -> None:
    critic = critic_from_policy(tiny_folder(tmp_path / "policy", name), dtype=dtype)
    nn.init.normal_(critic.value_head.weight)
    save_critic(critic, parameters_of(critic), tmp_path / "critic")
    loaded = load_critic(tmp_path / "critic", dtype=dtype)
    for key, parameter in critic.named_parameters():
        assert torch.equal(parameter, loaded.get_parameter(key))
    assert torch.equal(loaded(IDS), critic(IDS))
    assert critic(IDS).abs().min() > 0


@pytest.mark.parametrize("name", DROPOUT)
def test_dropout_is_off_even_in_training_mode(name: str, tmp_path: Path) -> None:
    rates = DROPOUT[name]
    sizes = tiny_config(name) if name in CONFIGS else OTHER_CONFIGS[name]
    policy = create_policy({**sizes, **rates}, vocab_size=40, seed=0, dtype="float32")
    policy.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert {key: config[key] for key in rates} == rates
    for module in (policy, load_policy(tmp_path, dtype="float32")):
        assert not module.training
        quiet = module(input_ids=IDS).logits
        assert torch.equal(module.train()(input_ids=IDS).logits, quiet)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"temperature": 0.9, "top_p": 0.6}, {"temperature": 0.9, "top_p": 0.6, "do_sample": True}),
        ({"do_sample": False, "top_k": 20}, {"top_k": 20, "do_sample": True}),
        ({"pad_token_id": -1, "temperature": 0.5}, {}),
        ({"temperature": 0.5, "do_sample": True, "max_length": 9}, {"temperature": 0.5, "do_sample": True}),
    ],
)
def test_generation_settings_that_transformers_reads_and_does_not_write_stop_no_policy(
    given: dict[str, object], kept: dict[str, object], tmp_path: Path
) -> None:
    folder = tiny_folder(tmp_path / "given", "llama")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 7], **given}))
    policy = load_policy(folder, dtype="float32")
    save_policy(policy, parameters_of(policy), tiny_tokenizer(), tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "generation_config.json").read_text())
    assert saved["eos_token_id"] == [1, 7]
    assert {name: saved[name] for name in (*given, *kept) if name in saved}.items() >= kept.items()
    assert load_policy(tmp_path / "saved", dtype="float32").generation_config.eos_token_id == [1, 7]


def test_a_trunk_may_give_other_widths_than_its_layers_have(tmp_path: Path) -> None:
    policy = create_policy({**OTHER_CONFIGS["opt"], "word_embed_proj_dim": 16}, vocab_size=40, seed=0, dtype="float32")
    save_policy(policy, parameters_of(policy), tiny_tokenizer(), tmp_path)
    assert critic_from_policy(tmp_path, dtype="float32")(IDS).tolist() == [[0.0] * 5]
    assert add_value_head(policy).weight.shape == (1, 16)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a causal LM that transformers can load"):
        load_policy(tmp_path, dtype="float32")


def test_a_damaged_folder_is_refused_and_a_machine_without_memory_is_not_the_users_mistake(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, "llama")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(InputError, match="is not a causal LM that transformers can load"):
        load_policy(folder, dtype="float32")
    assert not issubclass(torch.OutOfMemoryError, BAD_FOLDER)
    assert not issubclass(MemoryError, BAD_FOLDER)


def test_a_configuration_of_no_known_architecture_is_refused() -> None:
    with pytest.raises(InputError, match="model_type='lama' is unknown to the installed transformers"):
        create_policy({"model_type": "lama"}, vocab_size=40, seed=0, dtype="float32")
