"""From a user's rows to tokens: the forms that are taken, and the words in which the others are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ppo_core.data.dataset import Limits, PromptMaker, check_room, encoded, supervised_rows
from ppo_core.data.rows import PLAIN, Refusals, Row, check_question, read_rows
from ppo_core.data.tokenization import (
    context_length,
    decode_response,
    encode_completions,
    encode_prompt,
    load_tokenizer,
    model_config,
    stop_token_ids,
)
from ppo_core.processes.plugins import Sources
from ppo_core.records import InputError
from tests.ppo_core.tiny_models import CONFIGS, CONTEXT, EOS, VOCABULARY, tiny_config, tiny_policy, tiny_tokenizer

FREE = Limits(context_length=None, max_prompt_tokens=100, max_response_tokens=100)
USER = [{"role": "user", "content": "w3 w4"}]
COLUMN = "reward_model.ground_truth"


def write_lines(folder: Path, *rows: Any) -> str:
    (folder / "rows.jsonl").write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return "rows.jsonl"


def contents(source: str, folder: Path) -> list[dict[str, Any]]:
    return [row.content for row in read_rows(source, Sources(folder))]


def located(rows: list[dict[str, Any]], source: str = "rows.jsonl") -> list[Row]:
    return [Row(f"{source}: row {number}", row) for number, row in enumerate(rows, 1)]


def prompts_of(rows: list[dict[str, Any]], *, tokenizer: Any = None, limits: Limits = FREE) -> list[Any]:
    maker = PromptMaker(tokenizer or tiny_tokenizer(), "answer", limits)
    prompts = list(maker.prompts(located(rows), encoded(maker.tokenizer, located(rows))))
    maker.refusals.tell()
    check_room(maker.longest, limits)
    return prompts


def examples_of(rows: list[dict[str, Any]], *, chat: bool = False, context: int | None = None) -> list[Any]:
    tokenizer, given = tiny_tokenizer(chat=chat), located(rows, "a")
    refusals = Refusals()
    tokens = encoded(tokenizer, given)
    examples = list(supervised_rows(given, tokens, tokenizer, context_length=context, refusals=refusals))
    refusals.tell()
    return examples


def test_text_prompts_with_answers_and_metadata(tmp_path: Path) -> None:
    source = write_lines(tmp_path, {"prompt": "w3 w4", "answer": 12, "level": 2}, "", {"prompt": "w5"})
    first, second = prompts_of(contents(source, tmp_path))
    assert (first.prompt, first.prompt_token_ids, first.reference_answer) == ("w3 w4", [3, 4], 12)
    assert first.metadata == {"level": 2}
    assert (second.prompt_token_ids, second.reference_answer, second.metadata) == ([5], None, {})


def test_an_answer_may_lie_within_an_object(tmp_path: Path) -> None:
    ours = {"prompt": "w3", "reward_model": {"style": "rule", "ground_truth": "72"}}
    source = write_lines(tmp_path, ours, {"prompt": "w4", "reward_model": None}, {"prompt": "w5", COLUMN: 7})
    maker = PromptMaker(tiny_tokenizer(), COLUMN, FREE)
    rows = located(contents(source, tmp_path))
    first, second, third = maker.prompts(rows, encoded(maker.tokenizer, rows))
    assert (first.reference_answer, first.metadata) == ("72", {"reward_model": ours["reward_model"]})
    assert (second.reference_answer, third.reference_answer) == (None, 7)


def test_chats_go_through_the_template(tmp_path: Path) -> None:
    (row,) = prompts_of(
        contents(write_lines(tmp_path, {"prompt": USER}), tmp_path), tokenizer=tiny_tokenizer(chat=True)
    )
    assert (row.prompt, row.prompt_token_ids) == (USER, [3, 4, 7])


def test_chats_without_a_template_are_refused() -> None:
    with pytest.raises(InputError, match=r"no chat template: give prompts as text, or a tokenizer with chat_template"):
        prompts_of([{"prompt": USER}])


def test_prompt_ids_follow_the_content_and_repeats_are_numbered() -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "w3", "answer": "1"}, {"prompt": "w3", "answer": "2"}, {"prompt": "w3", "answer": "1"},
        {"prompt": "w3", "answer": "1", "level": 1},
    ]  # fmt: skip
    ids = [row.prompt_id for row in prompts_of(rows)]
    assert len(set(ids)) == 4
    assert ids[2] == f"{ids[0]}-2"
    assert [row.prompt_id for row in prompts_of(rows[::-1])] == [ids[3], ids[0], ids[1], ids[2]]


@pytest.mark.parametrize(
    ("completion", "chat"), [("w5 w6", False), ([{"role": "assistant", "content": "w5 w6"}], True)]
)
def test_completions_end_in_eos(tmp_path: Path, completion: Any, chat: bool) -> None:
    source = write_lines(tmp_path, {"prompt": USER if chat else "w3 w4", "completion": completion})
    assert examples_of(contents(source, tmp_path), chat=chat, context=CONTEXT) == [
        {"prompt_token_ids": [3, 4, 7] if chat else [3, 4], "completion_token_ids": [5, 6, EOS]},
    ]


def test_a_chat_that_ends_with_the_answer_is_refused(tmp_path: Path) -> None:
    source = write_lines(tmp_path, {"prompt": USER}, {"prompt": [*USER, {"role": "assistant", "content": "w5"}]})
    question, answered = read_rows(source, Sources(tmp_path))
    check_question(question)
    with pytest.raises(InputError, match=r"2 has a prompt that ends with a message of the assistant, which the policy"):
        check_question(answered)


@pytest.mark.parametrize("completion", [None, 3, [], [{"role": "assistant"}], ["w5"], [*USER, *USER]])
def test_a_row_without_one_completion_is_refused(completion: Any) -> None:
    with pytest.raises(InputError, match=r"a: row 1 has completion=.* needs text or a list of one message"):
        examples_of([{"prompt": "w3", "completion": completion}])


@pytest.mark.parametrize("role", ["user", "system", "tool", None])
def test_a_completion_that_is_not_the_assistants_is_refused(role: str | None) -> None:
    message = {"content": "w5"} if role is None else {"role": role, "content": "w5"}
    refusal = rf"^a: row 1 has a completion of role {role!r}: SFT learns .*; give it the role 'assistant', or put what"
    with pytest.raises(InputError, match=refusal):
        examples_of([{"prompt": USER, "completion": [message]}], chat=True)


def test_all_rows_that_cannot_be_used_are_counted() -> None:
    long, rows = {"prompt": "w3 w4 w5"}, [{"prompt": "w3"}, {"prompt": "w4"}]
    with pytest.raises(InputError, match=r"row 2 has a prompt of 3 tokens, .* \(2 more rows cannot be used either\)$"):
        prompts_of([rows[0], long, rows[1], {"prompt": ""}, long], limits=Limits(9, 2, 1))
    with pytest.raises(InputError, match=r"a: row 1 has completion=None.* \(1 more row cannot be used either\)$"):
        examples_of([{**rows[0], "completion": None}, {**rows[1], "completion": "w2 w3 w4 w5"}], context=4)


def test_an_example_beyond_the_context_is_refused() -> None:
    rows = [{"prompt": "w3 w4", "completion": "w5 w6"}]
    assert examples_of(rows, context=5)
    with pytest.raises(InputError, match="a: row 1 has 5 tokens, beyond the model's context 4: shorten it"):
        examples_of(rows, context=4)


def test_a_completion_with_half_a_character_is_named() -> None:
    with pytest.raises(InputError, match=r"a: row 1 has a completion with '\\ud800' at character 1"):
        examples_of([{"prompt": "w3", "completion": "\ud800"}])


def test_a_chat_template_that_refuses_says_so_with_the_row() -> None:
    tokenizer = tiny_tokenizer(chat=True)
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(InputError, match=r"rows.*: row 2: .* template rejects .*TemplateError: roles must alternate"):
        prompts_of([{"prompt": "w3"}, {"prompt": USER}], tokenizer=tokenizer)


@pytest.mark.parametrize("value", [float("nan"), {1, 2}, b"x"])
def test_metadata_that_is_not_json_is_refused(value: Any) -> None:
    message = r"rows.jsonl: row 1 cannot be stored as JSON in column 'level' .* set dataset.drop_columns=\[level\]$"
    with pytest.raises(InputError, match=message):
        prompts_of([{"prompt": "w3", "level": value}])


@pytest.mark.parametrize(
    ("prompt", "limits", "message"),
    [
        ("w3 w4 w5", Limits(None, 2, 8), "prompt of 3 tokens, but dataset.max_prompt_tokens=2: raise the limit"),
        (
            "w3 w4 w5",
            Limits(10, 8, 8),
            "max_response_tokens=8 does not fit the model's context 10 .* 3 .*lower it to 7",
        ),
        ("w3 w4 w5", Limits(3, 8, 8), "max_response_tokens=8 does not fit the model's context 3 .*drop the row"),
        (" ", FREE, "row 1 has an empty prompt .no tokens.: give it some text"),
    ],
)
def test_a_prompt_that_does_not_fit_says_what_to_lower(prompt: str, limits: Limits, message: str) -> None:
    with pytest.raises(InputError, match=message):
        prompts_of([{"prompt": prompt}], limits=limits)
    assert prompts_of([{"prompt": "w3"}], limits=Limits(9, 1, 8))


def test_what_is_advised_fits_the_longest_prompt_and_not_the_first() -> None:
    rows = [{"prompt": "w3"}, {"prompt": "w3 w4 w5"}]
    with pytest.raises(InputError, match=r"of 3 tokens in rows.jsonl: row 2: lower it to 7"):
        prompts_of(rows, limits=Limits(10, 8, 10))
    assert prompts_of(rows, limits=Limits(10, 8, 7))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_folder_without_tokenizer_is_refused(tmp_path: Path, name: str) -> None:
    tiny_policy(name).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"^[^ ]* has no tokenizer: put tokenizer.json and .* in model.tokenizer$"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_without_eos_is_refused(tmp_path: Path) -> None:
    tiny_tokenizer(eos=False).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"has no EOS token, so a response could never end: set eos_token"):
        load_tokenizer(tmp_path)


def test_tokens_of_prompts_completions_and_responses(tmp_path: Path) -> None:
    tiny_tokenizer(chat=True).save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert (encode_prompt(tokenizer, "w3 w4"), encode_prompt(tokenizer, USER)) == ([3, 4], [3, 4, 7])
    assert (encode_completions(tokenizer, ["w5", "w6 w7"]), encode_completions(tokenizer, [])) == (
        [[5, EOS], [6, 7, EOS]],
        [],
    )
    assert decode_response(tokenizer, [5, 6, EOS]) == "w5 w6"
    assert stop_token_ids(tokenizer, tmp_path) == [EOS]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, EOS, 4]}))
    assert stop_token_ids(tokenizer, tmp_path) == [EOS, 4, 9]


@pytest.mark.parametrize("name", CONFIGS)
def test_the_context_is_found_in_every_architecture(name: str) -> None:
    assert context_length(model_config(None, tiny_config(name), VOCABULARY)) == CONTEXT


def test_the_context_of_longrope_is_that_of_the_first_training() -> None:
    """Beyond it, one long text of a pass changes what the model says of the short ones."""
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    sizes = {"max_position_embeddings": 256, "original_max_position_embeddings": 32, "rope_scaling": rope}
    config = {"model_type": "phi3", "hidden_size": 16, "num_attention_heads": 2, "pad_token_id": 0, **sizes}
    assert context_length(model_config(None, config, VOCABULARY)) == 32


def test_hidden_files_of_a_folder_are_no_rows(tmp_path: Path) -> None:
    """They count in no key of a stage: with them a dataset could be stale."""
    folder = tmp_path / ".kept/rows"
    for name in ("a.jsonl", ".ipynb_checkpoints/a-checkpoint.jsonl", ".b.jsonl", ".DS_Store"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps({"prompt": name}))
    rows = read_rows("rows", Sources(tmp_path / ".kept"), PLAIN)
    assert [row.content for row in rows] == [{"prompt": "a.jsonl"}]
