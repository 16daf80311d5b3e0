"""From a user's rows to tokens: the forms that are taken, and the words in which the others are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ppo_core.data.dataset import Limits, prompt_rows, read_rows, supervised_rows
from ppo_core.data.tokenization import (
    context_length,
    decode_response,
    encode_completion,
    encode_prompt,
    load_tokenizer,
    model_config,
    stop_token_ids,
)
from ppo_core.records import InputError
from ppo_core.scoring.plugins import Sources
from tests.ppo_core.tiny_models import CONFIGS, CONTEXT, EOS, VOCABULARY, tiny_config, tiny_policy, tiny_tokenizer

FREE = Limits(context_length=None, max_prompt_tokens=100, max_response_tokens=100)
USER = [{"role": "user", "content": "w3 w4"}]


def write_lines(folder: Path, *rows: Any) -> str:
    (folder / "rows.jsonl").write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return "rows.jsonl"


def prompts_of(rows: list[dict[str, Any]], *, chat: bool = False, limits: Limits = FREE) -> list[Any]:
    return prompt_rows(rows, tiny_tokenizer(chat=chat), source="rows.jsonl", answer_column="answer", limits=limits)


def test_text_prompts_with_answers_and_metadata(tmp_path: Path) -> None:
    source = write_lines(tmp_path, {"prompt": "w3 w4", "answer": 12, "level": 2}, "", {"prompt": "w5"})
    first, second = prompts_of(read_rows(source, Sources(tmp_path)))
    assert (first.prompt, first.prompt_token_ids, first.reference_answer) == ("w3 w4", [3, 4], 12)
    assert first.metadata == {"level": 2}
    assert (second.prompt_token_ids, second.reference_answer, second.metadata) == ([5], None, {})


def test_chats_go_through_the_template(tmp_path: Path) -> None:
    (row,) = prompts_of(read_rows(write_lines(tmp_path, {"prompt": USER}), Sources(tmp_path)), chat=True)
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
    rows = supervised_rows(
        read_rows(source, Sources(tmp_path)), tiny_tokenizer(chat=chat), source=source, context_length=CONTEXT
    )
    assert rows == [
        {"prompt_token_ids": [3, 4, 7] if chat else [3, 4], "completion_token_ids": [5, 6, EOS]},
    ]


@pytest.mark.parametrize("completion", [None, 3, [], [{"role": "assistant"}], ["w5"], [*USER, *USER]])
def test_a_row_without_one_completion_is_refused(completion: Any) -> None:
    with pytest.raises(InputError, match=r"rows.jsonl: row 1 has completion=.* a text or a list of one message"):
        supervised_rows(
            [{"prompt": "w3", "completion": completion}], tiny_tokenizer(), source="rows.jsonl", context_length=None
        )


def test_an_example_beyond_the_context_is_refused() -> None:
    rows = [{"prompt": "w3 w4", "completion": "w5 w6"}]
    assert supervised_rows(rows, tiny_tokenizer(), source="a", context_length=5)
    with pytest.raises(InputError, match="a: row 1 has 5 tokens, beyond the model's context 4: shorten it"):
        supervised_rows(rows, tiny_tokenizer(), source="a", context_length=4)


@pytest.mark.parametrize("body", ["return [{'prompt': 'w3'}]", "yield {'prompt': 'w3'}"])
def test_rows_may_come_from_a_function(tmp_path: Path, body: str) -> None:
    (tmp_path / "generated.py").write_text(f"def rows():\n    {body}\n")
    assert read_rows("generated.py:rows", Sources(tmp_path)) == [{"prompt": "w3"}]


@pytest.mark.parametrize("body", ["raise OSError('no network')", "return None", "yield {}['a']"])
def test_a_function_that_gives_no_rows_is_named(tmp_path: Path, body: str) -> None:
    (tmp_path / "generated.py").write_text(f"def rows():\n    {body}\n")
    with pytest.raises(InputError, match=r"generated.py:rows yields no rows, it raised (OSError|TypeError|KeyError): "):
        read_rows("generated.py:rows", Sources(tmp_path))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{"prompt": "w3"}, "{broken"], r"rows.jsonl:2 is not JSON in UTF-8: Expecting property name"),
        ([], "rows.jsonl holds no rows: give at least one prompt"),
        (["", "  "], "rows.jsonl holds no rows"),
        ([[1]], "row 1 is list, not an object with a `prompt`"),
        ([{"prompt": "w3"}, {"question": "w4"}], "row 2 has prompt=None: it must be a text or a list of messages"),
        ([{"prompt": ""}], "row 1 has prompt='': it must be"),
        ([{"prompt": [{"content": "w3"}]}], "row 1 has prompt=.*messages with roles"),
    ],
)
def test_rows_that_are_none_are_refused(tmp_path: Path, lines: list[Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_rows(write_lines(tmp_path, *lines), Sources(tmp_path))


def test_files_that_are_missing_or_in_another_encoding_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no file .*none.jsonl: give a JSONL file or"):
        read_rows("none.jsonl", Sources(tmp_path))
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "ü"}'.encode("latin-1"))
    with pytest.raises(InputError, match=r"latin.jsonl:1 is not JSON in UTF-8"):
        read_rows("latin.jsonl", Sources(tmp_path))


WINDOWS = "C:\\data\\rows.jsonl"


@pytest.mark.parametrize("first", ['{"prompt": "w3, w4"}', '\n{"prompt": "w3, w4"}'])
def test_a_mark_of_windows_before_the_rows_is_no_part_of_them(tmp_path: Path, first: str) -> None:
    (tmp_path / "rows.jsonl").write_bytes(first.encode("utf-8-sig"))
    assert read_rows("rows.jsonl", Sources(tmp_path)) == [{"prompt": "w3, w4"}]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"prompt,answer\n1,2\n", r"is CSV, .*pandas.read_csv"),
        (b"prompt\tanswer, if any\n1\t2\n", r'is TSV, .*pandas.read_csv\(.*, sep="\\t"\)'),
        (b"PAR1\x15\x04,\x15,", r"is PARQUET, .*pandas.read_parquet"),
        ('{"prompt": "w3, w4"}\n'.encode("utf-16"), r"is not UTF-8, but UTF-16 .* iconv -f UTF-16"),
        ('{"prompt": "w3, w4"}\n'.encode("utf-16-le"), r"is not UTF-8"),
        ('{"prompt": "ü, w4"}\n'.encode("latin-1"), r"rows.jsonl:1 is not JSON in UTF-8"),
        (b'{"prompt": ' + b"[" * 100_000, r"rows.jsonl:1 is nested too deeply"),
    ],
)
def test_a_file_of_another_kind_is_called_by_its_name(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "rows.jsonl").write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_rows("rows.jsonl", Sources(tmp_path))


def test_a_path_of_windows_names_no_function(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no file .*C:.data.rows.jsonl"):
        read_rows(WINDOWS, Sources(tmp_path))
    (tmp_path / WINDOWS).write_text('{"prompt": "w3"}')
    assert read_rows(WINDOWS, Sources(tmp_path)) == [{"prompt": "w3"}]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([*USER, {"role": "user"}], "row 1: message 2 of the prompt has no content: give it a text"),
        ([{"role": "user", "content": None}], "message 1 of the prompt has content=None: give it a text"),
        ([{"role": "user", "content": [{"type": "text", "text": "w3"}]}], "message 1 .* a list of parts .* join"),
        ([{"role": "user", "content": "w\ud800"}], r"message 1 .* with '\\ud800' at character 2, a lone surrogate"),
        ("w3 \ud800", r"row 1 has a prompt with '\\ud800' at character 4, a lone surrogate"),
    ],
)
def test_a_message_that_is_no_text_is_named(tmp_path: Path, prompt: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_rows(write_lines(tmp_path, {"prompt": prompt}), Sources(tmp_path))


def test_a_completion_with_half_a_character_is_named() -> None:
    rows = [{"prompt": "w3", "completion": "\ud800"}]
    with pytest.raises(InputError, match=r"a: row 1 has a completion with '\\ud800' at character 1"):
        supervised_rows(rows, tiny_tokenizer(), source="a", context_length=None)


def test_a_chat_template_that_refuses_says_so_with_the_row() -> None:
    tokenizer = tiny_tokenizer(chat=True)
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(InputError, match=r"rows: row 2: .* template refuses .*TemplateError: roles must alternate"):
        prompt_rows([{"prompt": "w3"}, {"prompt": USER}], tokenizer, source="rows", answer_column="answer", limits=FREE)


@pytest.mark.parametrize("value", [float("nan"), {1, 2}, b"x"])
def test_metadata_that_is_not_json_is_refused(value: Any) -> None:
    with pytest.raises(InputError, match=r"rows.jsonl: row 1 is not plain JSON"):
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
        (" ", FREE, "row 1 has a prompt of no tokens: give it some text"),
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
    with pytest.raises(InputError, match=r"(?s)holds no tokenizer that can be loaded .* in model.tokenizer"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_without_eos_is_refused(tmp_path: Path) -> None:
    tiny_tokenizer(eos=False).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"has no EOS token: a response could never end; set eos_token"):
        load_tokenizer(tmp_path)


def test_tokens_of_prompts_completions_and_responses(tmp_path: Path) -> None:
    tiny_tokenizer(chat=True).save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert (encode_prompt(tokenizer, "w3 w4"), encode_prompt(tokenizer, USER)) == ([3, 4], [3, 4, 7])
    assert (encode_completion(tokenizer, "w5"), decode_response(tokenizer, [5, 6, EOS])) == ([5, EOS], "w5 w6")
    assert stop_token_ids(tokenizer, tmp_path) == [EOS]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, EOS, 4]}))
    assert stop_token_ids(tokenizer, tmp_path) == [EOS, 4, 9]


@pytest.mark.parametrize("name", CONFIGS)
def test_the_context_is_found_in_every_architecture(name: str) -> None:
    assert context_length(model_config(None, tiny_config(name), VOCABULARY)) == CONTEXT
