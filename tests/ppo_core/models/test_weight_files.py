"""Folders of models whose files are missing, cut short or of another model: found by headers, and by the loader."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    GPTNeoConfig,
    GPTNeoForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    RwkvConfig,
    RwkvForCausalLM,
)

from ppo_core.data.tokenization import check_config_keys, model_config
from ppo_core.engines.model_checks import check_model, fits
from ppo_core.models.loading import load_policy
from ppo_core.models.weight_files import tensor_shapes
from ppo_core.records import CheckRunJob, InputError
from ppo_core.spec import RunSpec, TrainingSpec
from ppo_core.spec.reward.kinds import ModelRewardSpec
from tasks.checks.findings import require_recomputing
from tests.ppo_core.tiny_models import tiny_folder, tiny_policy

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("whole"), "llama")


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))


def configure(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def checked(
    folder: Path, rewards: Sequence[Path] = (), *, samples: bool = True, new: bool = False, **model: Any
) -> dict[str, Any]:
    """As the scoring engine's job does it; a GPU takes heads of any size."""
    model = {"path": str(folder), **model}
    base = RunSpec.model_validate(
        {"dataset": {"train": "rows.jsonl"}, "model": model, "reward": {"function": "reward.py:f"}}
    )
    data = {"dataset": base.dataset, "model": base.model, "reward": base.reward}
    job = CheckRunJob.model_validate(
        {
            "dataset": {**data, "sft_data": None, "max_response_tokens": 8, "num_eval_prompts": 0},
            "engines": base.engines,
            "gpu": True,
            "samples": samples,
            "new": new,
        }
    )
    given = [(ModelRewardSpec(path=str(path), name=path.name), path) for path in rewards]
    return check_model(model_config(str(folder), None), folder, job, tokens=32, trust_remote_code=False, rewards=given)


def test_reward_models_that_read_less_than_the_longest_response_are_told(folder: Path, tmp_path: Path) -> None:
    long, short = (Path(shutil.copytree(folder, tmp_path / name)) for name in ("long", "short"))
    configure(long, max_position_embeddings=32)
    configure(short, max_position_embeddings=31)
    assert checked(folder, [long, short])["short_rewards"] == {"short": 31}


def test_a_flow_that_samples_nothing_needs_no_model_of_vllms(tmp_path: Path) -> None:
    folder = tmp_path / "gpt_neo"
    config = {"hidden_size": 8, "num_heads": 2, "num_layers": 1, "vocab_size": 16, "attention_types": [[["global"], 1]]}
    GPTNeoForCausalLM(GPTNeoConfig(**config)).save_pretrained(folder)
    with pytest.raises(InputError, match="vLLM has no GPTNeoForCausalLM"):
        checked(folder)
    assert checked(folder, samples=False)["model_type"] == "gpt_neo"


def test_where_activations_cannot_be_recomputed_that_is_refused_if_it_is_asked_for(folder: Path) -> None:
    facts = checked(folder)
    assert facts["recomputes"]
    require_recomputing(TrainingSpec(activation_checkpointing=True), facts)
    rigid = {**facts, "recomputes": False}
    require_recomputing(TrainingSpec(), rigid)
    with pytest.raises(
        InputError, match=r"checkpointing=true: .* cannot recompute .* \(type llama\), .*: leave it out"
    ):
        require_recomputing(TrainingSpec(activation_checkpointing=True), rigid)


def test_a_model_without_layers_that_recompute_is_told_apart(tmp_path: Path) -> None:
    sizes = {"n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 16, "n_positions": 64}
    OpenAIGPTLMHeadModel(OpenAIGPTConfig(**sizes)).save_pretrained(tmp_path)
    assert not checked(tmp_path, samples=False)["recomputes"]


def test_a_model_whose_passes_change_its_weights_is_refused(tmp_path: Path) -> None:
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "vocab_size": 16, "context_length": 64}
    RwkvForCausalLM(RwkvConfig(**sizes)).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="is of type rwkv, whose weights change with every pass: use another model"):
        checked(tmp_path, samples=False)


def test_experts_whose_router_wants_a_loss_of_its_own_are_refused(tmp_path: Path) -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 16, "num_local_experts": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
    MixtralForCausalLM(MixtralConfig(**sizes, **heads, output_router_logits=True)).save_pretrained(tmp_path)
    with pytest.raises(
        InputError, match=r"output_router_logits=true adds a balancing loss .*: set it to false in the config"
    ):
        checked(tmp_path, samples=False, new=True)
    checked(tmp_path, samples=False)
    configure(tmp_path, output_router_logits=False)
    checked(tmp_path, samples=False, new=True)


def test_a_reward_model_is_no_start_of_a_policy(tmp_path: Path) -> None:
    """With tied embeddings transformers would make a causal LM of its trunk, and leave its head out."""
    folder = tiny_folder(tmp_path, "llama-tied")
    configure(folder, architectures=["LlamaForSequenceClassification"])
    with pytest.raises(InputError, match=r"is a sequence classifier \(LlamaForSequenceClassification\), .* causal LM"):
        checked(folder)


@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen2", "gpt2"])
def test_a_folder_as_it_was_saved_fits_by_its_headers_alone(name: str, tmp_path: Path) -> None:
    folder, policy = tiny_folder(tmp_path, name), tiny_policy(name)
    assert fits(policy, tensor_shapes(folder))
    assert checked(folder)["parameters"] == sum(parameter.numel() for parameter in policy.parameters())


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        (
            {"target_modules": ["q", "v_proj"]},
            "target_modules: q names no linear layer .* there are down_proj, gate_pr",
        ),
        ({"target_modules": ["lm_head"]}, "lm_head names no linear layer .*the output embedding gets no adapter"),
        ({"rank": 33}, r"rank=33 is above 32, the smaller side of model.layers.0.self_attn.q_proj: lower it to 32 or "),
    ],
)
def test_adapters_that_do_not_fit_are_found_without_the_weights(whole: Path, lora: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        checked(whole, lora=lora)
    assert checked(whole, lora={"rank": 32, "target_modules": ["v_proj"]})["parameters"] > 0


def test_shards_are_read_by_their_index_and_a_missing_one_is_named(folder: Path) -> None:
    expected = tensor_shapes(folder)
    policy = load_policy(folder, dtype="float32")
    (folder / "model.safetensors").unlink()
    policy.save_pretrained(folder, max_shard_size="20KB")
    assert tensor_shapes(folder) == expected
    first, *_ = sorted(folder.glob("model-*.safetensors"))
    first.unlink()
    with pytest.raises(InputError, match=rf"lacks 1 of the \d+ files that its {INDEX} names \({first.name}\)"):
        checked(folder)


@pytest.mark.parametrize("index", ['{"weight_map": {"a": null}}', '{"weight_map": 3}', "[]", "[" * 100_000])
def test_an_index_that_names_no_files_is_refused(folder: Path, index: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / INDEX).write_text(index)
    with pytest.raises(InputError, match=f"{INDEX} cannot be read .*: copy or download the model's folder again"):
        tensor_shapes(folder)


def test_files_that_hold_no_weights_are_refused(folder: Path) -> None:
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    for broken, words in ((content[:-5], "but its header says"), (content[:40], "cut short"), (b"", "cut short")):
        weights.write_bytes(broken)
        with pytest.raises(InputError, match=words):
            checked(folder)
    weights.unlink()
    with pytest.raises(InputError, match=f"has neither model.safetensors nor {INDEX}"):
        checked(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"num_key_value_heads": 1},
            r"k_proj.weight is \[32, 32\] in the weights and \[16, 32\] by config.json, and 3",
        ),
        ({"vocab_size": 50}, r"lm_head.weight is \[40, 32\] in the weights and \[50, 32\] by config.json, and 1 more"),
        ({"num_hidden_layers": 3}, r"model.layers.2.\S+ is not in the weights, and \d+ more. Take both from the same"),
    ],
)
def test_weights_of_another_configuration_are_refused_by_the_check_and_by_the_loader(
    folder: Path, change: dict[str, Any], words: str
) -> None:
    configure(folder, **change)
    with pytest.raises(InputError, match=words):
        checked(folder)
    with pytest.raises(InputError, match=words):
        load_policy(folder, dtype="float32")


def test_a_configuration_that_makes_no_model_is_refused(folder: Path) -> None:
    configure(folder, model_type="t5")
    with pytest.raises(InputError, match="t5 is not a type of causal LM"):
        checked(folder)


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("t5", r"t5 is not a type of causal LM: use one that generates text"),
        ("clip", "clip is not a type of causal LM"),
        ("llava", "llava is not a type of causal LM"),
        ("lama", r"model_type='lama' is unknown to the installed transformers; did you mean llama"),
    ],
)
def test_a_folder_of_another_kind_of_model_is_refused_in_a_line(tmp_path: Path, model_type: str, message: str) -> None:
    (folder := tmp_path / "model").mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(InputError, match=message) as refusal:
        checked(folder)
    assert len(str(refusal.value)) < 300 + len(str(folder))


def test_what_a_configuration_is_refused_for_is_a_line() -> None:
    with pytest.raises(InputError, match=r"^model.config: no usable configuration \(") as refusal:
        model_config(None, {"model_type": "llama", "hidden_size": "x" * 5000})
    assert len(str(refusal.value)) < 400


def test_a_misspelt_key_of_a_configuration_is_refused_and_one_of_its_own_is_not() -> None:
    with pytest.raises(
        InputError, match=r"^model.config.num_hidden_layer: unknown key of llama; did you mean num_hidden_"
    ):
        check_config_keys({"model_type": "llama", "num_hidden_layer": 2})
    for kind, key in (("gpt2", "hidden_size"), ("llama", "rope_theta"), ("qwen2", "layer_types")):
        given = {"hidden_size": 48, "rope_theta": 500.0, "layer_types": ["full_attention"] * 2, "num_hidden_layers": 2}
        check_config_keys({"model_type": kind, key: given[key], "num_hidden_layers": 2})
    for kind, key in (
        ("gemma3_text", "sliding_window_pattern"),
        ("llama", "output_attentions"),
        ("gpt_neo", "num_labels"),
    ):
        check_config_keys({"model_type": kind, key: 1})


def test_a_quantised_model_is_refused(folder: Path) -> None:
    configure(folder, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(InputError, match=r"model is quantised \(quantization_config\), .*: use the model that it was"):
        checked(folder)


def test_heads_that_vllm_refuses_are_found_by_the_check(folder: Path) -> None:
    configure(folder, num_attention_heads=4, num_key_value_heads=3)
    with pytest.raises(InputError, match=r"num_key_value_heads=3 does not divide its num_attention_heads=4"):
        checked(folder)
