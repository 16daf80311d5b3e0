"""Preferences: rows and their complaints, which of them are held out, and their token ids."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ppo_core.data.preferences import PAIR, Preference, Sides, read_preferences
from ppo_core.data.rankings import Ranking, RankingMaker, read_rankings
from ppo_core.data.rows import Columns
from ppo_core.data.sieve import Sieve
from ppo_core.processes.plugins import Sources
from ppo_core.records import InputError
from ppo_core.spec import PreferencesSpec, RewardModelSpec, SpecError
from tests.ppo_core.scoring.scoring_jobs import write_lines
from tests.ppo_core.tiny_models import tiny_tokenizer
from tests.ppo_core.written_tables import write_rankings


def read(folder: Path, rows: list[Any]) -> Any:
    write_lines(folder / "pairs.jsonl", rows)
    return list(read_preferences("pairs.jsonl", Sources(folder)))


def tokenized(preferences: list[Preference], max_tokens: int, context_length: int | None) -> list[Ranking]:
    maker = RankingMaker(tiny_tokenizer(), "it", max_tokens, context_length)
    return [ranking for _, ranking in maker.rankings(preferences) if ranking is not None]


def test_pairs_and_rankings_become_token_ids(tmp_path: Path) -> None:
    rows = [
        {"prompt": "w2 ", "chosen": "w3", "rejected": "w4 w5", "margin": 2, "id": 7},
        {"prompt": "w2 ", "responses": ["w5", "w6", "w7"]},
        {"prompt": "w2 ", "chosen": [{"role": "assistant", "content": "w3"}], "rejected": ""},
    ]
    found = tokenized(read(tmp_path, rows), 9, None)
    assert [row.responses for row in found] == [[[2, 3], [2, 4, 5]], [[2, 5], [2, 6], [2, 7]], [[2, 3], [2]]]
    assert [row.margin for row in found] == [2.0, 0.0, 0.0]
    write_rankings(tmp_path / "train.parquet", found)
    stored = read_rankings(tmp_path / "train.parquet")
    assert (list(stored), stored[1], list(stored[-2:])) == (found, found[1], found[1:])


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


TALK = [said("user", "w5"), said("assistant", "w6"), said("user", "w2"), said("assistant", "w3")]
OTHER = [*TALK[:3], said("assistant", "w4")]


@pytest.mark.parametrize("prompt", [{}, {"prompt": "w2"}, {"prompt": TALK[:3]}], ids=["in them", "a text", "messages"])
def test_conversations_begin_with_their_prompt(tmp_path: Path, prompt: dict[str, Any]) -> None:
    (found,) = read(tmp_path, [{**prompt, "chosen": TALK, "rejected": OTHER}])
    assert found[:3] == (TALK[:3], {"chosen": "w3", "rejected": "w4"}, 0.0)


def test_a_table_of_text_has_margins_as_text_and_wrong_rows_are_counted(tmp_path: Path) -> None:
    (tmp_path / "pairs.csv").write_text("prompt,chosen,rejected,margin\nw2,w3,w4,1.5\nw2,w4,w5,\n")
    assert [row.margin for row in read_preferences("pairs.csv", Sources(tmp_path))] == [1.5, 0.0]
    with pytest.raises(InputError, match=r"row 2 has margin='nan'.* \(2 more rows cannot be used either\)$"):
        read(tmp_path, [GOOD, {**GOOD, "margin": "nan"}, {**GOOD, "chosen": 5}, {**GOOD, "rejected": "w3"}])


@pytest.mark.parametrize("tables", ["arrow", "parquet"])
def test_a_table_holds_pairs_rankings_and_conversations(tmp_path: Path, tables: str) -> None:
    """Each row of a table has all of its columns."""
    rows = [
        {"prompt": "w2", "responses": ["w3", "w4"]},
        {"prompt": "w2", "chosen": "w5", "rejected": "w6", "margin": 1.0},
    ]
    talks = [{"prompt": None, "chosen": TALK, "rejected": OTHER}, {"prompt": "w2", "responses": ["w3", "w4"]}]
    for name, given in (("texts", rows), ("talks", talks)):
        table = pa.Table.from_pylist(
            [{"margin": None, "responses": None, **dict.fromkeys(PAIR), **row} for row in given]
        )
        if tables == "arrow":
            with pa.ipc.new_file(tmp_path / f"{name}.table", table.schema) as file:
                file.write_table(table)
        else:
            pq.write_table(table, tmp_path / f"{name}.table")
    ranked = {"responses[0]": "w3", "responses[1]": "w4"}
    found = [row[:3] for row in read_preferences("texts.table", Sources(tmp_path))]
    assert found == [("w2", ranked, 0.0), ("w2", {"chosen": "w5", "rejected": "w6"}, 1.0)]
    found = [row[:3] for row in read_preferences("talks.table", Sources(tmp_path))]
    assert found == [(TALK[:3], {"chosen": "w3", "rejected": "w4"}, 0.0), ("w2", ranked, 0.0)]


def sides(train: list[Preference], held_out: list[Preference]) -> Sides:
    found = Sides()
    for split, rows in (("train", train), ("eval", held_out)):
        found.begin(split, split)
        for row in rows:
            found.add(row._replace(split=split))
    return found


def test_held_out_prompts_that_are_trained_on_are_counted_and_not_all_of_them_may_be(tmp_path: Path) -> None:
    spec = PreferencesSpec(train="a", evaluation="b")
    chats = [{**GOOD, "prompt": [{**said("user", "w5"), **more}]} for more in ({}, {"name": None}, {"name": "w6"})]
    train = read(tmp_path, [GOOD, chats[0], GOOD])
    held_out = read(tmp_path, [{**GOOD, "chosen": "w9"}, *chats[1:], GOOD])
    assert sides(train, held_out).held_out_trained(spec) == 3
    with pytest.raises(InputError, match=r"^b: all 3 held-out rows .2 prompts. .* among the 2 prompts of a: accuracy"):
        sides(train, [*held_out[:2], held_out[3]]).held_out_trained(spec)


def split_of(folder: Path, rows: list[Any], fraction: float, *, chat: bool = False) -> dict[str, str]:
    """The split of each prompt that is a text."""
    write_lines(folder / "pairs.jsonl", rows)
    found = read_preferences(
        "pairs.jsonl", Sources(folder), Columns(chat=chat), sieve=Sieve(fraction, drop_repeats=False, chat=chat)
    )
    return {row["prompt"]: one.split for row, one in zip(rows, found, strict=True)}


def test_a_fraction_of_the_prompts_is_held_out_by_their_text_alone(tmp_path: Path) -> None:
    """The rule as the documentation has it: the sha256 of the prompt's JSON lies in the first part of all."""
    rows = [{**GOOD, "prompt": f"w{number % 400}", "chosen": f"w{number + 5}"} for number in range(800)]
    texts = {row["prompt"] for row in rows}
    expected = {
        text: "eval" if int(hashlib.sha256(json.dumps(text).encode()).hexdigest(), 16) < 0.2 * 2**256 else "train"
        for text in texts
    }
    assert 50 < list(expected.values()).count("eval") < 110
    assert split_of(tmp_path, rows, 0.2) == split_of(tmp_path, rows[::-1], 0.2) == expected
    assert {text: split_of(tmp_path, [{**GOOD, "prompt": text}], 0.2)[text] for text in ("w1", "w2")} == {
        text: expected[text] for text in ("w1", "w2")
    }
    asked, talks = sorted(texts)[:40], list[Any]()
    for text in asked:
        ask = said("user", text)
        talks.append({"chosen": [ask, said("assistant", "w5")], "rejected": [ask, said("assistant", "w6")]})
    write_lines(tmp_path / "talks.jsonl", talks)
    found = read_preferences("talks.jsonl", Sources(tmp_path), sieve=Sieve(0.2, drop_repeats=False))
    chats = split_of(tmp_path, [{**GOOD, "prompt": text} for text in asked], 0.2, chat=True)
    assert [row.split for row in found] == list(chats.values())
    assert set(chats.values()) == {"train", "eval"}


def test_a_fraction_that_leaves_a_side_without_rows_is_refused(tmp_path: Path) -> None:
    spec = PreferencesSpec(train="a", evaluation_fraction=0.01)
    rows = read(tmp_path, [GOOD, GOOD, {**GOOD, "prompt": "w5"}])
    with pytest.raises(InputError, match=r"^a: evaluation_fraction=0.01 holds out none of its 3 rows \(2 prompts\): r"):
        sides(rows, []).held_out_trained(spec)
    with pytest.raises(InputError, match=r"holds out all of its 3 rows .*: lower it, or name held-out rows in eval"):
        sides([], rows).held_out_trained(spec)


NAMES = Columns("question", chosen="better")


def test_columns_have_the_names_that_the_spec_gives_them(tmp_path: Path) -> None:
    rows: list[Any] = [
        {"question": "w2", "better": "w3", "rejected": "w4", "margin": 1, "prompt": "of something else", "chosen": 7},
        {"question": "w5", "responses": ["w6", "w7"]},
    ]
    write_lines(tmp_path / "pairs.jsonl", rows)
    one, other = read_preferences("pairs.jsonl", Sources(tmp_path), NAMES)
    assert one[:3] == ("w2", {"chosen": "w3", "rejected": "w4"}, 1.0)
    assert other[:3] == ("w5", {"responses[0]": "w6", "responses[1]": "w7"}, 0.0)
    write_lines(tmp_path / "pairs.jsonl", [*rows, {"question": "w2", "chosen": "w3", "rejected": "w4"}])
    with pytest.raises(InputError, match=r"row 3 has no column better \(its columns: chosen, .* in chosen_column"):
        list(read_preferences("pairs.jsonl", Sources(tmp_path), NAMES))


GOOD = {"prompt": "w2 ", "chosen": "w3", "rejected": "w4"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "w2", "chosen": "w3"}, r"row 2 has no column rejected \(its columns: chosen, prompt\)"),
        ({**GOOD, "chosen": 5}, r"pairs.jsonl: row 2 has chosen=5: give a text, or a list of one message"),
        ({**GOOD, "rejected": None}, r"pairs.jsonl: row 2 has rejected=None: give a text"),
        (
            {**GOOD, "rejected": "w3"},
            r"pairs.jsonl: row 2 has chosen == rejected \('w3'\): neither is better; drop the row",
        ),
        ({**GOOD, "responses": ["w3", "w4"]}, r"pairs.jsonl: row 2 has both responses and chosen or rejected"),
        ({"prompt": "w2", "responses": ["w3"]}, r"row 2 has responses=\['w3'\]: give a list of two or more"),
        ({"prompt": "w2", "responses": None}, r"row 2 has responses=None: give a list of two or more"),
        ({**GOOD, "chosen": None, "responses": None}, r"row 2 has chosen=None: give a text"),
        ({"prompt": "w2", "responses": ["w3", "w4", "w3"]}, r"row 2 has responses\[0\] == responses\[2\] \('w3'\)"),
        ({"prompt": "w2", "responses": ["w3", 4]}, r"pairs.jsonl: row 2 has responses\[1\]=4: give a text"),
        (
            {"prompt": "w2", "responses": '["w3", "w4"]'},
            "row 2 has the text responses=.*: give a list; .* JSONL and Parquet can",
        ),
        ({**GOOD, "chosen": [said("user", "w3")]}, "row 2 has chosen with a last message of role 'user': what is comp"),
        ({**GOOD, "rejected": [{"content": "w3"}]}, "row 2 has rejected with a last message of role None"),
        ({"prompt": "w2", "responses": ["w3", [said("tool", "w4")]]}, r"has responses\[1\] with a .* of role 'tool'"),
        (
            {"chosen": TALK, "rejected": [*TALK[:3], said("user", "w4")]},
            "row 2 has rejected with a last .* role 'user'",
        ),
        ({**GOOD, "margin": -1}, r"pairs.jsonl: row 2 has margin=-1: give a number of 0 or more, or leave it out"),
        ({**GOOD, "margin": 1e39}, r"row 2 has margin=1e\+39: the loss is of float32, so give 1e\+30 at most"),
        ({**GOOD, "margin": "much"}, r"pairs.jsonl: row 2 has margin='much': give a number"),
        ({"prompt": "w2", "responses": ["w3", "w4"], "margin": 1}, r"pairs.jsonl: row 2 has margin and responses"),
        ({**GOOD, "chosen": "a\ud800"}, r"row 2 has chosen with '\\ud800' at character 2, a lone surrogate"),
        ({"chosen": "w3", "rejected": "w4"}, r"row 2 has no column prompt .its columns: chosen, rejected.: add it, or"),
        (
            {"chosen": TALK, "rejected": [*TALK[:1], TALK[2]]},
            r"row 2 has chosen and rejected conversations that differ",
        ),
        ({"prompt": "w9", "chosen": TALK, "rejected": OTHER}, r"row 2 has prompt='w9', but its conversations ask 'w2'"),
    ],
)
def test_a_row_that_is_no_preference_is_refused(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read(tmp_path, [GOOD, row])


def test_empty_lines_are_counted_where_a_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n\n\n{"prompt": "a"}\n')
    with pytest.raises(InputError, match=r"pairs.jsonl: row 2 \(line 4\) has no column chosen"):
        list(read_preferences("pairs.jsonl", Sources(tmp_path)))


@pytest.mark.parametrize(
    ("row", "limits", "message"),
    [
        ({**GOOD, "chosen": "w3 " * 9}, (9, None), r"row 2 has a text of 10 tokens, but dataset.max_tokens=9"),
        ({**GOOD, "chosen": "w3 " * 9}, (99, 8), r"row 2 has a text of 10 tokens, beyond the model's context 8"),
        ({**GOOD, "chosen": "odd", "rejected": "even"}, (9, None), r"2: chosen and rejected become the same"),
        ({**GOOD, "prompt": " ", "rejected": ""}, (9, None), r"row 2 has an empty text .no tokens.*text$"),
    ],
)
def test_a_text_that_cannot_be_read_is_refused(
    tmp_path: Path, row: dict[str, Any], limits: tuple[int, int | None], message: str
) -> None:
    given = read(tmp_path, [GOOD, row])
    with pytest.raises(InputError, match=message):
        tokenized(given, *limits)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.num_ranks=3", r"num_ranks=3 does not divide the 32 sequences of a batch \(fit.batch_size\)"),
        ("fit.label_smoothing=0.5", r"fit.label_smoothing=0.5: must be less than 0.5"),
        (
            "model.lora={rank: 4}",
            "model.lora works with PPO and DPO only, and a reward model trains all weights: leave it out",
        ),
        ("training.microbatch_size=4", r"microbatch_size=4 would separate responses .* set training.microbatch_tokens"),
        ("engines.rollout_engines=2", r"engines.rollout_engines=2 configures the rollout engine, .*: leave it out"),
        ("dataset.evaluation=null", "no held-out rows to measure accuracy on: name some in evaluation, or set eval"),
        ("dataset.evaluation_fraction=0.1", "evaluation=b.jsonl and evaluation_fraction=0.1 both define the held-out"),
        ("dataset.evaluation_fraction=0.6", "evaluation_fraction=0.6: must be at most 0.5"),
        ("dataset.train=[]", "dataset.train: the list of sources is empty: name at least one"),
        ("dataset.train=[{path: a, weight: 1}, {path: c}]", "train: c has no weight, but other sources do: give every"),
        ("dataset.train=[{path: c}, {path: b.jsonl}]", "train and evaluation are both b.jsonl: accuracy would"),
        ("dataset.duplicates=error", "duplicates"),
        ("dataset.too_long=keep", "too_long"),
        ("dataset.evaluation=a.jsonl", "train and evaluation are both a.jsonl: accuracy would be measured on what was"),
        ("dataset.prompt_column=chosen", "prompt_column and chosen_column are both 'chosen': give each its own column"),
        ("registry.alias=latest", r"MLflow reserves latest"),
        ("rollout.temperature=1", r"rollout: unknown key"),
        ("model.dtype=bfloat16", r"set zero_stage to 1"),
    ],
)
def test_a_spec_that_cannot_be_meant_is_refused(override: str, message: str) -> None:
    given = {"dataset": {"train": "a.jsonl", "evaluation": "b.jsonl"}, "model": {"path": "m"}}
    spec = RewardModelSpec.model_validate(given)
    with pytest.raises(SpecError, match=message):
        spec.with_overrides([override])
