"""What becomes of a user's rows: what is held out by its content, what is left out, and that both are counted."""

from __future__ import annotations

import hashlib
import json
import random
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ppo_core.data.dataset import Limits
from ppo_core.data.number_columns import NumberColumn, columns_of
from ppo_core.data.preferences import read_preferences
from ppo_core.data.preparation import Preparation
from ppo_core.data.rows import Columns, Row, read_rows
from ppo_core.data.sieve import Sieve
from ppo_core.engines.start import rows_of_splits
from ppo_core.processes.plugins import Sources
from ppo_core.records import InputError, PrepareDatasetJob, canonical_json
from ppo_core.spec import DatasetSpec
from tests.ppo_core.tiny_models import tiny_tokenizer

FREE = Limits(context_length=None, max_prompt_tokens=100, max_response_tokens=100)
MANY = [f"w{number % 30} w{number // 30}" for number in range(600)]


def located(texts: list[str], **columns: Any) -> list[Row]:
    return [Row(f"row {number}", {"prompt": text, **columns}, text) for number, text in enumerate(texts, 1)]


def prepared(
    train: list[str],
    evaluation: list[str] | None = None,
    sft: list[str] | None = None,
    *,
    limits: Limits = FREE,
    **spec: Any,
) -> tuple[dict[str, list[str]], list[dict[str, Any]]]:
    """The prompts of each split, and what is told of the sources."""
    names = {"train": "train.jsonl"} if evaluation is None else {"train": "train.jsonl", "evaluation": "eval.jsonl"}
    made = Preparation(DatasetSpec.model_validate({**names, **spec}), tiny_tokenizer(), limits)
    if evaluation is not None:
        made.add_prompts("eval", "eval.jsonl", located(evaluation))
    made.add_prompts("train", "train.jsonl", located(train))
    if sft is not None:
        made.add_examples("sft.jsonl", located(sft, completion="w5"))
    tables = made.finished()
    texts = {split: table["prompt"].to_pylist() for split, table in tables.items() if split != "sft"}
    examples = {"sft": tables["sft"]["prompt_token_ids"].to_pylist()} if "sft" in tables else {}
    return {**texts, **examples}, made.sources()


def is_in_first_part(text: str, fraction: float) -> bool:
    """By the words of docs/data.md: the sha256 of the prompt as JSON, read as a fraction."""
    return int(hashlib.sha256(json.dumps(text).encode()).hexdigest()[:16], 16) / 16**16 < fraction


@pytest.mark.parametrize(
    ("level", "message"),
    [
        ({}, "row 1 has no level: dataset.curriculum.column needs a number in each row"),
        ({"level": ""}, "row 1 has no level"),
        ({"level": "hard"}, "row 1 has level='hard': dataset.curriculum.column needs a number$"),
        ({"level": True}, "row 1 has level=True"),
        ({"level": [1]}, r"row 1 has level=\[1\]"),
    ],
)
def test_a_row_that_does_not_say_how_hard_it_is_is_refused(level: dict[str, Any], message: str) -> None:
    made = Preparation(
        DatasetSpec(train="train.jsonl"),
        tiny_tokenizer(),
        FREE,
        [NumberColumn("dataset.curriculum.column", "level", required=True)],
    )
    made.add_prompts("eval", "eval.jsonl", located(["w3"]))
    made.add_prompts("train", "train.jsonl", located(["w3"], level="-2.5"))
    with pytest.raises(InputError, match=message):
        made.add_prompts("train", "more.jsonl", located(["w4"], **level))


@pytest.mark.parametrize(
    ("columns", "row", "message"),
    [
        ("temperature", {"heat": 11}, "row 1 has heat=11: rollout.temperature_column needs a number from 0.01 to 10"),
        ("temperature", {"heat": 0}, "row 1 has heat=0"),
        ("max_response_tokens", {"heat": 9}, "row 1 has heat=9: .*tokens_column needs a whole number from 1 to 8"),
        ("max_response_tokens", {"heat": 2.5}, "row 1 has heat=2.5"),
    ],
)
def test_a_prompt_whose_own_sampling_is_out_of_bounds_is_refused(
    columns: str, row: dict[str, Any], message: str
) -> None:
    made = sampled_by(columns)
    made.add_prompts("train", "train.jsonl", located(["w3"]))
    made.add_prompts("train", "more.jsonl", located(["w3"], heat="1"))
    with pytest.raises(InputError, match=message):
        made.add_prompts("train", "train.jsonl", located(["w4"], **row))


@pytest.mark.parametrize("columns", ["temperature", "max_response_tokens"])
@pytest.mark.parametrize(
    ("row", "there"),
    [({}, "none but prompt and answer"), ({"heat": None, "level": 3}, "heat, level"), ({"answer": "1", "a": 0}, "a")],
)
def test_a_column_in_which_no_row_to_train_on_has_a_value_is_refused(
    columns: str, row: dict[str, Any], there: str
) -> None:
    made = sampled_by(columns)
    made.add_prompts("train", "train.jsonl", located(["w3", "w4"], **row))
    made.add_prompts("eval", "eval.jsonl", located(["w3"], heat="1"))
    message = f"rollout.{columns}_column=heat: no row to train on has a value there .columns: {there}.: name one that"
    with pytest.raises(InputError, match=message):
        made.finished()
    made.add_prompts("train", "more.jsonl", located(["w3"], heat="1"))
    assert made.finished()["train"].num_rows == 3


def sampled_by(columns: str) -> Preparation:
    """Of prompts to train on that may say in their column `heat` how they are sampled."""
    job = PrepareDatasetJob.model_validate(
        {
            "dataset": {"train": "train.jsonl"},
            "model": {"path": "m"},
            "sft_data": None,
            "max_response_tokens": 8,
            "num_eval_prompts": 0,
            "reward": {"function": "a.py:f"},
            f"{columns}_column": "heat",
        }
    )
    return Preparation(job.dataset, tiny_tokenizer(), FREE, columns_of(job))


def test_all_rows_count_by_default_and_there_is_nothing_to_tell() -> None:
    assert prepared(["w3", "w3", "w4"], ["w3"]) == ({"eval": ["w3"], "train": ["w3", "w3", "w4"]}, [])


def test_prompts_are_held_out_by_their_hash_whatever_stands_beside_them() -> None:
    splits, told = prepared(MANY, sft=MANY, evaluation_fraction=0.2)
    held_out = [text for text in MANY if is_in_first_part(text, 0.2)]
    assert 80 < len(held_out) < 160
    assert splits["eval"] == held_out
    assert splits["train"] == [text for text in MANY if text not in held_out]
    assert len(splits["sft"]) == len(splits["train"])
    assert told == [
        {"source": "train.jsonl", "split": "train", "read": 600, "rows": 600 - len(held_out), "held_out": len(held_out),
         "dropped": {}},
        {"source": "sft.jsonl", "split": "sft", "read": 600, "rows": 600 - len(held_out), "held_out": 0,
         "dropped": {"held out": len(held_out)}},
    ]  # fmt: skip
    shuffled = [*MANY[::2], "w31", *MANY[::2]]
    random.Random(0).shuffle(shuffled)
    again, _ = prepared(shuffled, evaluation_fraction=0.2)
    assert {text for text in again["eval"] if text in MANY} == {text for text in held_out if text in shuffled}
    assert not set(again["eval"]) & set(again["train"])


def test_a_larger_part_holds_the_smaller_one() -> None:
    smaller, larger = (set(prepared(MANY, evaluation_fraction=part)[0]["eval"]) for part in (0.05, 0.1))
    assert smaller < larger


def test_repeated_and_held_out_prompts_are_left_out_where_the_spec_says_so() -> None:
    splits, told = prepared(["w3", "w4", "w3", "w5", "w5"], ["w5", "w6", "w6"], ["w4", "w4", "w6"], duplicates="drop")
    assert splits == {"eval": ["w5", "w6"], "train": ["w3", "w4"], "sft": [[4]]}
    assert [(one["source"], one["read"], one["rows"], one["dropped"]) for one in told] == [
        ("eval.jsonl", 3, 2, {"repeated": 1}),
        ("train.jsonl", 5, 2, {"repeated": 1, "held out": 2}),
        ("sft.jsonl", 3, 1, {"repeated": 1, "held out": 1}),
    ]


def test_examples_with_other_completions_are_no_repeats() -> None:
    made = Preparation(DatasetSpec(train="a", duplicates="drop"), tiny_tokenizer(), FREE)
    rows = [Row("1", {"prompt": "w3", "completion": text}, "w3") for text in ("w4", "w5", "w4")]
    made.add_examples("sft.jsonl", rows)
    assert made.finished()["sft"]["completion_token_ids"].to_pylist() == [[4, 1], [5, 1]]


@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        (Limits(None, 2, 8), ["w3", "w3 w4"]),
        (Limits(10, 5, 9), ["w3"]),
        (Limits(None, 3, 8), ["w3", "w3 w4", "w3 w4 w5"]),
    ],
)
def test_rows_that_are_too_long_can_be_left_out(limits: Limits, kept: list[str]) -> None:
    rows = ["w3", "w3 w4", "w3 w4 w5"]
    splits, (told,) = prepared(rows, limits=limits, too_long="drop")
    assert splits["train"] == kept
    assert told["dropped"] == ({"too long": 3 - len(kept)} if len(kept) < 3 else {})


def test_examples_that_are_too_long_can_be_left_out() -> None:
    splits, told = prepared(["w3"], sft=["w3", "w3 w4"], limits=Limits(3, 2, 1), too_long="drop")
    assert splits["sft"] == [[3]]
    assert told[1]["dropped"] == {"too long": 1}


def test_where_no_row_is_left_all_reasons_are_said() -> None:
    words = r"no rows are left \(train.jsonl: 3 rows, 1 repeated, 2 too long\): see dataset.duplicates, too_long"
    with pytest.raises(InputError, match=words):
        prepared(["w3 w4", "w3 w4", "w5 w6"], limits=Limits(None, 1, 8), too_long="drop", duplicates="drop")
    with pytest.raises(InputError, match=r"too_long and rollout.max_response_tokens=8 \(of the model's context 8\)$"):
        prepared(["w3 w4"], limits=Limits(8, 4, 8), too_long="drop")


def test_a_text_and_the_message_that_it_becomes_are_one_prompt() -> None:
    train = [Row(f"row {number}", {"prompt": text}, text) for number, text in enumerate(MANY)]
    sft = [
        Row(row.where, {**row.content, "completion": "w5"}, [{"role": "user", "content": row.prompt}]) for row in train
    ]
    for spec in ({"evaluation_fraction": 0.5}, {"duplicates": "drop", "evaluation": "held_out"}):
        made = Preparation(DatasetSpec.model_validate({"train": "a", "chat": True, **spec}), tiny_tokenizer(), FREE)
        made.add_prompts("eval" if "evaluation" in spec else "train", "a", train[:300])
        made.add_examples("b", sft[:300])
        kept = made.tallies[-1].rows
        assert kept == (0 if "evaluation" in spec else 300 - made.tallies[0].held_out)
        assert "evaluation" in spec or 0 < kept < 300


def test_a_prompt_with_the_system_prompt_written_out_is_the_one_without(tmp_path: Path) -> None:
    """What the policy reads is the same, so one may not be held out, or kept, without the other."""
    rule = {"role": "system", "content": "Be brief."}
    users = [[{"role": "user", "content": text}] for text in MANY[:100]]
    written = [[rule, *messages] for messages in users]
    asked = [{"prompt": one} for one in (*users, *written, [{**rule, "content": "Be long."}, *users[0]])]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, asked)))
    columns = Columns(chat=True, system_prompt="Be brief.")
    rows = list(read_rows("rows.jsonl", Sources(tmp_path), columns))
    spec = {"train": "a", "chat": True, "system_prompt": "Be brief."}
    halved = Sieve.of(DatasetSpec.model_validate({**spec, "evaluation_fraction": 0.5}))
    places = [halved.place("train", row)[0] for row in rows]
    assert places[:100] == places[100:200]
    assert set(places) == {"train", "eval"}
    # A message of the user has the key that it always had.
    hashes = [hashlib.sha256(canonical_json(messages).encode()).hexdigest() for messages in users]
    assert [place == "eval" for place in places[:100]] == [int(found[:16], 16) < 2**63 for found in hashes]
    once = Sieve.of(DatasetSpec.model_validate({**spec, "duplicates": "drop"}))
    for split in ("train", "sft"):
        assert [once.place(split, row)[0] for row in rows] == [*[split] * 100, *[""] * 100, split]
    pairs = [{**row, "chosen": "w3", "rejected": "w4"} for row in asked]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    preferences = read_preferences("pairs.jsonl", Sources(tmp_path), columns, sieve=halved)
    assert [one.split for one in preferences] == places


def test_a_source_with_a_weight_must_have_rows_left() -> None:
    sources = [{"path": "a", "weight": 1}, {"path": "b", "weight": 1}]
    made = Preparation(DatasetSpec.model_validate({"train": sources, "duplicates": "drop"}), tiny_tokenizer(), FREE)
    made.add_prompts("train", "a", located(["w3", "w4"]))
    made.add_prompts("train", "b", located(["w4", "w3"]))
    made.finished()
    with pytest.raises(InputError, match=r"no rows left \(b: 2 rows, 2 repeated\): remove it from dataset.train"):
        made.sources()


def test_ids_of_the_users_own_name_the_prompts() -> None:
    made = Preparation(DatasetSpec(train="a", id_column="key"), tiny_tokenizer(), FREE)
    made.add_prompts(
        "train", "a", [Row("row 1", {"prompt": "w3", "key": "x"}), Row("row 2", {"prompt": "w3", "key": 7})]
    )
    assert made.finished()["train"]["prompt_id"].to_pylist() == ["x", "7"]
    with pytest.raises(InputError, match=r"row 9 has key='x', the same as row 1: give each row a unique id"):
        made.add_prompts("train", "b", [Row("row 9", {"prompt": "w4", "key": "x"})])
    made.add_prompts("eval", "b", [Row("row 1", {"prompt": "w4", "key": "x"})])  # nothing looks in both
    with pytest.raises(InputError, match=r"row 3 has key=None: an id must be text or a whole number"):
        made.add_prompts("train", "b", [Row("row 3", {"prompt": "w4"})])


def test_the_columns_that_a_spec_drops_are_in_no_split_whatever_they_hold(tmp_path: Path) -> None:
    for name in ("train", "eval"):
        row = {"prompt": name, "at": datetime(2026, 1, 2, tzinfo=UTC), "completion": b"x", "level": 1}
        pq.write_table(pa.Table.from_pylist([row]), tmp_path / f"{name}.parquet")
    files = {"train": "train.parquet", "evaluation": "eval.parquet"}
    job = PrepareDatasetJob.model_validate(
        {
            "dataset": {**files, "drop_columns": ["at", "completion", "elsewhere"]},
            "model": {"path": "model"},
            "sft_data": None,
            "max_response_tokens": 8,
            "num_eval_prompts": 1,
            "reward": {"sources": [{"function": "reward.py:score"}]},
        }
    )
    rows = {split: list(*sources) for split, sources in rows_of_splits(job, Sources(tmp_path)).items()}
    given = job.model_copy(update={"sft_data": "train.parquet", "sft_completion_column": "level"})
    (example,) = rows_of_splits(given, Sources(tmp_path))["sft"][0]  # they are stored as tokens alone
    assert (example.content["completion"], example.content["at"].year) == (1, 2026)
    assert {split: row.content for split, (row,) in rows.items()} == {
        split: {"prompt": split, "level": 1} for split in ("train", "eval")
    }
