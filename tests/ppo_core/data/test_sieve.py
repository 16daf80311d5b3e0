"""What makes two prompts one: what a chat template reads of their messages, however the rows were stored."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ppo_core.data.dataset import Limits
from ppo_core.data.description import describe
from ppo_core.data.preferences import read_preferences
from ppo_core.data.preparation import Preparation
from ppo_core.data.rows import Row, read_rows
from ppo_core.data.sieve import content_key, one_form
from ppo_core.processes.plugins import Sources
from ppo_core.records import InputError, canonical_json
from ppo_core.spec import DatasetSpec
from tests.ppo_core.tiny_models import tiny_tokenizer

FREE = Limits(None, 100, 100)
CALL = {"id": "1", "function": {"name": "f", "arguments": {"a": 1}}}


def user(text: str, **keys: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text, **keys}]


def key_of(messages: list[dict[str, Any]]) -> bytes:
    return content_key("", one_form(messages, chat=False))


def preparation(**spec: Any) -> Preparation:
    return Preparation(DatasetSpec.model_validate({"train": "a", **spec}), tiny_tokenizer(chat=True), FREE)


def test_a_key_that_no_template_reads_puts_no_prompt_on_both_sides(tmp_path: Path) -> None:
    texts = [f"w{number}" for number in range(3, 9)]
    chats = [user(text, turn_identifier=turn, hashed_ip=None) for turn in range(20) for text in texts]
    made = preparation(evaluation_fraction=0.5, duplicates="drop")
    made.add_prompts("train", "a", [Row(f"row {n}", {"prompt": chat}, chat) for n, chat in enumerate(chats)])
    tables = made.finished()
    train, held_out = (
        {tuple(ids) for ids in tables[side]["prompt_token_ids"].to_pylist()} for side in ("train", "eval")
    )
    assert train
    assert held_out
    assert not train & held_out
    assert len(tables["train"]) + len(tables["eval"]) == len(texts)


def test_rows_on_both_sides_are_counted_whatever_else_their_messages_have(tmp_path: Path) -> None:
    for split, turn in (("train", 1), ("eval", 2)):
        made = preparation()
        made.add_prompts("train", "a", [Row("row 1", {"prompt": user("w3", turn=turn)})])
        pq.write_table(made.finished()["train"], tmp_path / f"{split}.parquet")
    assert describe(tmp_path)["on_both_sides"] == 1


def test_preferences_have_the_same_key(tmp_path: Path) -> None:
    rows = [{"prompt": user("w3", turn=turn), "chosen": "w4", "rejected": "w5"} for turn in (1, 2)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    first, second = read_preferences("pairs.jsonl", Sources(tmp_path))
    assert first.key == second.key == key_of(user("w3"))


def test_the_keys_that_templates_read_are_compared() -> None:
    asked = user("w3")
    called = [*asked, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    other = [*asked, {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "g", "arguments": {}}}]}]
    answered = [*called, {"role": "tool", "tool_call_id": "1", "name": "f", "content": "2"}]
    chats = [asked, user("w4"), user("w3", name="Ann"), called, other, answered]
    chats += [[*called, {**answered[-1], **change}] for change in ({"tool_call_id": "2"}, {"name": "g"})]
    assert len({key_of(chat) for chat in chats}) == len(chats)


def test_what_is_missing_in_a_table_is_missing_at_any_depth(tmp_path: Path) -> None:
    """A table gives each call the arguments of all of them."""
    calls = [[CALL], [{"id": "2", "type": "function", "function": {"name": "f", "arguments": {"b": [2], "c": "3"}}}]]
    answer = {"role": "tool", "content": "2", "tool_call_id": "1"}
    chats = [[*user("w3"), {"role": "assistant", "content": None, "tool_calls": call}, answer] for call in calls]
    pq.write_table(pa.Table.from_pylist([{"prompt": chat} for chat in chats]), tmp_path / "rows.parquet")
    stored = [row.prompt for row in read_rows("rows.parquet", Sources(tmp_path))]
    assert stored == chats
    assert [key_of(chat) for chat in stored] == [key_of(chat) for chat in chats]


def test_texts_and_plain_messages_have_the_key_of_their_json() -> None:
    for prompt in ("w3 w4", user("w3"), [{"role": "system", "content": "w5"}, *user("w3 w4")]):
        expected = hashlib.sha256(canonical_json(prompt).encode()).digest()[:16]
        assert content_key("", one_form(prompt, chat=False)) == expected


def test_an_example_with_its_completion_as_a_message_repeats_the_one_with_a_text() -> None:
    made = preparation(duplicates="drop")
    completions = ["w4", [{"role": "assistant", "content": "w4"}], [{"role": "assistant", "content": "w5"}]]
    made.add_examples(
        "b", [Row(f"row {n}", {"prompt": "w3", "completion": one}, "w3") for n, one in enumerate(completions)]
    )
    assert made.finished()["sft"]["completion_token_ids"].to_pylist() == [[4, 1], [5, 1]]
    assert made.tallies[0].dropped == {"repeated": 1}


BAD = "{% if message.role == 'bad' %}{{ raise_exception('bad role') }}{% endif %}"


@pytest.mark.parametrize(("use", "more"), [("prompts", 3), ("examples", 2)])
def test_rows_that_the_chat_template_rejects_are_counted_with_all_others(use: str, more: int) -> None:
    made = preparation()
    made.tokenizer.chat_template = f"{{% for message in messages %}}{BAD}{{{{ message.content }}}}{{% endfor %}}"
    bad = [{"role": "bad", "content": "w3"}]
    prompts = [user("w3"), bad, bad, user(""), bad]  # an example may have an empty prompt
    rows = [Row(f"row {n}", {"prompt": prompt, "completion": "w4"}, prompt) for n, prompt in enumerate(prompts, 1)]
    refusal = rf"^row 2: the tokenizer's chat template rejects .*bad role.* \({more} more rows cannot be used either\)$"
    with pytest.raises(InputError, match=refusal):
        made.add_prompts("train", "a", rows) if use == "prompts" else made.add_examples("a", rows)


def test_rows_whose_prompts_cannot_be_compared_are_counted() -> None:
    made = preparation(duplicates="drop")
    call = {"id": "1", "function": {"name": "f", "arguments": {"x": float("nan")}}}
    chat = [*user("w3"), {"role": "assistant", "tool_calls": [call]}]
    rows = [Row(f"row {n}", {"prompt": prompt}, prompt) for n, prompt in enumerate((user("w3"), chat, chat), 1)]
    with pytest.raises(InputError, match=r"^row 2 cannot be stored as JSON .* \(1 more row cannot be used either\)$"):
        made.add_prompts("train", "a", rows)
