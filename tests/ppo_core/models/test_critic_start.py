"""A critic that begins as another model than the policy: its first values, its weights, and what it cannot begin as."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

from ppo_core.engines.scoring import check_run
from ppo_core.logprobs import response_values
from ppo_core.models.adapter_files import load_adapters
from ppo_core.models.loading import Critic, load_critic
from ppo_core.models.lora import adapt
from ppo_core.models.packing import enable_packing
from ppo_core.processes.protocol import Job, JobInput
from ppo_core.processes.ranks import Ranks
from ppo_core.records import CheckRunJob, InputError, StartPolicyJob
from ppo_core.spec import DpoSpec, LoraSpec, ModelSpec, RewardModelSpec, RunSpec, SpecError
from ppo_core.training.service import TrainingEngine
from tests.ppo_core.scoring.scoring_jobs import write_lines
from tests.ppo_core.spec.refused_specs import SMALLEST
from tests.ppo_core.tiny_models import (
    CONTEXT,
    VOCABULARY,
    ragged_sequences,
    tiny_config,
    tiny_folder,
    tiny_policy,
    tiny_tokenizer,
)

OTHER_SIZE = {"hidden_size": 48, "num_hidden_layers": 3, "intermediate_size": 64}
CTRL = {"model_type": "ctrl", "n_embd": 32, "dff": 48, "n_layer": 2, "n_head": 2, "n_positions": CONTEXT}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {**tiny_config("llama"), **OTHER_SIZE, "attention_dropout": 0.5},
    "gpt2": {**tiny_config("gpt2"), "resid_pdrop": 0.5},
    "ctrl": {**CTRL, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
}
HEADS = {"llama": "score.weight", "gpt2": "score.weight", "ctrl": "classifier.weight"}


def classifier(folder: Path, name: str = "llama", *, labels: int = 1, **changes: Any) -> Path:
    """A reward model of another size than the policies, with a head that says something."""
    settings = {"vocab_size": VOCABULARY, **KINDS.get(name, {"model_type": name}), **changes, "num_labels": labels}
    torch.manual_seed(7)
    config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    model = AutoModelForSequenceClassification.from_config(config)
    if name in HEADS:
        torch.nn.init.normal_(model.get_parameter(HEADS[name]))
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def engine() -> Iterator[TrainingEngine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        yield TrainingEngine(Ranks(0, 1))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("policy") / "model", "llama-tied")


def begin(engine: TrainingEngine, policy: Path, end: Path, critic: Path | None = None, **model: Any) -> Path:
    """Checkpoint 0, by the engine's own job."""
    folders = {"tokenizer": policy, "model": policy, **({} if critic is None else {"critic": critic})}
    inputs = {name: JobInput(folder, f"digest of {folder}") for name, folder in folders.items()}
    spec = StartPolicyJob(seed=1, model=ModelSpec(path="policy", **model))
    end.mkdir()
    engine.handlers["start_policy"](Job("start_policy", inputs, end, spec.model_dump(mode="json"), lambda *_: None))
    return end


@torch.inference_mode()
def scores(folder: Path, ids: list[int]) -> list[float]:
    """What transformers' classifier says of each beginning of a text, one by one."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    model.config.pad_token_id = -1
    return [float(model(input_ids=torch.tensor([ids[: end + 1]])).logits[0, 0]) for end in range(len(ids))]


def require_scores(critic: Any, reward_model: Path) -> None:
    """That the critic's value after each token, alone and as the update computes it, is the reward model's score."""
    enable_packing(critic)
    texts = ragged_sequences(4)
    with torch.inference_mode():
        together = response_values(critic, texts)
    for row, (prompt, response) in enumerate(texts):
        expected = scores(reward_model, [*prompt, *response])
        assert len({round(score, 3) for score in expected}) > 1
        with torch.inference_mode():
            alone = critic(torch.tensor([[*prompt, *response]]))[0].tolist()
        assert alone == pytest.approx(expected, rel=1e-5, abs=1e-5)
        found = [*together.values[row, : len(response)].tolist(), float(together.final[row])]
        assert found == pytest.approx(expected[len(prompt) - 1 :], rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("name", KINDS)
def test_the_first_values_are_the_scores_of_the_reward_model(
    engine: TrainingEngine, policy: Path, tmp_path: Path, name: str
) -> None:
    """Whatever its size, and whatever transformers calls its head."""
    reward_model = classifier(tmp_path / "rm", name)
    found = begin(engine, policy, tmp_path / "start", reward_model)
    require_scores(load_critic(found / "critic", dtype="float32"), reward_model)
    plain = begin(engine, policy, tmp_path / "plain")
    assert (found / "policy" / "model.safetensors").read_bytes() == (
        plain / "policy" / "model.safetensors"
    ).read_bytes()
    identities = [json.loads((folder / "state.json").read_text())["identity"] for folder in (found, plain)]
    assert len(set(identities)) == 2


def test_adapters_leave_the_first_values_as_they_are(engine: TrainingEngine, policy: Path, tmp_path: Path) -> None:
    """The head is trained in full beside them, and is among what is stored with them."""
    reward_model, lora = classifier(tmp_path / "rm"), LoraSpec(rank=4)
    found = begin(engine, policy, tmp_path / "start", reward_model, lora=lora)
    critic = load_critic(found / "critic", dtype="float32")
    adapt(critic, lora)
    load_adapters(critic, found / "adapters" / "critic")
    require_scores(critic, reward_model)


def test_a_reward_model_in_bfloat16_keeps_its_weights(engine: TrainingEngine, policy: Path, tmp_path: Path) -> None:
    reward_model = classifier(tmp_path / "rm")
    found = begin(engine, policy, tmp_path / "start", reward_model, dtype="bfloat16")
    stored, head = load_file(reward_model / "model.safetensors"), load_critic(found / "critic", dtype="bfloat16")
    assert torch.equal(head.value_head.weight, stored["score.weight"].bfloat16())
    assert torch.equal(head.backbone.embed_tokens.weight, stored["model.embed_tokens.weight"].bfloat16())


def test_a_causal_lm_gives_its_trunk_and_no_opinion(engine: TrainingEngine, policy: Path, tmp_path: Path) -> None:
    tiny_policy("gpt2", seed=5).save_pretrained(tmp_path / "lm")
    found = load_critic(begin(engine, policy, tmp_path / "start", tmp_path / "lm") / "critic", dtype="float32")
    assert isinstance(found, Critic)
    assert not found.value_head.weight.any()
    for name, weight in tiny_policy("gpt2", seed=5).transformer.named_parameters():
        assert torch.equal(found.backbone.get_parameter(name), weight), name


def test_the_jobs_of_a_run_know_of_the_critic_by_its_files_alone() -> None:
    """A key or an identity with its name would make everything anew when the folder is moved."""
    spec = RunSpec.model_validate({**SMALLEST, "model": {"path": "folder", "critic": "rm"}})
    assert (spec.critic, spec.model_folders) == ("rm", ("rm",))
    assert RunSpec.model_validate(spec.document()).document() == spec.document()
    job = StartPolicyJob(seed=1, model=spec.model)
    assert job.model_dump(mode="json")["model"].keys() == ModelSpec.model_fields.keys()


def cut(folder: Path) -> None:
    """Without the last layer."""
    weights = load_file(folder / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if "layers.2." not in name}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})


def headless(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights.pop("score.weight")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def other_tokens(folder: Path) -> None:
    words = json.loads((folder / "tokenizer.json").read_text())
    known = words["model"]["vocab"]
    known["w5"], known["w6"] = known["w6"], known["w5"]
    (folder / "tokenizer.json").write_text(json.dumps(words))


def quantised(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq"}}))


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
UNFIT: dict[str, tuple[dict[str, Any], Callable[[Path], None], str]] = {
    "two labels": ({"labels": 2}, lambda _: None, "has num_labels=2 in its config.json, .* trained with num_labels=1"),
    "few tokens": (
        {"vocab_size": VOCABULARY - 1},
        lambda _: None,
        r"model.critic: the vocab_size of .*rm is 39, and the run's tokenizer has 40 tokens, .*: use a model with the",
    ),
    "other tokens": ({}, other_tokens, r"has other tokens than the run's \('w5' is 6 there and 5 here\): use a model"),
    "a short context": (
        {"max_position_embeddings": 9},
        lambda _: None,
        "model.critic: .*rm reads 9 tokens, and the longest prompt and response have 10: lower rollout.max_response",
    ),
    "another head": (
        {"name": "bert", **SMALL},
        lambda _: None,
        r"the head of .*rm is not linear without a bias \(classifier.weight \[1, 32\], classifier.bias \[1\]\)",
    ),
    "no text": (
        {"name": "distilbert", "dim": 32, "n_heads": 2, "n_layers": 1, "hidden_dim": 32},
        lambda _: None,
        "distilbert is not a type of causal LM: use one that generates text",
    ),
    "no head": ({}, headless, "has no head that gives scores"),
    "a layer less": ({}, cut, "config.json and the weights do not match: model.layers.2.* and 8 more"),
    "no weights": ({}, without("model.safetensors"), "rm has neither model.safetensors nor"),
    "quantised": ({}, quantised, "rm is quantised"),
}


def asked(place: Path, policy: Path, critic: Path, **model: Any) -> Job:
    """What `ppoflow check` asks the scoring engine; a prompt has 2 tokens, a response up to 8."""
    write_lines(place / "train.jsonl", [{"prompt": "w9 w8", "answer": number} for number in range(3)])
    spec = RunSpec.model_validate(
        {
            "dataset": {"train": "train.jsonl"},
            "model": {"path": str(policy), "critic": str(critic), **model},
            "reward": {"sources": [{"kind": "exact_match"}]},
        }
    )
    data = {"sft_data": None, "max_response_tokens": 8, "num_eval_prompts": 0}
    checked = {"dataset": spec.dataset, "model": spec.model, "reward": spec.reward, **data}
    job = CheckRunJob.model_validate({"dataset": checked, "engines": spec.engines, "gpu": None})
    folders = {"sources": place, "tokenizer": policy, "model": policy, "critic": critic}
    inputs = {name: JobInput(folder, "") for name, folder in folders.items()}
    return Job("check_run", inputs, place, job.model_dump(mode="json"), lambda *_: None)


@pytest.mark.parametrize("case", UNFIT)
def test_a_check_refuses_what_no_critic_can_begin_as(policy: Path, tmp_path: Path, case: str) -> None:
    settings, spoil, words = UNFIT[case]
    folder = classifier(tmp_path / "rm", **settings)
    spoil(folder)
    with pytest.raises(InputError, match=words):
        check_run(asked(tmp_path, policy, folder))


def test_a_check_takes_what_a_critic_can_begin_as(policy: Path, tmp_path: Path) -> None:
    """Also a folder without a tokenizer, and one that has a token more."""
    for name in KINDS:
        assert check_run(asked(tmp_path, policy, classifier(tmp_path / name, name)))["model_type"] == "llama"
    bare = classifier(tmp_path / "bare", vocab_size=VOCABULARY + 9)
    for path in bare.glob("tokenizer*"):
        path.unlink()
    check_run(asked(tmp_path, policy, bare))
    tokenizer: PreTrainedTokenizerFast = tiny_tokenizer()
    tokenizer.add_tokens(["<pad>"])
    tokenizer.save_pretrained(bare)
    check_run(asked(tmp_path, policy, bare))
    check_run(asked(tmp_path, policy, tiny_folder(tmp_path / "lm", "gpt2")))


def test_adapters_have_to_fit_the_critic_too(policy: Path, tmp_path: Path) -> None:
    folder, lora = classifier(tmp_path / "rm", "gpt2"), {"rank": 4, "target_modules": ["q_proj"]}
    with pytest.raises(InputError, match=r"target_modules: q_proj names no linear layer .*there are c_attn, c_fc, "):
        check_run(asked(tmp_path, policy, folder, lora=lora))


def test_the_start_refuses_other_tokens_too(engine: TrainingEngine, policy: Path, tmp_path: Path) -> None:
    """A reward model that is trained on the way is not there when the way is checked."""
    with pytest.raises(InputError, match=r"the vocab_size of .*rm is 39"):
        begin(engine, policy, tmp_path / "start", classifier(tmp_path / "rm", vocab_size=VOCABULARY - 1))


@pytest.mark.parametrize("kind", ["rloo", "grpo", "reinforce", "ppo_shared"])
def test_an_algorithm_without_a_critic_of_its_own_is_refused(kind: str) -> None:
    document = {**SMALLEST, "model": {"path": "folder", "critic": "rm"}, "algorithm": {"kind": kind}}
    document["rollout"] = {"samples_per_prompt": 4}
    with pytest.raises(ValueError, match=rf"model.critic=rm has no effect with algorithm.kind={kind} .*: leave it out"):
        RunSpec.model_validate(document)


@pytest.mark.parametrize("kind", [DpoSpec, RewardModelSpec])
def test_where_nothing_has_a_critic_there_is_no_such_key(kind: type[DpoSpec | RewardModelSpec], tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(json.dumps({"model": {"path": "x", "critic": "rm"}}))
    with pytest.raises(SpecError, match=r"model.critic: unknown key \(known: path, config, tokenizer, dtype, lora\)"):
        kind.from_yaml(tmp_path / "spec.yaml")


def test_a_name_of_the_hub_is_a_whole_repository() -> None:
    with pytest.raises(ValueError, match=re.escape("hf://owner/name:rm names rm in a repository")):
        RunSpec.model_validate({**SMALLEST, "model": {"path": "folder", "critic": "hf://owner/name:rm"}})
