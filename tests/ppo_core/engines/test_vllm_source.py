"""Which models the installed vLLM has, by its source, beside what it says itself of one that it cannot run."""

from __future__ import annotations

import pytest

from ppo_core.data.tokenization import model_config
from ppo_core.engines.rollout_limits import engines_refusal
from ppo_core.engines.vllm_source import architectures, check_architecture
from ppo_core.models.loading import empty_policy
from ppo_core.records import InputError


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gpt2", "qwen3", "mistral", "gemma2", "opt", "gpt_neox"])
def test_common_models_are_known(model_type: str) -> None:
    model = empty_policy(model_config(None, {"model_type": model_type, "num_hidden_layers": 1}), model_type)
    assert type(model).__name__ in architectures()
    check_architecture(model)


def test_one_that_runs_by_transformers_own_code_is_not_refused() -> None:
    model = empty_policy(model_config(None, {"model_type": "biogpt", "num_hidden_layers": 1}), "biogpt")
    assert type(model).__name__ not in architectures()
    check_architecture(model)


@pytest.mark.parametrize(("model_type", "name"), [("gpt_neo", "GPTNeoForCausalLM"), ("codegen", "CodeGenForCausalLM")])
def test_one_that_vllm_cannot_run_is_refused(model_type: str, name: str) -> None:
    model = empty_policy(model_config(None, {"model_type": model_type}), model_type)
    with pytest.raises(InputError, match=rf"^vLLM has no {name} \(model_type={model_type}\), .* llama or qwen2$"):
        check_architecture(model)


@pytest.mark.parametrize(
    "said",
    [
        "Model architectures ['X'] are not supported for now. Supported architectures: dict_keys(['A'])",
        "Model architecture X was supported in vLLM until v0.9, and is not supported anymore. Please use an older one",
        "Model architecture X is not supported in-tree anymore. Please install the plugin at https://example.org",
    ],
)
def test_what_vllm_says_itself_is_told_shortly_and_not_tried_again(said: str) -> None:
    refusal = engines_refusal(said, kv_cache_gib=1.0, tokens=8)
    assert refusal is not None
    assert str(refusal).startswith("vLLM cannot run this model (Model architecture")
    assert "Please" not in str(refusal)
    assert "dict_keys" not in str(refusal)
