"""Reward functions as users write them: how they are found, called, and refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ppo_core.data.rows import read_rows
from ppo_core.processes.plugins import Sources, load_function, source_digest
from ppo_core.records import InputError, PromptRow, RolloutRow
from ppo_core.scoring.reward import RewardFailed, Sample
from ppo_core.scoring.signatures import VERL_BATCH, scores_in
from ppo_core.scoring.spans import checked_scores
from ppo_core.scoring.weighted import WeightedRewards
from ppo_core.spec import RewardSpec

CHAT = [{"role": "user", "content": "5+5="}]
ROWS = [
    PromptRow("a", "7+5=", [1], "2", {"level": 1}),
    PromptRow("b", "1+1=", [1], "3", {"level": None, "completions": "a column by the name of an argument"}),
]
THREE = [Sample(ROWS[0], "2", (7, 8, 1))] * 3
CODE = """
from __future__ import annotations
from dataclasses import dataclass

seen = []

@dataclass
class Point:
    x: int = 0

def correct(completions, answer, **columns):
    seen.append(columns)
    return [float(c == a) for c, a in zip(completions, answer)]

async def slow(prompts, completions, level=None, factor=1.0):
    return [None if v is None else v * factor for v in level]

def length(prompts, completions):
    return [len(c) for c in completions]

def chat(prompts, completions, **columns):
    return [float(c[0]["content"] == "0" and c[0]["role"] == "assistant") for c in completions]

def needs(prompts, completions, *, level, source="book"):
    return [0.0] * len(prompts)

def broken(completions, **columns):
    raise LookupError("no server")

limit = 3
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "scores.py").write_text(CODE)
    return tmp_path


def functions(folder: Path, weights: dict[str, float], column: str = "answer", **options: Any) -> WeightedRewards:
    spec = RewardSpec(function={f"scores.py:{name}": weight for name, weight in weights.items()}, options=options)
    return WeightedRewards(spec, Sources(folder), column)


def samples(*responses: str, rows: list[PromptRow] = ROWS) -> list[Sample]:
    return [Sample(row, text) for row, text in zip(rows, responses, strict=True)]


def test_columns_options_and_weights(folder: Path) -> None:
    rewards = functions(folder, {"correct": 2.0, "slow": 0.5, "length": 1.0}, factor=3.0)
    parts = rewards.score(samples("2", "22"))
    assert [part.scores for part in parts] == [
        {"correct": 1.0, "slow": 3.0, "length": 1.0},
        {"correct": 0.0, "slow": None, "length": 2.0},
    ]
    assert [rewards.total(part.scores) for part in parts] == [4.5, None]
    (columns,) = load_function("scores.py:correct", Sources(folder)).__globals__["seen"]
    assert columns == {"prompts": ["7+5=", "1+1="], "level": [1, None], "factor": 3.0}


def test_a_reward_of_weight_0_is_measured_and_counts_for_nothing(folder: Path) -> None:
    rewards = functions(folder, {"correct": 2.0, "slow": 0.0})
    parts = rewards.score(samples("2", "22"))
    assert [part.scores["slow"] for part in parts] == [1.0, None]
    assert [rewards.total(part.scores) for part in parts] == [2.0, 0.0]


def test_chats_come_with_completions_that_are_messages(folder: Path) -> None:
    row = PromptRow("a", CHAT, [1], None, {})
    (parts,) = functions(folder, {"chat": 1.0}).score(samples("0", rows=[row]))
    assert parts.scores == {"chat": 1.0}


def test_rows_of_scores_keep_none_and_say_who_gave_it(folder: Path) -> None:
    rollouts = [
        RolloutRow("a", 0, [1], [2], "2", [0.0], "stop"), RolloutRow("b", 1, [1], [2], "2", [0.0], "length"),
    ]  # fmt: skip
    scored = functions(folder, {"correct": 1.0, "slow": 1.0}).score_rollouts(ROWS, rollouts)
    assert [(row.prompt_id, row.sample_index, row.score, row.truncated, row.error) for row in scored] == [
        ("a", 0, 2.0, False, None),
        ("b", 1, None, True, "not scored by slow"),
    ]


def test_a_required_column_must_be_there_in_every_row(folder: Path) -> None:
    functions(folder, {"correct": 1.0, "slow": 1.0}).check_rows(ROWS)
    functions(folder, {"needs": 1.0}, level=3).check_rows(ROWS)
    with pytest.raises(InputError, match=r"scores.py:needs needs the column 'level', which row 2 \('1\+1='\) lacks"):
        functions(folder, {"needs": 1.0}).check_rows(ROWS)
    with pytest.raises(InputError, match=r"needs the column 'answer', which row 1 \('7\+5='\) lacks: add it"):
        functions(folder, {"correct": 1.0}, column="solution").check_rows(ROWS)


@pytest.mark.parametrize("place", ["function", "module"])
def test_a_program_that_ends_itself_ends_no_engine(tmp_path: Path, place: str) -> None:
    inside = "    sys.exit('no key')" if place == "function" else "    pass\nsys.exit('no key')"
    (tmp_path / "ends.py").write_text(f"import sys\ndef score(completions):\n{inside}\n")
    spec = RewardSpec(function="ends.py:score")
    with pytest.raises((RewardFailed, InputError), match=r"ends.py.* SystemExit: no key \(ends.py:\d\)$"):
        WeightedRewards(spec, Sources(tmp_path), "answer").score(samples("2", rows=ROWS[:1]))
    (tmp_path / "rows.py").write_text("import sys\ndef rows():\n    sys.exit('no key')\n")
    with pytest.raises(InputError, match=r"rows.py:rows gave no rows: it raised SystemExit: no key \(rows.py:3\)"):
        read_rows("rows.py:rows", Sources(tmp_path))


def test_a_place_is_of_the_users_files_and_never_of_ours(tmp_path: Path) -> None:
    (tmp_path / "number.py").write_text("from functools import partial\n\nrows = partial(int, 'a')\n")
    with pytest.raises(InputError, match=r"it raised ValueError: invalid literal for int\(\) with base 10: 'a'$"):
        read_rows("number.py:rows", Sources(tmp_path))


def test_a_function_that_raises_may_be_tried_again(folder: Path) -> None:
    with pytest.raises(RewardFailed, match=r"scores.py:broken raised LookupError: no server"):
        functions(folder, {"broken": 1.0}).score(samples("2", "2"))


@pytest.mark.parametrize(
    "scores", [[1, 0.5, None], (True, False, 1), np.array([1.0, 2.0, 3.0], np.float32), [np.True_, np.int64(2), 0.0],
               torch.tensor([1.0, 0.0, -1.0]), (x for x in (1, 2, 3))],
)  # fmt: skip
def test_numbers_of_all_kinds_are_scores(scores: Any) -> None:
    checked = checked_scores("f", scores, THREE)
    assert [type(value) for value in checked if value is not None] == [float] * (3 - checked.count(None))


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ([1.0], r"f returned 1 scores for 2 completions: return one \(or None\) for each"),
        (0.5, "f returned float, not a list of 2 scores"),
        (None, "f returned NoneType, not a list of 2 scores"),
        ([1.0, float("nan")], "f: score 1 is nan: return a finite number, or None where there is no score"),
        ([float("-inf"), 1.0], "f: score 0 is -inf: return a finite number"),
        (["1.0", 1.0], r"f: score 0 is '1.0' \(str\): return a float, or None"),
        ([1.0, ["1.0"]], r"f: score 1 is \['1.0'\] \(list\): return a float"),
        ([1.0, 1j], r"f: score 1 is 1j \(complex\): return a float"),
        ([1.0, 10**400], r"score 1 is 1000.* \(int\): return a float"),
        ([1.0, torch.ones(2)], r"score 1 has 2 numbers, for a response of 3 tokens"),
        ({"a": 1, "b": 2}, r"f returned dict, not a list of 2 scores: return a list with one \(or None\) for each"),
        ({0: 1.0, 1: 0.0}, "f returned dict, not a list of 2 scores"),
        ({0.0, 1.0}, "f returned set, not a list of 2 scores"),
        ("10", "f returned str, not a list of 2 scores"),
        (b"10", "f returned bytes, not a list of 2 scores"),
        ([1.0, 10**5000], r"score 1 is an integer of 16610 bits \(int\): return a float"),
        ([[10**5000], 1.0], r"score 0 is a list with an integer in it that is too large .* \(list\): return a float"),
        ([[{"start": 0, "end": 10**5000, "score": 1}], 1.0], "score 0 has the span a dict with an integer in it"),
        ([1.0, np.str_("1.5")], r"score 1 is np.str_\('1.5'\) \(str_\): return a float"),
        (np.array(["1.5", "2"]), r"score 0 is np.str_\('1.5'\) \(str_\): return a float"),
    ],
)
def test_what_is_no_score_is_refused(scores: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        checked_scores("f", scores, THREE[:2])


def test_a_module_is_found_beside_the_spec(tmp_path: Path) -> None:
    (tmp_path / "user_rewards").mkdir()
    (tmp_path / "user_rewards" / "exact.py").write_text(
        "def match(completions):\n    return [1.0 for _ in completions]"
    )
    assert load_function("user_rewards.exact:match", Sources(tmp_path))(["a"]) == [1.0]


def test_files_of_the_same_name_in_two_folders_are_two(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "twin.py").write_text(f"def number():\n    return {number}")
    assert [load_function("twin.py:number", Sources(tmp_path / str(n)))() for n in (1, 2, 1)] == [1, 2, 1]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none.py:f", r"none.py:f: there is no file .*none.py: paths are relative to the spec"),
        ("scores.py:wrong", r"has no function 'wrong' \(it has: Point, broken, chat, .*slow\)"),
        ("scores.py:limit", "has no function 'limit'"),
        ("faulty.py:f", r"importing .*faulty.py failed with ZeroDivisionError: "),
        ("no_such_package.rewards:f", "importing no_such_package.rewards failed with ModuleNotFoundError.*install it"),
    ],
)
def test_what_cannot_be_imported_is_refused(folder: Path, name: str, message: str) -> None:
    (folder / "faulty.py").write_text("1 / 0")
    for _ in range(2):
        with pytest.raises(InputError, match=message):
            load_function(name, Sources(folder))


def digests_after_each_change(tmp_path: Path, name: str, changes: list[str]) -> list[str]:
    digests = []
    for number, path in enumerate(changes):
        with (tmp_path / path).open("a") as source:
            source.write(f"\nCHANGE = {number}\n")
        digests.append(source_digest(name, Sources(tmp_path)))
    return digests


def test_a_digest_follows_the_file_and_what_it_imports_from_beside_it(tmp_path: Path) -> None:
    (tmp_path / "spec").mkdir()
    sources = {
        "main_reward.py": "from first_part import one\ndef f(completions):\n    import late_part\n    return one",
        "first_part.py": "import second_part\none = 1", "second_part.py": "", "late_part.py": "",
        "unrelated.py": "def g():\n    return 1",
    }  # fmt: skip
    for name, text in sources.items():
        (tmp_path / "spec" / name).write_text(text)
    folder = tmp_path / "spec"
    start = source_digest("main_reward.py:f", Sources(folder))
    load_function("unrelated.py:g", Sources(folder))
    assert source_digest("main_reward.py:f", Sources(folder)) == start
    changes = ["main_reward.py", "first_part.py", "second_part.py", "late_part.py"]
    digests = digests_after_each_change(folder, "main_reward.py:f", changes)
    assert len({start, *digests}) == 5
    (tmp_path / "elsewhere.py").write_text("x = 1")
    assert (
        digests_after_each_change(folder, "main_reward.py:f", ["unrelated.py", "../elsewhere.py"]) == digests[-1:] * 2
    )


def test_a_digest_follows_a_package_and_not_its_neighbours(tmp_path: Path) -> None:
    package, neighbour = tmp_path / "graders", tmp_path / "neighbour"
    for folder in (package / "rules", neighbour):
        folder.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "rules" / "exact.py").write_text("from .. import words\nimport neighbour.x\ndef f(c):\n    return c")
    (package / "words.py").write_text("")
    (neighbour / "x.py").write_text("")
    name = "graders.rules.exact:f"
    changed = ["graders/words.py", "graders/__init__.py", "graders/rules/exact.py", "neighbour/x.py"]
    digests = digests_after_each_change(tmp_path, name, changed)
    assert len(set(digests)) == 3
    assert digests[2] == digests[3]


def test_a_text_is_no_list_of_scores_in_verls_form_either() -> None:
    for text in ("10", b"10"):
        assert scores_in("f", VERL_BATCH, text) is text
