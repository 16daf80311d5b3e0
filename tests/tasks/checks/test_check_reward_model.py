"""What a check of a reward model's spec finds, in a real scoring engine: its rows, its model, its folder."""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path

import pytest
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification
from typer.testing import CliRunner

from flows.cli.main import app
from flows.reward_model import reward_model
from ppo_core.data.tokenization import load_tokenizer
from ppo_core.records import InputError
from ppo_core.spec import RewardModelSpec, RlhfSpec, RunSpec, SpecError
from ppo_core.spec.kinds import load_any
from tasks.checks.preferences import check_preferences
from tasks.checks.rlhf import check_rlhf, checking_rlhf
from tests.experience.project import make_model, write_project
from tests.ppo_core.scoring.scoring_jobs import write_lines
from tests.tasks.run_contexts import ARITHMETIC
from tests.waiting import FOR_EVER_S, until

HELPFUL = Path(__file__).parents[3] / "examples" / "helpful"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PPOFLOW_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def load(*overrides: str) -> RewardModelSpec:
    return RewardModelSpec.from_yaml(HELPFUL / "reward_model.yaml", list(overrides))


@pytest.mark.usefixtures("shared_engine")
def test_it_says_what_it_found_and_starts_nothing(home: Path) -> None:
    found = check_preferences(load())
    assert found.notes == []
    assert found.good["run"] == "helpful-reward-model, a new reward model"
    assert found.good["data"] == "4096 rows (4096 pairs) to train on, 512 (512) held out"
    assert found.good["context"].endswith("the model reads 64 tokens")
    assert found.good["model"].startswith("llama, 0.0")
    assert found.good["folder"] == str(home / "runs" / "helpful-reward-model" / "reward-model")
    assert not home.exists()


@pytest.mark.usefixtures("shared_engine")
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("dataset.max_tokens=5", r"has a text of \d+ tokens, but dataset.max_tokens=5"),
        ("model.config.max_position_embeddings=8", "tokens"),
        ("dataset.train=nowhere.jsonl", "nowhere.jsonl"),
        (
            "dataset.evaluation=./generate.py:preferences",
            r"^./generate.py:preferences: all 4096 held-out rows .365 prompts. have a prompt that is among the 365 "
            r"prompts of generate.py:preferences: .*; hold out rows with other prompts$",
        ),
        ("dataset.chosen_column=better", r"has no column better .* name the right one in chosen_column"),
        ("model.config.model_type=gpt99", "gpt99"),
        ("model.config.model_type=granite", "no sequence classifier for the type granite: use a model of another type"),
    ],
)
def test_what_would_end_the_training_is_refused(home: Path, override: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_preferences(load(override))
    assert not home.exists()


@pytest.mark.usefixtures("shared_engine")
def test_a_flow_that_is_called_checks_its_rows_with_its_overrides(home: Path) -> None:
    for wrong in ("dataset.max_tokens=5", "dataset.train=nowhere.jsonl"):
        with pytest.raises(InputError, match=wrong.partition("=")[2]):
            reward_model(load(), overrides=[wrong])
    assert not home.exists()


@pytest.mark.usefixtures("home", "shared_engine")
def test_a_fraction_of_one_file_is_held_out_or_refused_where_it_is_none() -> None:
    found = check_preferences(load("dataset.evaluation=null", "dataset.evaluation_fraction=0.1"))
    said = re.fullmatch(r"(\d+) rows \((\d+) pairs\) to train on, (\d+) \((\d+)\) held out", found.good["data"])
    assert said is not None
    train, pairs, held_out, others = map(int, said.groups())
    assert (train + held_out, pairs, others) == (4096, train, held_out)
    assert 0 < held_out < 1000
    with pytest.raises(InputError, match=r"preferences: evaluation_fraction=1e-09 holds out none of its 4096 rows"):
        check_preferences(load("dataset.evaluation=null", "dataset.evaluation_fraction=1e-9"))


@pytest.mark.usefixtures("home", "shared_engine")
def test_held_out_rows_of_prompts_that_are_trained_on_are_counted(tmp_path: Path) -> None:
    rows = [{"prompt": f"how do I fix the {kind} ?", "chosen": " sure", "rejected": " hm"} for kind in "abc"]
    write_lines(tmp_path / "train.jsonl", [*rows[:2], *rows[:2]])
    write_lines(tmp_path / "held_out.jsonl", [rows[2], *rows[1:], rows[1]])
    files = [f"dataset.{key}={tmp_path / name}.jsonl" for key, name in (("train", "train"), ("evaluation", "held_out"))]
    assert check_preferences(load(*files)).notes == [
        "2 of 4 held-out rows of preferences have a prompt that is trained on: accuracy there is of what was learned; "
        "duplicates: drop leaves such prompts out of training"
    ]
    found = check_preferences(load(*files, "dataset.duplicates=drop"))
    assert found.notes == []
    assert found.good["data"] == (
        "1 rows (1 pairs) to train on, 2 (2) held out, 2 left out (held out), 3 left out (repeated)"
    )


@pytest.mark.usefixtures("home", "shared_engine")
def test_held_out_prompts_of_a_run_among_those_of_its_reward_model_are_noted(tmp_path: Path) -> None:
    held_out = [{"prompt": "how do I fix the old bike ?"}, {"prompt": "how do I fix ?"}]
    pairs = [{**row, "chosen": " sure", "rejected": " hm"} for row in held_out]
    write_lines(tmp_path / "held_out.jsonl", [held_out[0], *held_out])
    write_lines(tmp_path / "train.jsonl", pairs[:1])
    write_lines(tmp_path / "eval.jsonl", pairs[1:])
    files = [
        f"reward_model.dataset.{key}={tmp_path}/{name}.jsonl"
        for key, name in (("train", "train"), ("evaluation", "eval"))
    ]
    small = [f"run.dataset.evaluation={tmp_path}/held_out.jsonl", "run.evaluation.num_prompts=3"]
    assert check_rlhf(RlhfSpec.from_yaml(HELPFUL / "rlhf.yaml", [*files, *small])).notes == [
        "no champion can be replaced on run.evaluation.num_prompts=3: set at least 6",
        "2 of 3 held-out prompts of the run are among the preferences that its reward model is trained on",
    ]


@pytest.mark.usefixtures("home", "shared_engine")
def test_a_critic_that_begins_as_a_reward_model_that_is_still_to_be_trained_is_looked_at(tmp_path: Path) -> None:
    base, tokenizer = tmp_path / "base", HELPFUL / "tokenizer"
    words = len(AutoTokenizer.from_pretrained(tokenizer))
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=words, max_position_embeddings=64, **sizes)).save_pretrained(base)
    shutil.copytree(tokenizer, base, dirs_exist_ok=True)
    changes = [
        *("run.model.critic=<reward_model>", f"reward_model.model.path={base}", "reward_model.model.config=null"),
        *("reward_model.model.tokenizer=null", "run.model.config.max_position_embeddings=512"),
    ]
    check_rlhf(RlhfSpec.from_yaml(HELPFUL / "rlhf.yaml", changes))
    longer = [*changes, "run.rollout.max_response_tokens=100"]
    with pytest.raises(
        InputError, match=rf"^model.critic: {base} reads 64 tokens, and the longest prompt and response"
    ):
        check_rlhf(RlhfSpec.from_yaml(HELPFUL / "rlhf.yaml", longer))


@pytest.mark.usefixtures("shared_engine")
@pytest.mark.parametrize(
    ("changes", "model", "message"),
    [
        ({"chosen": 7}, "right", "pairs.jsonl: row 3 has chosen=7: give a text"),
        ({"rejected": "7"}, "right", "pairs.jsonl: row 3 has chosen == rejected ('7')"),
        ({}, "classifier", "is a sequence classifier (LlamaForSequenceClassification)"),
        ({}, "nothing", "there is no folder"),
    ],
)
def test_bad_rows_and_models_are_refused_by_the_command(
    home: Path, tmp_path: Path, changes: dict[str, object], model: str, message: str
) -> None:
    make_model(tmp_path / "right")
    if model == "classifier":
        config = LlamaConfig.from_pretrained(tmp_path / "right", num_labels=1)
        LlamaForSequenceClassification(config).save_pretrained(tmp_path / "classifier")
        load_tokenizer(tmp_path / "right").save_pretrained(tmp_path / "classifier")
    rows = [{"prompt": "7+5=", "chosen": "7", "rejected": f"{n}"} for n in range(4)]
    rows[2].update(changes)
    done = CliRunner().invoke(app, ["reward-model", str(write_project(tmp_path, rows, tmp_path / model))])
    assert (done.exit_code, message in done.stderr) == (2, True), done.output
    assert done.stderr.startswith("InputError: ")
    assert "Prefect's server" not in done.stdout
    assert not home.exists()


def test_an_interrupted_check_of_the_whole_way_does_not_wait_for_the_users_code(home: Path, tmp_path: Path) -> None:
    shutil.copytree(HELPFUL, tmp_path / "helpful")
    (tmp_path / "helpful" / "slow.py").write_text(
        f"import pathlib, time\ndef rows():\n    pathlib.Path({str(tmp_path / 'begun')!r}).touch()\n"
        f"    time.sleep({FOR_EVER_S})\n    return []\n"
    )
    spec = RlhfSpec.from_yaml(tmp_path / "helpful" / "rlhf.yaml", ["reward_model.dataset.train=slow.py:rows"])

    def pressed() -> None:
        with checking_rlhf(spec):
            until((tmp_path / "begun").exists)
            raise KeyboardInterrupt

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        pressed()
    assert time.monotonic() - began < FOR_EVER_S
    assert not home.exists()


def test_a_file_is_of_the_kind_that_knows_its_sections(tmp_path: Path) -> None:
    found = {
        type(load_any(path))
        for path in (ARITHMETIC / "smoke.yaml", HELPFUL / "reward_model.yaml", HELPFUL / "rlhf.yaml")
    }
    assert found == {RunSpec, RewardModelSpec, RlhfSpec}
    file = tmp_path / "spec.yaml"
    file.write_text("dataset: {train: a, evaluation: b}\nmodel: {path: base}\n")
    assert isinstance(load_any(file), RewardModelSpec)
    assert isinstance(load_any(file, ["reward.function=r.py:f"]), RunSpec)
    file.write_text("dataset: {train: a}\nmodel: {path: base}\nrollout: {}\n")
    with pytest.raises(SpecError, match="reward: is required but missing"):
        load_any(file)
