"""What a user can get wrong in data, tokenizer and reward: the message, and that nothing was half written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.settings import Settings
from ppo_core.records import InputError
from tasks.prepare_dataset import prepare_dataset
from tasks.stages.engines import Engines
from tests.tasks.run_contexts import ARITHMETIC, run_context, smoke_spec, stored_files

REWARDS = """
import math

def right(prompts, completions, answer): return [1.0] * len(prompts)
def raises(prompts, completions, answer): raise RuntimeError("the judge is down")
def nan(prompts, completions, answer): return [math.nan] * len(prompts)
def short(prompts, completions, answer): return [1.0]
def text(prompts, completions, answer): return ["good"] * len(prompts)
def needs_level(prompts, completions, level): return [1.0] * len(prompts)
def no_rows(): return []
def unanswered(): return [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+2="}]
"""


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory, code: Path) -> Iterator[Engines]:
    """One set of engines; only the scoring engine is ever asked. Code may come from the user's folder too."""
    home = tmp_path_factory.mktemp("engines")
    made = Engines(smoke_spec(), Settings(home=home, plugins=(".", str(code))), home / "logs")
    yield made
    made.close()


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder of reward functions and data."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "bad_rewards.py").write_text(REWARDS)
    (folder.parent / "elsewhere.py").write_text(REWARDS)
    (folder / "broken.py").write_text("import nothing_of_this_name\n")
    (folder / "broken.jsonl").write_text('{"prompt": "1+1="}\n{"prompt": \n')
    shutil.copytree(ARITHMETIC / "tokenizer", folder / "no_eos")
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        path = folder / "no_eos" / name
        if path.is_file():
            path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "eos_token"}))
    (folder / "no_tokenizer").mkdir()
    return folder


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("reward.function={code}/missing.py:right", "there is no file"),
        ("reward.function={code}/broken.py:right", "No module named 'nothing_of_this_name'"),
        ("reward.function={code}/bad_rewards.py:left", "has no function 'left' (it has: nan, needs_level"),
        ("reward.function={code}/../elsewhere.py:right", "may not run here, only from"),
        ("reward.function=os:getcwd", "may not run here, only from"),
        ("reward.function=no_such_package.rewards:right", "importing no_such_package.rewards failed"),
        ("reward.function={code}/bad_rewards.py:nan", "score 0 is nan: return a finite number, or None"),
        ("reward.function={code}/bad_rewards.py:short", "returned 1 scores for 5 completions"),
        ("reward.function={code}/bad_rewards.py:text", "score 0 is 'good' (str): return a float, or None"),
        ("reward.function={code}/bad_rewards.py:needs_level", "needs the column 'level', which row 1"),
        ("dataset.train={code}/bad_rewards.py:unanswered", "needs the column 'answer', which row 2"),
        ("dataset.train={code}/bad_rewards.py:no_rows", "holds no rows: give at least one prompt"),
        ("dataset.train={code}/missing.jsonl", "there is no file"),
        ("dataset.train={code}/broken.jsonl", "broken.jsonl:2 is not JSON"),
        ("dataset.max_prompt_tokens=5", "has a prompt of 8 tokens, but dataset.max_prompt_tokens=5"),
        (
            "rollout.max_response_tokens=125",
            "rollout.max_response_tokens=125 does not fit the model's context 128 after the prompt of 12 tokens",
        ),
        ("evaluation.num_prompts=100000", "evaluation.num_prompts=100000 is more than the 512 rows"),
        ("model.tokenizer={code}/no_tokenizer", "has no tokenizer: put tokenizer.json"),
        ("model.tokenizer={code}/no_eos", "has no EOS token, so a response could never end"),
        ("model.tokenizer={code}/nowhere", "there is no folder"),
    ],
)
def test_bad_input_is_refused_before_any_work(
    override: str, message: str, engines: Engines, code: Path, tmp_path: Path
) -> None:
    context = run_context(smoke_spec(override.format(code=code)), tmp_path, engines=engines)
    with pytest.raises(InputError) as refusal:
        prepare_dataset.fn(context)
    assert message in str(refusal.value)
    assert stored_files(tmp_path) == []


def test_a_reward_that_raises_is_told_with_its_own_words_and_may_be_tried_again(
    engines: Engines, code: Path, tmp_path: Path
) -> None:
    context = run_context(smoke_spec(f"reward.function={code}/bad_rewards.py:raises"), tmp_path, engines=engines)
    with pytest.raises(RuntimeError, match="raises raised RuntimeError: the judge is down") as failure:
        prepare_dataset.fn(context)
    assert vars(failure.value)["retryable"]
    assert stored_files(tmp_path) == []
