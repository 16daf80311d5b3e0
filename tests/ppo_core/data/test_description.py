"""What is told of a dataset: its rows and lengths, counted by hand here, and prompts on both sides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ppo_core.data.dataset import Limits
from ppo_core.data.description import describe, describe_preferences
from ppo_core.data.preparation import Preparation
from ppo_core.data.rankings import Ranking
from ppo_core.data.rows import Row
from ppo_core.data.tables import write_sources
from ppo_core.records import PromptRow
from ppo_core.spec import DatasetSpec
from tests.ppo_core.tiny_models import tiny_tokenizer
from tests.ppo_core.written_tables import write_prompts, write_rankings

CHAT = [{"role": "user", "content": "w3"}]


def row(number: int, prompt: str | list[dict[str, str]], tokens: int) -> PromptRow:
    return PromptRow(str(number), prompt, [7] * tokens, None, {})


def test_rows_and_lengths_are_counted_and_leaks_found(tmp_path: Path) -> None:
    lengths = [1, 3, 3, 4, 30]
    prompts = ["a", "b", "b", CHAT, "c"]
    rows = [row(n, prompt, tokens) for n, (prompt, tokens) in enumerate(zip(prompts, lengths, strict=True))]
    write_prompts(tmp_path / "train.parquet", rows)
    write_prompts(tmp_path / "eval.parquet", [row(0, "b", 2), row(1, CHAT, 2), row(2, "other", 2)])
    examples = {"prompt_token_ids": [[1, 2], [1]], "completion_token_ids": [[1], [1, 2, 3]]}
    pq.write_table(pa.table(examples), tmp_path / "sft.parquet")
    told = describe(tmp_path)
    train, held_out, sft = (told["splits"][split] for split in ("train", "eval", "sft"))
    assert (train["rows"], train["mean"], train["median"], train["longest"]) == (5, pytest.approx(8.2), 3.0, 30)
    assert [bar for bar in train["histogram"] if bar[2]] == [[1, 3, 3], [4, 6, 1], [28, 30, 1]]
    assert held_out["histogram"] == [[1, 1, 0], [2, 2, 3]]
    assert (sft["mean"], sft["longest"], sft["histogram"][-1]) == (3.5, 4, [4, 4, 1])
    assert (told["on_both_sides"], told["sources"]) == (3, [])


@pytest.mark.parametrize(
    ("message", "count"),
    [
        ({"content": "w3", "role": "user"}, 1),
        ({"role": "user", "content": "w3", "name": None}, 1),
        ({"role": "user", "content": "w3", "name": "me"}, 0),
    ],
    ids=["keys in another order", "a key without a value", "another message"],
)
def test_a_chat_is_the_same_however_its_messages_are_written(
    tmp_path: Path, message: dict[str, Any], count: int
) -> None:
    write_prompts(tmp_path / "train.parquet", [row(0, CHAT, 1), row(1, "w3", 1)])
    write_prompts(tmp_path / "eval.parquet", [row(0, [message], 1)])
    assert describe(tmp_path)["on_both_sides"] == count


@pytest.mark.parametrize(("duplicates", "count"), [("keep", 3), ("drop", 0)])
def test_examples_of_held_out_prompts_are_counted(tmp_path: Path, duplicates: str, count: int) -> None:
    spec = DatasetSpec.model_validate({"train": "a", "evaluation": "b", "chat": True, "duplicates": duplicates})
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    made = Preparation(spec, tokenizer, Limits(None, 100, 100))

    def given(*prompts: Any) -> list[Row]:
        chats = [[{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt for prompt in prompts]
        contents = zip(prompts, chats, strict=True)
        return [Row("", {"prompt": chat, "completion": f"w{n}"}, prompt) for n, (prompt, chat) in enumerate(contents)]

    made.add_prompts("eval", "b", given("w3", "w4 w5", "w3 w4"))
    made.add_prompts("train", "a", given("w6"))
    as_message = [{"content": "w4 w5", "role": "user", "name": None}]
    made.add_examples("c", given("w3", "w7", as_message, "w3", "w4", "w5"))
    for split, table in made.finished().items():
        pq.write_table(table, tmp_path / f"{split}.parquet")
    assert describe(tmp_path)["examples_held_out"] == count
    (tmp_path / "sft.parquet").unlink()
    assert describe(tmp_path)["examples_held_out"] is None


def test_without_held_out_prompts_there_is_no_leak_and_sources_are_told(tmp_path: Path) -> None:
    write_prompts(tmp_path / "train.parquet", [row(0, "a", 1)])
    write_sources(tmp_path / "sources.json", [{"source": "a.jsonl", "split": "train", "rows": 1}])
    told = describe(tmp_path)
    assert told["on_both_sides"] is None
    assert told["sources"] == [{"source": "a.jsonl", "split": "train", "rows": 1}]


def test_a_row_of_preferences_is_as_long_as_its_longest_text(tmp_path: Path) -> None:
    rankings = [[2, 5], [9, 3, 4], [1, 5], [1, 1]]
    rows = [Ranking([[7] * tokens for tokens in row], 0.0) for row in rankings]
    write_rankings(tmp_path / "train.parquet", rows)
    write_rankings(tmp_path / "eval.parquet", [])
    told = describe_preferences(tmp_path, 3, [{"source": "a.jsonl", "split": "train", "rows": 4}])
    train, held_out = told["splits"]["train"], told["splits"]["eval"]
    assert (train["rows"], train["mean"], train["median"], train["longest"]) == (4, 5.0, 5.0, 9)
    assert [bar for bar in train["histogram"] if bar[2]] == [[1, 1, 1], [5, 5, 2], [9, 9, 1]]
    assert (held_out["rows"], told["held_out_trained"]) == (0, 3)
    assert told["sources"] == [{"source": "a.jsonl", "split": "train", "rows": 4}]
