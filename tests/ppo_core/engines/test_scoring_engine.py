"""The scoring engine as a real process: the user's data and reward functions, good and bad."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from infra.engines.process import EngineJobError
from ppo_core.data.shares import Share
from ppo_core.data.tables import read_shares, write_rollouts
from ppo_core.records import RolloutRow, content_digest
from tests.ppo_core.engines.engine_jobs import Client, ends_by_itself, open_engine, write_dataset
from tests.ppo_core.scoring.scoring_jobs import prepare, score
from tests.ppo_core.tiny_policies import CONTEXT, EOS, VOCABULARY, make_tokenizer

pytest_plugins = ["tests.ppo_core.engines.engine_fixtures"]


def test_a_dataset_holds_what_the_rows_say(scoring: Client, sources: Path, model: Path) -> None:
    evaluated = {"evaluation": "train.jsonl"}
    folder = prepare(scoring, sources, model, dataset=evaluated, sft_data="sft.jsonl")
    rows = pq.read_table(folder / "train.parquet").to_pylist()
    assert [row["prompt"] for row in rows] == ["w1 w2", "w3", "w3"]
    assert [row["prompt_token_ids"] for row in rows] == [[5, 6], [7], [7]]
    assert [row["reference_answer"] for row in rows] == ["7", '"eight"', '"eight"']
    assert [json.loads(row["metadata"]) for row in rows] == [{"level": 1}, {"level": 2}, {"level": 2}]
    assert [row["messages"] for row in rows] == [None] * 3
    content = '["w3","eight",{"level":2}]'
    second = hashlib.sha256(content.encode()).hexdigest()[:16]
    assert [row["prompt_id"] for row in rows[1:]] == [second, f"{second}-2"]
    assert pq.read_table(folder / "eval.parquet").to_pylist() == rows
    sft = pq.read_table(folder / "sft.parquet").to_pylist()
    assert sft == [{"prompt_token_ids": [5, 6], "completion_token_ids": [9, 10, EOS]}]


def test_chats_go_through_the_template_and_come_to_the_reward_as_messages(
    scoring: Client, sources: Path, model: Path
) -> None:
    folder = prepare(scoring, sources, model, "messages", dataset={"train": "chat.jsonl"})
    rows = pq.read_table(folder / "train.parquet").to_pylist()
    expected = ["user", "w1", "w2", "<end>", "assistant"]
    assert rows[0]["prompt_token_ids"] == [VOCABULARY.index(word) for word in expected]
    assert (rows[0]["prompt"], json.loads(rows[0]["messages"])) == (None, [{"role": "user", "content": "w1 w2"}])
    scores = score(scoring, sources, folder, {"function": "my_rewards.py:messages"}, ["abc", "", "a"])
    assert [row["score"] for row in scores] == [3.0, 0.0, 1.0]


def test_several_sources_are_one_table_and_say_their_draws(
    scoring: Client, sources: Path, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "more.csv").write_text("prompt,answer\nw5,1\nw6,2\nw7,3\n")
    train = [{"path": "train.jsonl", "weight": 2}, {"path": str(tmp_path / "more.csv"), "weight": 1}]
    folder = prepare(scoring, sources, model, dataset={"train": train}, num_eval_prompts=0)
    rows = pq.read_table(folder / "train.parquet").to_pylist()
    assert [row["prompt"] for row in rows] == ["w1 w2", "w3", "w3", "w5", "w6", "w7"]
    assert len({row["prompt_id"] for row in rows}) == 6
    assert read_shares(folder, "train") == [Share(3, 4), Share(3, 2)]
    assert read_shares(folder, "eval") == []
    unweighed = [{"path": one["path"]} for one in train]
    folder = prepare(scoring, sources, model, dataset={"train": unweighed}, num_eval_prompts=0)
    assert pq.read_table(folder / "train.parquet").to_pylist() == rows
    assert read_shares(folder, "train") == []
    train[1]["weight"] = 1e-6
    with pytest.raises(EngineJobError, match=r"more.csv has so little weight that no epoch would draw from it"):
        prepare(scoring, sources, model, dataset={"train": train}, num_eval_prompts=0)
    with pytest.raises(EngineJobError, match=r"more.csv: .*level needs the column 'level', which row 1 \('w5'\) lacks"):
        prepare(scoring, sources, model, "level", dataset={"train": train}, num_eval_prompts=0)


def test_columns_have_the_users_names_and_texts_can_be_chats(
    scoring: Client, sources: Path, model: Path, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.csv"
    rows.write_text("question,right,level\nw1 w2,w3,1\n")
    data = {"train": str(rows), "prompt_column": "question", "answer_column": "right", "chat": True}
    changes = {"sft_data": str(rows), "sft_prompt_column": "question", "sft_completion_column": "right"}
    folder = prepare(
        scoring, sources, model, "messages", dataset={**data, "system_prompt": "w4"}, num_eval_prompts=0, **changes
    )
    (row,) = pq.read_table(folder / "train.parquet").to_pylist()
    assert json.loads(row["messages"])[0] == {"role": "system", "content": "w4"}
    assert (row["reference_answer"], json.loads(row["metadata"])) == ('"w3"', {"level": "1"})
    expected = [VOCABULARY.index(word) for word in ("<unk>", "w4", "<end>", "user", "w1", "w2", "<end>", "assistant")]
    assert row["prompt_token_ids"] == expected
    (example,) = pq.read_table(folder / "sft.parquet").to_pylist()
    assert example == {"prompt_token_ids": expected, "completion_token_ids": [VOCABULARY.index("w3"), EOS]}


def test_scores_are_the_weighted_sum_of_the_components_in_the_rollouts_order(
    scoring: Client, sources: Path, model: Path
) -> None:
    names = {"my_rewards.py:length": 0.5, "my_rewards.py:level": 2.0, "my_rewards.py:later": -1.0}
    reward = {"function": names, "options": {"bonus": 10.0}}
    rows = score(scoring, sources, prepare(scoring, sources, model), reward, ["a b c", "", "a"])
    assert [row["reward/length"] for row in rows] == [3.0, 0.0, 1.0]
    assert [row["reward/level"] for row in rows] == [11.0, 12.0, 12.0]
    assert [row["reward/later"] for row in rows] == [0.5] * 3
    assert [row["score"] for row in rows] == [0.5 * 3 + 22 - 0.5, 24 - 0.5, 0.5 + 24 - 0.5]
    assert [(row["truncated"], row["error"]) for row in rows] == [(False, None), (True, None), (False, None)]


def test_rewards_of_several_kinds_are_columns_of_one_table(scoring: Client, sources: Path, model: Path) -> None:
    kinds = [
        {"kind": "exact_match", "weight": 2.0},
        {"kind": "number", "name": "right", "pattern": "= (.*)"},
        {"kind": "regex", "pattern": "^I think"},
        {"function": "my_rewards.py:length", "weight": 0.5},
    ]
    dataset = prepare(scoring, sources, model, dataset={"train": "sevens.jsonl"}, num_eval_prompts=0)
    rows = score(scoring, sources, dataset, {"sources": kinds}, ["I think = 7", "7", "= 8"])
    assert [row["reward/exact_match"] for row in rows] == [0.0, 1.0, 0.0]
    assert [row["reward/right"] for row in rows] == [1.0, 0.0, 0.0]
    assert [row["reward/regex"] for row in rows] == [1.0, 0.0, 0.0]
    assert [row["score"] for row in rows] == [1 + 1 + 2.0, 2 + 0.5, 1.0]
    with pytest.raises(
        EngineJobError, match=r"the reward number compares numbers, but the answer of row 2 \('eight'\)"
    ):
        prepare(scoring, sources, model, reward={"sources": [{"kind": "number"}]})


def test_a_sample_that_cannot_be_scored_is_not_zero(scoring: Client, sources: Path, model: Path) -> None:
    names = {"my_rewards.py:some": 1.0, "my_rewards.py:length": 1.0}
    rows = score(scoring, sources, prepare(scoring, sources, model), {"function": names}, ["a", "a", "a"])
    assert [row["score"] for row in rows] == [None, 2.0, 2.0]
    assert [row["reward/length"] for row in rows] == [1.0] * 3
    assert rows[0]["error"] == "not scored by some"


def test_what_user_code_prints_and_reads_is_not_the_protocol(scoring: Client, sources: Path, model: Path) -> None:
    dataset = prepare(scoring, sources, model)
    rows = score(scoring, sources, dataset, {"function": "my_rewards.py:talks"}, ["a", "a", "a"])
    assert [row["score"] for row in rows] == [0.0] * 3
    assert "not JSON" in (scoring.folder / "scoring.log").read_text()


@pytest.mark.parametrize(
    ("function", "message", "retryable"),
    [
        ("raises", r"RewardFailed: the reward function my_rewards\.py:raises raised ConnectionError: the judge", True),
        ("nan", r"my_rewards\.py:nan: score 2 is nan: return a finite number, or None", False),
        ("short", r"my_rewards\.py:short returned 1 scores for 3 completions", False),
        ("nothing", r"my_rewards\.py:nothing returned NoneType, not a list of 3 scores", False),
        ("text", r"my_rewards\.py:text: score 0 is '1\.0' \(str\): return a float", False),
        ("missing", r"my_rewards\.py has no function 'missing' \(it has: .*length", False),
    ],
)
def test_a_reward_that_cannot_be_one_is_refused(
    scoring: Client, sources: Path, model: Path, function: str, message: str, retryable: bool
) -> None:
    with pytest.raises(EngineJobError, match=message) as early:
        prepare(scoring, sources, model, function)
    dataset = prepare(scoring, sources, model)
    with pytest.raises(EngineJobError, match=message) as late:
        score(scoring, sources, dataset, {"function": f"my_rewards.py:{function}"}, ["a", "b", "c"])
    assert early.value.retryable == late.value.retryable == retryable
    assert str(late.value).count("RewardFailed") == (1 if retryable else 0)


def test_bad_data_is_refused_before_any_work(scoring: Client, sources: Path, model: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"dataset": {"evaluation": "train.jsonl"}, "num_eval_prompts": 4}, r"num_prompts=4 is more than the 3 rows"),
        ({"max_response_tokens": CONTEXT - 1}, r"does not fit the model's context 256 after .* 2 tokens.*lower it to"),
        ({"dataset": {"max_prompt_tokens": 1}}, r"row 1 has a prompt of 2 tokens, but dataset\.max_prompt_tokens=1"),
        ({"dataset": {"train": "nowhere.jsonl"}}, r"there is no file .*nowhere\.jsonl"),
        (
            {"reward": {"function": "my_rewards.py:level"}, "dataset": {"train": "chat.jsonl"}},
            "needs the column 'level'",
        ),
    ]
    for changes, message in cases:
        with pytest.raises(EngineJobError, match=message) as refused:
            prepare(scoring, sources, model, **changes)
        assert not refused.value.retryable


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(scoring: Client, sources: Path, model: Path) -> None:
    smaller = {"model_type": "llama", "vocab_size": 6, "hidden_size": 8, "num_attention_heads": 2}
    with pytest.raises(EngineJobError, match=r"'w\d' as token \d+, but the model's vocab_size is 6") as refused:
        prepare(scoring, sources, model, model={"config": smaller, "tokenizer": str(model)})
    assert not refused.value.retryable


def test_so_are_examples_with_a_token_that_no_prompt_has(
    scoring: Client, sources: Path, model: Path, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.csv"
    rows.write_text("prompt,answer,level\nw1 w2,w3,1\n")
    smaller = {"model_type": "llama", "vocab_size": 10, "hidden_size": 8, "num_attention_heads": 2}
    given = {
        "dataset": {"train": str(rows)},
        "num_eval_prompts": 0,
        "model": {"config": smaller, "tokenizer": str(model)},
    }
    prepare(scoring, sources, model, **given)
    with pytest.raises(
        EngineJobError, match=r"sft.jsonl: the tokenizer writes 'w6' as token 10, but .* vocab_size is 10"
    ):
        prepare(scoring, sources, model, **given, sft_data="sft.jsonl")


def test_a_tokenizer_that_the_policys_folder_would_not_give_back_is_refused(
    scoring: Client, sources: Path, tmp_path: Path
) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    smaller = {"model_type": "qwen2", "hidden_size": 8, "num_attention_heads": 2, "layer_types": None}
    with pytest.raises(EngineJobError, match=r"type qwen2, transformers loads this tokenizer as Qwen2Tokenizer"):
        prepare(scoring, sources, tmp_path, model={"config": smaller, "tokenizer": str(tmp_path)})


def test_a_digest_follows_the_code(scoring: Client, tmp_path: Path) -> None:
    def digest() -> str:
        job = scoring.run("describe_sources", {"sources": tmp_path}, {"functions": ["followed.py:f"]}, None)
        return str(job.result["followed.py:f"])

    (tmp_path / "followed.py").write_text("import followed_part\ndef f(completions): return [1.0]\n")
    (tmp_path / "followed_part.py").write_text("VALUE = 1\n")
    (tmp_path / "unrelated.py").write_text("VALUE = 1\n")
    first = digest()
    assert digest() == first
    (tmp_path / "unrelated.py").write_text("VALUE = 2\n")
    assert digest() == first
    (tmp_path / "followed_part.py").write_text("VALUE = 2\n")
    second = digest()
    (tmp_path / "followed.py").write_text("import followed_part\ndef f(completions): return [2.0]\n")
    assert len({first, second, digest()}) == 3


def test_code_that_was_changed_is_told_by_a_new_engine_and_unknown_to_the_old_one(tmp_path: Path) -> None:
    """The key of the scores names the code that the run began with."""
    document = {"reward": {"function": "mine.py:f"}, "answer_column": "answer", "split": "train"}
    dataset = write_dataset(tmp_path / "dataset", [[5], [6]])
    write_rollouts(tmp_path / "rollouts.parquet", [RolloutRow("p0", 0, [5], [6], "w2", [-1.0], "stop")])
    (tmp_path / "mine.py").write_text("def f(completions): return [1.0]\n")
    inputs = {"sources": tmp_path, "rollouts": tmp_path, "dataset": dataset}
    scoring = open_engine("scoring", tmp_path / "engine")

    def scores(code: str) -> list[float | None]:
        output = scoring.output()
        scoring.run("score_rollouts", inputs, document, output, code=code)
        return [row["score"] for row in pq.read_table(output / "scores.parquet").to_pylist()]

    def described() -> str:
        reply = scoring.run("describe_sources", {"sources": tmp_path}, {"functions": ["mine.py:f"]}, None)
        return content_digest(dict(reply.result))

    try:
        began_with = described()
        assert scores(began_with) == [1.0]
        (tmp_path / "mine.py").write_text("def f(completions): return [2.0]\n")
        assert scores(began_with) == [1.0]
        scoring.engine.close()
        scoring = open_engine("scoring", tmp_path / "another")
        with pytest.raises(EngineJobError, match=r"mine.py:f changed after this run had read it.*: give the"):
            scores(began_with)
        assert scores(described()) == [2.0]
    finally:
        scoring.engine.close()


def test_a_trial_shows_rows_completions_and_scores(scoring: Client, sources: Path) -> None:
    spec = {
        "dataset": {"train": "train.jsonl"},
        "model": {"path": "."},
        "sft_data": None,
        "max_response_tokens": 8,
        "num_eval_prompts": 0,
        "reward": {"function": {"my_rewards.py:length": 2.0}},
    }
    trial = {"dataset": spec, "completions": ["w1 w2 w3", ""]}
    rows = scoring.run("try_reward", {"sources": sources}, trial, None).result["rows"]
    assert [(row["prompt"], row["completion"], row["score"]) for row in rows] == [
        ("w1 w2", "w1 w2 w3", 6.0),
        ("w3", "", 0.0),
        ("w3", "w1 w2 w3", 6.0),
    ]
    assert rows[0]["components"] == {"length": 3.0}


def test_an_output_that_cannot_be_written_is_said_and_the_engine_goes_on(
    scoring: Client, sources: Path, model: Path, tmp_path: Path
) -> None:
    document = {"reward": {"function": "my_rewards.py:length"}, "answer_column": "answer", "split": "train"}
    dataset = write_dataset(tmp_path / "dataset", [[5], [6]])
    write_rollouts(tmp_path / "rollouts.parquet", [RolloutRow("p0", 0, [5], [6], "w2", [-1.0], "stop")])
    inputs = {"sources": sources, "rollouts": tmp_path, "dataset": dataset}
    with pytest.raises(EngineJobError, match=r"FileNotFoundError.*nowhere") as failed:
        scoring.run("score_rollouts", inputs, document, tmp_path / "nowhere")
    assert failed.value.retryable
    scoring.run("score_rollouts", inputs, document, scoring.output())


def test_the_process_ends_by_itself_when_there_are_no_more_jobs(tmp_path: Path, sources: Path) -> None:
    client = open_engine("scoring", tmp_path)
    client.run("describe_sources", {"sources": sources}, {"functions": []}, None)
    assert ends_by_itself(client)
