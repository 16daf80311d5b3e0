"""Preferences of several sources, and which of their rows count, as the scoring engine's jobs make and check them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from ppo_core.data.rankings import read_rankings
from ppo_core.engines.reward_models import check_preferences, prepare_preferences
from ppo_core.processes.protocol import Job, JobInput
from ppo_core.records import InputError
from tests.ppo_core.scoring.scoring_jobs import write_lines
from tests.ppo_core.tiny_models import CONTEXT, tiny_config, tiny_tokenizer

COLUMNS = ("prompt", "chosen", "rejected")
Pair = tuple[str, str, str]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer(chat=True).save_pretrained(folder)
    return folder


class Given:
    """A user's folder with files of pairs, and what becomes of them."""

    def __init__(self, folder: Path, tokenizer: Path) -> None:
        self.folder, self.tokenizer = folder, tokenizer

    def write(self, **files: list[Any]) -> None:
        """Each a file of rows; a tuple of texts is a prompt with its two responses."""
        for name, rows in files.items():
            named = [dict(zip(COLUMNS, row, strict=True)) if isinstance(row, tuple) else row for row in rows]
            write_lines(self.folder / f"{name}.jsonl", named)

    def job(self, *, by_policy: bool = False, chat: bool = False, **dataset: Any) -> Job:
        """Of the settings of the preferences."""
        spec = {"dataset": dataset, "model": {"config": tiny_config("llama"), "tokenizer": "t"}, "by_policy": by_policy}
        inputs = {"sources": JobInput(self.folder, ""), "tokenizer": JobInput(self.tokenizer, "")}
        output = self.folder / "made"
        output.mkdir(exist_ok=True)
        return Job("", inputs, output, {**spec, "chat": chat}, lambda *_: None)

    def made(self, **settings: Any) -> dict[str, Any]:
        """What is said of the rows that are stored, which a check says too."""
        job = self.job(**settings)
        facts = prepare_preferences(job)
        checked = check_preferences(job)
        assert {name: checked[name] for name in ("counts", "pairs")} == {n: facts[n] for n in ("counts", "pairs")}
        assert checked["sources"] == facts["described"]["sources"]
        assert checked["held_out_trained"] == facts["described"]["held_out_trained"]
        return {**facts["described"], "left_out": checked["left_out"]}

    def stored(self, split: str = "train") -> list[list[list[int]]]:
        """The token ids of each row's texts."""
        return [row.responses for row in read_rankings(self.folder / "made" / f"{split}.parquet")]


@pytest.fixture
def given(tmp_path: Path, tokenizer: Path) -> Given:
    return Given(tmp_path, tokenizer)


def pairs(*numbers: int) -> list[Pair]:
    """A pair for each prompt."""
    return [(f"w{number} ", "w2", "w3") for number in numbers]


def tokens(*numbers: int) -> list[list[list[int]]]:
    """Of such pairs."""
    return [[[number, 2], [number, 3]] for number in numbers]


def told(source: str, split: str, read: int, rows: int, **dropped: int) -> dict[str, Any]:
    """What is said of a source, of which nothing is moved to the held-out rows."""
    reasons = {reason.replace("_", " "): count for reason, count in dropped.items()}
    return {
        **{"source": f"{source}.jsonl", "split": split, "read": read, "rows": rows, "held_out": 0},
        "dropped": reasons,
    }


BOTH = [{"path": "a.jsonl"}, {"path": "b.jsonl"}]


def test_several_sources_are_one_after_the_other_and_weights_are_shares_of_the_draws(given: Given) -> None:
    given.write(a=pairs(5, 6, 7, 8, 9, 10), b=pairs(11, 12, 13), held=pairs(20, 21))
    weighed = [{"path": "a.jsonl", "weight": 1}, {"path": "b.jsonl", "weight": 2}]
    found = given.made(train=weighed, evaluation="held.jsonl")
    assert given.stored() == tokens(5, 6, 7, 8, 9, 10, 11, 12, 13)
    assert given.stored("eval") == tokens(20, 21)
    a, b, held = told("a", "train", 6, 6), told("b", "train", 3, 3), told("held", "eval", 2, 2)
    expected = [{**a, "draws": 3}, {**b, "draws": 6}, held]
    assert found["sources"] == json.loads((given.folder / "made" / "sources.json").read_text()) == expected
    assert given.made(train=BOTH, evaluation="held.jsonl")["sources"] == [a, b, held]


@pytest.mark.parametrize("held_out", [{"evaluation": "held.jsonl"}, {"evaluation_fraction": 0.5}], ids=["file", "part"])
def test_one_source_of_which_all_rows_count_is_stored_as_ever(given: Given, held_out: dict[str, Any]) -> None:
    given.write(a=[*pairs(*range(4, 20)), *pairs(4)], held=pairs(20, 4))
    found = given.made(train="a.jsonl", **held_out)
    assert (found["sources"], found["left_out"]) == ([], {})
    assert found["held_out_trained"] == (1 if "evaluation" in held_out else 0)
    assert sorted(path.name for path in (given.folder / "made").iterdir()) == ["eval.parquet", "train.parquet"]
    assert len(given.stored()) + len(given.stored("eval")) == (19 if "evaluation" in held_out else 17)


def test_repeated_rows_and_those_of_held_out_prompts_are_left_out(given: Given) -> None:
    """The same prompt with other responses, or with these the other way round, says something else."""
    one = {"prompt": "w5 ", "chosen": "w2", "rejected": "w3"}
    other, turned = {**one, "rejected": "w4"}, {**one, "chosen": "w3", "rejected": "w2"}
    given.write(
        a=[one, other, turned, one, ("w9 ", "w6", "w7"), {"prompt": "w5 ", "responses": ["w2", "w3"]}],
        b=[{**one, "margin": 2}, *pairs(6, 9)],
        held=[*pairs(9, 9), ("w9 ", "w4", "w5")],
    )
    found = given.made(train=BOTH, evaluation="held.jsonl", duplicates="drop")
    assert given.stored() == [[[5, 2], [5, 3]], [[5, 2], [5, 4]], [[5, 3], [5, 2]], [[6, 2], [6, 3]]]
    assert given.stored("eval") == [[[9, 2], [9, 3]], [[9, 4], [9, 5]]]
    assert found["sources"] == [
        told("held", "eval", 3, 2, repeated=1),
        told("a", "train", 6, 3, repeated=2, held_out=1),
        told("b", "train", 3, 1, repeated=1, held_out=1),
    ]
    assert found["left_out"] == {"held out": 2, "repeated": 4}
    assert (found["held_out_trained"], found["splits"]["train"]["rows"]) == (0, 4)


def test_a_text_and_the_message_that_it_becomes_are_one_prompt_and_one_response(given: Given) -> None:
    asked, answers = [{"role": "user", "content": "w5"}], [[{"role": "assistant", "content": w}] for w in ("w2", "w3")]
    given.write(
        a=[("w5", "w2", "w3"), (asked, "w2", "w3"), ("w5", *answers), (asked, *answers), *pairs(6), ("w9", "w2", "w3")],
        held=[([{"role": "user", "content": "w9", "name": None}], "w4", "w5")],
    )
    found = given.made(chat=True, train="a.jsonl", evaluation="held.jsonl", duplicates="drop")
    assert found["sources"][1] == told("a", "train", 6, 2, repeated=3, held_out=1)


def test_a_part_is_held_out_by_the_prompts_alone_whatever_is_dropped(given: Given) -> None:
    """The rule as the documentation has it: the sha256 of the prompt's JSON lies in the first part of all."""
    numbers = range(2, 40)
    held = [n for n in numbers if int(hashlib.sha256(json.dumps(f"w{n} ").encode()).hexdigest(), 16) < 0.4 * 2**256]
    kept = [number for number in numbers if number not in held]
    assert 5 < len(held) < 30
    given.write(a=[(f"w{n} ", "w5 w6", "w7") for n in numbers] * 2, b=[(f"w{n} ", "w6", "w7") for n in numbers])
    found = given.made(train=BOTH, evaluation_fraction=0.4, duplicates="drop")
    assert [row[0][0] for row in given.stored()] == [*kept, *kept]
    assert [row[0][0] for row in given.stored("eval")] == [*held, *held]
    a, b = found["sources"]
    assert a == {**told("a", "train", 76, len(kept), repeated=38), "held_out": len(held)}
    assert b == {**told("b", "train", 38, len(kept)), "held_out": len(held)}
    short = given.made(train=BOTH, evaluation_fraction=0.4, max_tokens=2, too_long="drop")
    assert given.stored("eval") == [[[number, 6], [number, 7]] for number in held]
    assert short["sources"] == [
        told("a", "train", 76, 0, too_long=76),
        {**told("b", "train", 38, len(kept)), "held_out": len(held)},
    ]


@pytest.mark.parametrize(
    ("words", "by_policy", "limit", "kept"),
    [((1, 2, 3), False, 3, 2), ((1, 2, 3), True, 4, 2), ((30, 31, 32), False, 99, 2), ((29, 30, 31), True, 99, 2)],
    ids=["limit", "limit with EOS", "context", "context with EOS"],
)
def test_rows_with_a_text_that_is_too_long_can_be_left_out(
    given: Given, words: tuple[int, ...], by_policy: bool, limit: int, kept: int
) -> None:
    """A prompt of a word, and responses of so many: either of them may be the long one."""
    assert CONTEXT == 32
    rows = [("w5 ", *texts) for count in words for texts in (("w2 " * count, "w3"), ("w3", "w4 " * count))]
    given.write(a=rows, held=[*pairs(9), ("w9 ", "w3", "w2 " * max(words))])
    settings = {"train": "a.jsonl", "evaluation": "held.jsonl", "max_tokens": limit}
    found = given.made(by_policy=by_policy, too_long="drop", **settings)
    assert len(given.stored()) == 2 * kept
    assert found["sources"] == [
        told("a", "train", 6, 2 * kept, too_long=2),
        told("held", "eval", 2, 1, too_long=1),
    ]
    section = "preferences" if by_policy else "dataset"
    with pytest.raises(InputError, match=rf"row 5 has a text of \d+ tokens, .* {section}.too_long=drop \(1 more row"):
        given.made(by_policy=by_policy, **settings)


def test_a_prompt_whose_rows_are_all_too_long_is_not_trained_on(given: Given) -> None:
    given.write(a=[("w5 ", "w2 w3 w4", "w6"), *pairs(6)], held=[*pairs(5, 7)])
    settings = {"train": "a.jsonl", "evaluation": "held.jsonl", "max_tokens": 3}
    assert given.made(too_long="drop", **settings)["held_out_trained"] == 0
    assert given.made(train="a.jsonl", evaluation="held.jsonl")["held_out_trained"] == 1


WEIGHED = [{"path": "a.jsonl", "weight": 1}, {"path": "b.jsonl", "weight": 1}]
LONG = {"too_long": "drop", "max_tokens": 1}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"train": BOTH, "evaluation": "all.jsonl", "duplicates": "drop"},
            r"^no preferences are left to train on .a.jsonl: 3 rows, 3 held out; b.jsonl: 2 rows, 2 held out.: see dup",
        ),
        (
            {"train": "a.jsonl", "evaluation": "held.jsonl", **LONG},
            r"^no preferences are left to train on .a.jsonl: 3 rows, 3 too long.: see duplicates, too_long and max_tok",
        ),
        (
            {"train": "a.jsonl", "evaluation": "long.jsonl", "too_long": "drop", "max_tokens": 2},
            r"^no preferences are left to measure accuracy on .long.jsonl: 1 rows, 1 too long.: see duplicates, too_l",
        ),
        (
            {"train": "many.jsonl", "evaluation_fraction": 0.3, "duplicates": "drop", **LONG},
            r"^no preferences are left to train on .many.jsonl: 77 rows, 39 repeated, 38 too long.: see",
        ),
        (
            {"train": BOTH, "evaluation_fraction": 1e-9, "duplicates": "drop"},
            r"^a.jsonl and 1 more: evaluation_fraction=1e-09 holds out none of its 4 rows .4 prompts.: raise it, or",
        ),
        (
            {"train": WEIGHED, "evaluation": "held.jsonl", "duplicates": "drop"},
            r"^a source with a weight has no rows left .b.jsonl: 2 rows, 1 held out, 1 repeated.: remove it from data",
        ),
        (
            {"train": [WEIGHED[0], {"path": "b.jsonl", "weight": 1e-9}], "evaluation": "far.jsonl"},
            r"^b.jsonl has so little weight that no epoch would draw from it: raise its weight, or remove it from data",
        ),
    ],
)
def test_where_nothing_is_left_all_reasons_are_said(given: Given, settings: dict[str, Any], message: str) -> None:
    given.write(
        **{"a": pairs(5, 6, 7), "b": pairs(7, 8), "all": pairs(5, 6, 7, 8), "held": pairs(8, 9), "far": pairs(9)},
        **{"long": [("w9 ", "w2 w3", "w4")], "many": [*pairs(*range(2, 40)), *pairs(*range(2, 40)), *pairs(2)]},
    )
    for work in (prepare_preferences, check_preferences):
        with pytest.raises(InputError, match=message):
            work(given.job(**settings))


def test_the_key_of_the_sources_is_named_as_the_spec_of_dpo_has_it(given: Given) -> None:
    given.write(a=pairs(5), b=pairs(9), held=pairs(9))
    with pytest.raises(InputError, match=r"b.jsonl: 1 rows, 1 held out.: remove it from preferences.train$"):
        check_preferences(given.job(by_policy=True, train=WEIGHED, evaluation="held.jsonl", duplicates="drop"))
