"""What a check says of names of the hub: what cannot be had, before anything starts, and the rest once it is here."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from infra.artifacts import open_store
from infra.hub.sources import HubError
from infra.settings import Settings
from ppo_core.records import InputError
from ppo_core.spec import RewardModelSpec, RlhfSpec, RunSpec
from tasks.checks.hub import find_sources
from tasks.checks.preferences import check_preferences
from tasks.checks.rlhf import check_rlhf
from tasks.checks.run import check_run
from tasks.checks.try_reward import try_reward
from tasks.preferences.given import places_of, with_commits_of_parts
from tasks.runs.kept import with_own_commits
from tasks.stages.download_source import download_ahead
from tasks.stages.hub_names import with_commits
from tests.experience.project import make_model
from tests.hub_server import ToyHub, toy_hub
from tests.tasks.run_contexts import smoke_spec

CONFIG = json.dumps({"model_type": "llama"}).encode()
ROW = b'{"prompt": "1+1=", "answer": "2"}\n'
MODEL = ("model.path=hf://us/small", "model.config=null", "model.tokenizer=null", "sft=null")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ToyHub]:
    with toy_hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.setenv("PPOFLOW_HOME", str(tmp_path / "home"))
        for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "PPOFLOW_STORE"):
            monkeypatch.delenv(name, raising=False)
        yield server


def looked_up(spec: RunSpec) -> tuple[list[str], list[str]]:
    """Notes, and what is to be downloaded."""
    _, notes, missing = find_sources(with_commits(spec), open_store(Settings().store_root))
    return notes, missing


def test_a_model_is_looked_at_without_its_weights(hub: ToyHub) -> None:
    commit = hub.model("us/small", {"config.json": CONFIG, "model.safetensors": b"w" * 2**20, "tokenizer.json": b"{}"})
    assert looked_up(smoke_spec(*MODEL)) == ([], [f"hf://us/small: 3 files of commit {commit}, 1.0 MiB"])
    assert hub.downloaded() == ["config.json"]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"config.json": CONFIG, "pytorch_model.bin": b""}, "^hf://us/small has its weights as pickle only"),
        ({"model.safetensors": b""}, "^hf://us/small has no config.json"),
        ({"adapter_config.json": b"{}"}, "^hf://us/small is an adapter"),
        (
            {"config.json": b'{"model_type": "unheard", "auto_map": {"AutoConfig": "a.B"}}', "m.safetensors": b""},
            "hf://us/small",
        ),
    ],
)
def test_a_model_that_would_be_refused_as_a_folder_is_refused(
    hub: ToyHub, files: Mapping[str, bytes], message: str
) -> None:
    hub.model("us/small", files)
    with pytest.raises(InputError, match=message):
        looked_up(smoke_spec(*MODEL))


def test_code_beside_a_known_model_is_a_note(hub: ToyHub) -> None:
    config = b'{"model_type": "llama", "auto_map": {"AutoModel": "a.B"}}'
    hub.model("us/small", {"config.json": config, "m.safetensors": b"", "a.py": b""})
    (note,), _ = looked_up(smoke_spec(*MODEL))
    assert note.startswith("the model in hf://us/small ")
    assert "has custom code (auto_map), which does not run here" in note


def test_gated_data_is_refused_before_it_comes(hub: ToyHub) -> None:
    hub.dataset("us/rows", {"train.jsonl": ROW})
    hub.datasets["us/rows"].gated = True
    with pytest.raises(HubError, match="hf://us/rows is gated"):
        looked_up(smoke_spec("dataset.train=hf://us/rows"))
    assert hub.downloaded() == []


@pytest.mark.usefixtures("shared_engine")
def test_a_run_is_checked_as_of_folders_once_all_is_here(hub: ToyHub, tmp_path: Path) -> None:
    make_model(tmp_path / "policy")
    hub.model("us/small", {path.name: path.read_bytes() for path in (tmp_path / "policy").iterdir()})
    parts = {"data/train-00000-of-00002.jsonl": ROW * 30, "data/train-00001-of-00002.jsonl": ROW * 2}
    hub.dataset("us/rows", {**parts, "data/test-00000-of-00001.jsonl": ROW})
    data = ("dataset.train=hf://us/rows:data/train-*.jsonl", "dataset.evaluation=hf://us/rows:data/test-*.jsonl")
    spec = smoke_spec(*MODEL, *data, "evaluation.num_prompts=1")
    found = check_run(spec)
    assert [note.partition(":")[0] for note in found.notes] == ["hf"] * 3
    assert all("which training downloads first" in note for note in found.notes)
    with pytest.raises(
        InputError, match=r"hf://us/rows:data/.* is not in the store .* yet: run ppoflow download first"
    ):
        try_reward(spec, [])
    download_ahead(spec, str)
    assert check_run(spec).good["data"] == "32 prompts to train on, 1 held out"
    assert [row.score for row in try_reward(spec, ["<answer>2</answer>", "3"])] == [1.1, 0, 1.1, 0, 1.1]


@pytest.mark.usefixtures("shared_engine")
def test_a_reward_model_of_the_hub_is_given_to_the_whole_pipeline(hub: ToyHub) -> None:
    """Its advice once led from given.reward_model to run.reward and back."""
    config = json.dumps({"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]}).encode()
    commit = hub.model("us/judge", {"config.json": config, "model.safetensors": b"w", "tokenizer.json": b"{}"})
    example = Path(__file__).parents[3] / "examples" / "helpful" / "rlhf.yaml"
    spec = RlhfSpec.from_yaml(example, ["given.reward_model=hf://us/judge"])
    found = check_rlhf(spec, "whole")
    assert found.good["stages"] == "SFT, PPO, evaluation, promotion"
    (note,) = (note for note in found.notes if note.startswith("hf://us/judge"))
    assert f"3 files of commit {commit}" in note
    begun = with_commits_of_parts(spec, "whole")
    hub.model("us/judge", {"config.json": config, "model.safetensors": b"other"})
    whole = with_commits_of_parts(spec, "whole").run_with(places_of(spec, "whole").reward_model, None)
    assert (whole.reward.models[0].path, whole.hub_commits[0].commit) == ("hf://us/judge", commit)
    assert whole.hub_commits == begun.run.hub_commits


def test_the_training_of_a_reward_model_keeps_its_commits(hub: ToyHub) -> None:
    first = hub.model("us/small", {"config.json": CONFIG, "model.safetensors": b"w"})
    hub.dataset("us/pairs", {"train.jsonl": b"{}", "test.jsonl": b"{}"})
    train = [{"path": "hf://us/pairs:train.jsonl"}, {"path": "hf://us/pairs:test.jsonl"}]
    dataset = {"train": train, "evaluation_fraction": 0.1}
    spec = RewardModelSpec.model_validate({"dataset": dataset, "model": {"path": "hf://us/small"}})
    assert len(check_preferences(spec, "rm").notes) == 3
    root = open_store(Settings().store_root).root
    kept = with_own_commits(root, spec, "rm", "reward-model", keep=True)
    assert kept.hub_commits[0] == with_commits(spec).hub_commits[0]
    hub.model("us/small", {"config.json": CONFIG, "model.safetensors": b"other"})
    assert (
        with_own_commits(root, spec, "rm", "reward-model", keep=True)
        == with_own_commits(root, spec, "rm", "reward-model", keep=False)
        == kept
    )
    assert kept.hub_commits[0].commit == first
    assert with_own_commits(root, spec, "another", "reward-model", keep=False) != kept
