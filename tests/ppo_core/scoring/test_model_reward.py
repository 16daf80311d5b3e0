"""The reward `model`: what a classifier says of each text alone, whatever stands beside it in a batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, RobertaConfig, RobertaForSequenceClassification

from ppo_core.engines.scoring import check_run
from ppo_core.models.classifier import Classifier
from ppo_core.processes.plugins import Sources
from ppo_core.processes.protocol import Job, JobInput
from ppo_core.records import CheckRunJob, InputError, PromptRow, TrainingJob
from ppo_core.scoring.reward import Sample
from ppo_core.scoring.weighted import WeightedRewards
from ppo_core.spec import RewardSpec, RunSpec
from tests.ppo_core.scoring.scoring_jobs import write_lines
from tests.ppo_core.tiny_models import CONTEXT, VOCABULARY, tiny_folder, tiny_policy, tiny_tokenizer

TEXTS = ["w3", "w4 w5 <eos>", "w6 w7 w8 w9 w3 w3", "<eos> <eos>", "w30 w31", " ".join(["w5"] * 20)]
SAMPLES = [Sample(PromptRow(str(n), "w9 w8 ", [1], None, {}), text) for n, text in enumerate(TEXTS)]


def reward_model(folder: Path, name: str = "llama", *, labels: int = 1, chat: bool = False, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    config = tiny_policy(name).config
    config.num_labels = labels
    model = AutoModelForSequenceClassification.from_config(config)
    with torch.no_grad():
        model.score.weight.normal_()
    model.save_pretrained(folder)
    tiny_tokenizer(chat=chat).save_pretrained(folder)
    return folder


def rewards(folder: Path, digest: str = "", **options: Any) -> WeightedRewards:
    spec = RewardSpec.model_validate({"sources": [{"kind": "model", "path": "rm", **options}]})
    return WeightedRewards(spec, Sources(folder, digest=digest), "answer")


def scores(found: WeightedRewards, samples: list[Sample] = SAMPLES) -> list[float | None]:
    return [parts.scores["model"] for parts in found.score(samples)]


@torch.inference_mode()
def alone(folder: Path, texts: list[str]) -> list[float]:
    """Without padding: the head's number at the last token."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = tiny_tokenizer()
    found = []
    for text in texts:
        hidden = model.base_model(torch.tensor([tokenizer(text)["input_ids"]])).last_hidden_state
        found.append(float(model.score(hidden)[0, -1, 0]))
    return found


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("tokens", [1, 16, 4096])
def test_each_text_has_the_score_that_it_has_alone(tmp_path: Path, name: str, tokens: int) -> None:
    """Also where it ends with EOS, which is the padding of the tokenizer."""
    folder = reward_model(tmp_path / "rm", name)
    expected = alone(folder, [f"w9 w8 {text}" for text in TEXTS])
    assert len({round(score, 3) for score in expected}) == len(TEXTS)
    assert scores(rewards(tmp_path, microbatch_tokens=tokens)) == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_texts_that_use_the_whole_vocabulary_need_no_padding(tmp_path: Path) -> None:
    folder = reward_model(tmp_path / "rm")
    every = [list(range(first, min(first + 17, VOCABULARY))) for first in range(0, VOCABULARY, 17)]
    model = Classifier(folder, dtype="float32", trust_remote_code=False)
    assert model.scores(every, 4096) == pytest.approx([model.scores([one], 4096)[0] for one in every], abs=1e-6)


def test_a_chat_is_read_as_the_template_writes_it(tmp_path: Path) -> None:
    folder = reward_model(tmp_path / "rm", chat=True)
    chat = PromptRow("c", [{"role": "user", "content": "w9 w8"}], [1], None, {})
    assert scores(rewards(tmp_path), [Sample(chat, "w3")]) == pytest.approx(alone(folder, ["w9 w8 w3"]), abs=1e-6)
    strict = tiny_tokenizer(chat=True)
    strict.chat_template = "{{ raise_exception('no system') }}"
    reward_model(tmp_path / "strict" / "rm")
    strict.save_pretrained(tmp_path / "strict" / "rm")
    with pytest.raises(
        InputError, match=r"cannot format messages with the roles user, assistant \(TemplateError: no system\)"
    ):
        rewards(tmp_path / "strict").score([Sample(chat, "w3")])
    reward_model(tmp_path / "other" / "rm")
    with pytest.raises(InputError, match=r"the prompts are messages, and the tokenizer of .* has no chat_template"):
        rewards(tmp_path / "other").score([Sample(chat, "w3")])


def test_a_text_beyond_the_context_has_no_score(tmp_path: Path) -> None:
    reward_model(tmp_path / "rm")
    parts, other = rewards(tmp_path).score([Sample(SAMPLES[0].row, "w3 " * CONTEXT), SAMPLES[0]])
    assert parts.scores == {"model": None}
    assert parts.error() == "not scored by model: 34 tokens, but the reward model reads 1 to 32"
    assert other.scores["model"] is not None


def test_a_text_whose_score_is_not_finite_has_none(tmp_path: Path) -> None:
    """The model overflows on one token, as one in float16 may on some texts."""
    folder = reward_model(tmp_path / "rm")
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    (token,) = tiny_tokenizer()("w30")["input_ids"]
    with torch.no_grad():
        model.get_input_embeddings().weight[token] = torch.inf
    model.save_pretrained(folder)
    found = rewards(tmp_path).score(SAMPLES)
    assert [one.scores["model"] is None for one in found] == ["w30" in text for text in TEXTS]
    assert "its score is nan" in (found[4].error() or "")
    with pytest.raises(InputError, match="score 0 is nan"):
        rewards(tmp_path).score([SAMPLES[4]])


def test_a_model_whose_positions_begin_after_padding_reads_as_many_as_it_has(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = RobertaConfig(vocab_size=VOCABULARY, max_position_embeddings=34, pad_token_id=1, num_labels=1, **sizes)
    RobertaForSequenceClassification(config).save_pretrained(tmp_path / "rm")
    tiny_tokenizer().save_pretrained(tmp_path / "rm")
    model = Classifier(tmp_path / "rm", dtype="float32", trust_remote_code=False)
    assert model.context == 34 - 1 - 1
    both = [[5] * 32, [6, 7]]
    assert model.scores(both, 4096) == pytest.approx([model.scores([one], 4096)[0] for one in both], abs=1e-6)
    with pytest.raises(RuntimeError, match="out of bounds"):
        model.scores([[5] * 33], 4096)


def test_a_model_is_read_again_when_its_files_are_others(tmp_path: Path) -> None:
    reward_model(tmp_path / "rm")
    before = scores(rewards(tmp_path, "one"))
    reward_model(tmp_path / "rm", seed=1)
    assert scores(rewards(tmp_path, "one")) == before
    assert scores(rewards(tmp_path, "two")) != before


def test_what_is_no_reward_model_is_refused(tmp_path: Path) -> None:
    reward_model(tmp_path / "two" / "rm", labels=2)
    with pytest.raises(InputError, match=r"has num_labels=2 in its config.json, but a reward"):
        rewards(tmp_path / "two").score(SAMPLES)
    tiny_policy("llama").save_pretrained(tmp_path / "policy" / "rm")
    tiny_tokenizer().save_pretrained(tmp_path / "policy" / "rm")
    config = tmp_path / "policy" / "rm" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "id2label": {"0": "LABEL_0"}}))
    with pytest.raises(
        InputError, match=r"has no head that gives scores .score.weight is not in the weights., so it is not"
    ):
        rewards(tmp_path / "policy").score(SAMPLES)
    folder = reward_model(tmp_path / "bare" / "rm")
    for path in folder.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(InputError, match=r"has no tokenizer: put the reward model's own tokenizer"):
        rewards(tmp_path / "bare").score(SAMPLES)


def test_a_device_is_chosen_and_a_gpu_that_is_not_there_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    reward_model(tmp_path / "rm")
    assert scores(rewards(tmp_path, device="cpu")) == scores(rewards(tmp_path))
    with pytest.raises(
        InputError,
        match=r"the device of the reward model=cuda, but this machine has no GPU .*: set it to cpu, or to auto",
    ):
        rewards(tmp_path, device="cuda")


def test_more_ranks_than_gpus_are_refused_where_there_are_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(
        InputError, match=r"num_ranks=3 of the reward model is more than the 2 GPUs here, .* device to cpu"
    ):
        rewards(tmp_path, num_ranks=3).score(SAMPLES)


def test_a_model_on_a_cpu_has_no_room_to_make(tmp_path: Path) -> None:
    model = Classifier(reward_model(tmp_path / "rm"), dtype="float32", trust_remote_code=False, device="cpu")
    before = model.scores([[3, 4], [5]], 4096)
    assert model.make_room() == 0
    assert model.scores([[3, 4], [5]], 4096) == before


def test_the_check_of_a_run_counts_its_reward_models(tmp_path: Path) -> None:
    """The cache alone is too large for this GPU; what the message counts says what was looked at."""
    write_lines(tmp_path / "train.jsonl", [{"prompt": "w9 w8", "answer": number} for number in range(3)])
    policy, model = tiny_folder(tmp_path / "policy", "llama"), reward_model(tmp_path / "rm")
    spec = RunSpec.model_validate(
        {
            "dataset": {"train": "train.jsonl"},
            "model": {"path": "policy"},
            "reward": {"sources": [{"kind": "model", "path": "rm"}]},
        }
    )
    data = {"sft_data": None, "max_response_tokens": 8, "num_eval_prompts": 2}
    checked = {"dataset": spec.dataset, "model": spec.model, "reward": spec.reward, **data}
    learner = TrainingJob(model=spec.model, algorithm=spec.algorithm, training=spec.training)
    gpu = {"gpu": True, "gpu_gib": 0.5, "sharing": "own", "learner": learner}
    job = CheckRunJob.model_validate({"dataset": checked, "engines": spec.engines, **gpu})
    folders = {"sources": tmp_path, "tokenizer": policy, "model": policy}
    inputs = {name: JobInput(folder, "") for name, folder in folders.items()}
    asked = Job("check_run", inputs, tmp_path, job.model_dump(mode="json"), lambda *_: None)
    with pytest.raises(InputError, match=r"0\.0 for reward models \(weights\) and 1\.0 for sampling"):
        check_run(asked)
    (model / "model.safetensors").rename(model / "elsewhere.safetensors")
    with pytest.raises(
        InputError, match=r"rm has neither model\.safetensors nor"
    ):  # its headers are read, not its weights
        check_run(asked)
