"""The whole loop of jobs on engines of three architectures, with and without chat template, and a registered policy."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from infra.engines.process import EngineJobError
from infra.mlflow.model_files import write_mlmodel
from infra.mlflow.registry import register, resolve
from ppo_core.records import OptimizerSettings, RolloutRow
from ppo_core.spec import UpdateSpec
from tests.ppo_core.engines.engine_jobs import Client, ends_by_itself, open_engine
from tests.ppo_core.tiny_policies import (
    ARCHITECTURES,
    CONTEXT,
    VOCABULARY,
    forward_logprobs,
    greedy_tokens,
    make_policy,
)

pytest_plugins = ["tests.ppo_core.engines.engine_fixtures"]
pytestmark = pytest.mark.thorough

REWARD = """
def small_letters(prompts, completions, answer):
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [sum(letter.islower() for letter in text) / 16 for text in texts]
"""
UPDATE: dict[str, Any] = {
    "num_ppo_epochs": 1,
    "num_minibatches": 2,
    "learning_rate": 3e-3,
    "warmup_iterations": 0,
    "decay_iterations": 9,
}
TRAINING = {"microbatch_size": 8}
SPEC_REWARD = {"function": "reward.py:small_letters"}


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    client = open_engine("training", tmp_path_factory.mktemp("training"))
    yield client
    client.engine.close()


@dataclass(frozen=True)
class Loop:
    """The stages of a run as jobs, in the order of a flow."""

    rollout: Client
    scoring: Client
    training: Client
    model: Path
    sources: Path

    def prepare(self) -> Path:
        spec = {
            "dataset": {"train": "train.jsonl"},
            "model": {"path": str(self.model)},
            "sft_data": None,
            "max_response_tokens": 16,
            "num_eval_prompts": 0,
            "reward": SPEC_REWARD,
        }
        inputs = {"sources": self.sources, "tokenizer": self.model, "model": self.model}
        output = self.scoring.output()
        self.scoring.run("prepare_dataset", inputs, spec, output)
        return output

    def start(self, dataset: Path) -> Path:
        spec = {"seed": 0, "model": {"path": str(self.model)}}
        inputs = {"dataset": dataset, "tokenizer": self.model, "model": self.model}
        output = self.training.output()
        self.training.run("start_policy", inputs, spec, output)
        return output

    def experience(self, checkpoint: Path, reference: Path, dataset: Path, stream: int) -> tuple[Path, dict[str, Any]]:
        """Rollouts, scores and advantages: the experience and the metrics of the last."""
        rows = self.rollout.generate(checkpoint, dataset, samples_per_prompt=4, stream=stream)
        rollouts = self.rollout.folder / f"job-{next(self.rollout.numbers) - 1}"
        check_against_transformers(checkpoint, rows)
        scores = self.scoring.output()
        inputs = {"sources": self.sources, "rollouts": rollouts, "dataset": dataset}
        spec: dict[str, Any] = {"reward": SPEC_REWARD, "answer_column": "answer", "split": "train"}
        self.scoring.run("score_rollouts", inputs, spec, scores)
        spec = {
            "model": {"path": str(self.model)},
            "temperature": 1.0,
            "advantages": {},
            "training": TRAINING,
            "optimizer": OptimizerSettings.of(UpdateSpec(**UPDATE)).model_dump(mode="json"),
            "kl_coef": 0.01,
            "max_response_tokens": 16,
        }
        inputs = {"checkpoint": checkpoint, "reference": reference, "rollouts": rollouts, "scores": scores}
        output = self.training.output()
        return output, self.training.run("compute_advantages", inputs, spec, output).result["metrics"]

    def update(self, checkpoint: Path, experience: Path) -> Path:
        spec = {
            "seed": 0,
            "iteration": 0,
            "model": {"path": str(self.model)},
            "update": UPDATE,
            "training": TRAINING,
            "temperature": 1.0,
        }
        output = self.training.output()
        self.training.run("update_policy", {"checkpoint": checkpoint, "experience": experience}, spec, output)
        return output


def check_against_transformers(checkpoint: Path, rows: list[RolloutRow]) -> None:
    for row in rows[::5]:
        prompt, response = row.prompt_token_ids, row.response_token_ids
        expected = forward_logprobs(checkpoint / "policy", prompt, response, temperature=1.0)
        assert row.sampler_logprobs == pytest.approx(expected, rel=0, abs=1e-4)  # float32 over two layers


def write_sources(folder: Path, *, chat: bool) -> Path:
    folder.mkdir()
    (folder / "reward.py").write_text(REWARD)
    texts = ["abc", "Xyz xyz", "a 1 b 2 c 3", "q"]
    prompts = [[{"role": "user", "content": text}] for text in texts] if chat else texts
    rows = [json.dumps({"prompt": prompt, "answer": "b"}) for prompt in prompts]
    (folder / "train.jsonl").write_text("\n".join(rows))
    return folder


@pytest.mark.parametrize("chat", [False, True], ids=["text", "chat"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_sampler_and_the_trainer_agree_before_and_after_an_update(
    rollout: Client, scoring: Client, training: Client, tmp_path: Path, architecture: str, chat: bool
) -> None:
    pad = "<eos>" if chat else "<pad>"
    model = make_policy(tmp_path / "model", architecture=architecture, tied=not chat, chat=chat, pad=pad, letters=True)
    loop = Loop(rollout, scoring, training, model, write_sources(tmp_path / "sources", chat=chat))
    dataset = loop.prepare()
    start = loop.start(dataset)
    experience, before = loop.experience(start, start, dataset, stream=0)
    updated = loop.update(start, experience)
    _, after = loop.experience(updated, start, dataset, stream=1)
    assert 0.0 < before["sampler/logprob_difference_max"] < 1e-3
    assert 0.0 < after["sampler/logprob_difference_max"] < 1e-3
    assert before["kl/reference"] == 0.0
    assert after["kl/reference_per_token_k3"] > 1e-4
    # Else the rollout engine would start anew in every iteration.
    assert (start / "policy/config.json").read_text() == (updated / "policy/config.json").read_text()
    given, kept = (load_file(folder / "model.safetensors") for folder in (model, start / "policy"))
    assert all((given[name] == kept[name]).all() for name in given)
    moved = load_file(updated / "policy/model.safetensors")
    assert all((given[name] != moved[name]).any() for name in given if given[name].ndim > 1)
    print(architecture, "chat" if chat else "text", before, after)


def test_a_registered_policy_gives_everybody_the_same_answers(
    rollout: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow

    uri, prompt = f"sqlite:///{tmp_path}/mlflow.db", "w1 w7 w3"
    policy = make_policy(tmp_path / "checkpoint" / "policy", seed=4)
    write_mlmodel(policy, digest_seed="k" * 64, context_length=CONTEXT)
    register(uri, name="tiny", source=policy.as_uri(), tags={"ppoflow.digest": "d"}, aliases=["best"])
    found = Path(resolve(uri, "models:/tiny@best").removeprefix("file://"))

    expected = greedy_tokens(found, [VOCABULARY.index(word) for word in prompt.split()], 12)
    wish = {"prompt": prompt, "temperature": 0.0, "max_tokens": 12, "count": 1, "seed": 0}
    sampled = rollout.run("sample", {"policy": found}, wish, None).result["responses"]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    pipeline: Any = mlflow.transformers.load_model("models:/tiny@best")
    (served,) = pipeline(prompt, max_new_tokens=12, do_sample=False, return_full_text=False)

    assert len(set(expected)) > 4
    assert sampled == [" ".join(VOCABULARY[token] for token in expected if token > 3)]
    assert served["generated_text"].split() == sampled[0].split()


@pytest.mark.parametrize(("template", "chat"), [(True, True), (True, False), (False, False)])
def test_a_question_by_hand_goes_through_the_template_where_there_is_one_and_it_is_wished(
    rollout: Client, tmp_path: Path, template: bool, chat: bool
) -> None:
    wish = {"prompt": "w1 w7", "temperature": 0.0, "max_tokens": 12, "count": 1, "seed": 0, "chat": chat}
    words = ["user", "w1", "w7", "<end>", "assistant"] if chat else ["w1", "w7"]
    policy = make_policy(tmp_path / "policy", seed=4, chat=template)
    (answer,) = rollout.run("sample", {"policy": policy}, wish, None).result["responses"]
    expected = greedy_tokens(policy, [VOCABULARY.index(word) for word in words], 12)
    assert answer == " ".join(VOCABULARY[token] for token in expected if token > 3)


def test_a_question_by_hand_cannot_go_through_a_template_that_is_not_there(rollout: Client, tmp_path: Path) -> None:
    wish = {"prompt": "w1 w7", "temperature": 0.0, "max_tokens": 12, "count": 1, "seed": 0, "chat": True}
    with pytest.raises(EngineJobError, match="--chat: the policy's tokenizer has no chat template") as refused:
        rollout.run("sample", {"policy": make_policy(tmp_path / "policy")}, wish, None)
    assert not refused.value.retryable


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "complaint"),
    [
        ("w1 w2", 255, r"max_tokens=255 does not fit .* 256 after the prompt of 2 tokens: lower it to 254"),
        ("", 4, "no tokens"),
    ],
)
def test_sampling_by_hand_says_what_does_not_fit(
    rollout: Client, tmp_path: Path, prompt: str, max_tokens: int, complaint: str
) -> None:
    wish = {"prompt": prompt, "temperature": 1.0, "max_tokens": max_tokens, "count": 2, "seed": 0}
    with pytest.raises(EngineJobError, match=complaint) as refused:
        rollout.run("sample", {"policy": make_policy(tmp_path / "policy")}, wish, None)
    assert not refused.value.retryable


def test_the_training_process_survives_bad_input_and_ends_by_itself(training: Client, tmp_path: Path) -> None:
    spec = {"seed": 0, "model": {"path": str(tmp_path)}}
    with pytest.raises(EngineJobError, match=r"has no tokenizer: put tokenizer.json") as refused:
        training.run("start_policy", {"tokenizer": tmp_path, "model": tmp_path}, spec, training.output())
    assert not refused.value.retryable
    assert ends_by_itself(training)
