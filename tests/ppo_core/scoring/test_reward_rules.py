"""Rewards without user code: what they count as right, what rows they refuse, and how a spec names them."""

from __future__ import annotations

import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppo_core.processes.plugins import Sources
from ppo_core.records import InputError, PromptRow
from ppo_core.scoring import rules
from ppo_core.scoring.reward import Sample
from ppo_core.scoring.rules import last_number
from ppo_core.scoring.weighted import WeightedRewards
from ppo_core.spec import RewardSpec

NAMED = {"type": "object", "properties": {"name": {"$ref": "#/$defs/name"}}, "required": ["name"]} | {
    "$defs": {"name": {"type": "string"}}
}
NESTED = {"type": "array", "items": {"$ref": "#"}}
DATA = {"const": {"$ref": "http://foo"}}
BY_ID = {"$defs": {"s": {"$id": "http://x/y", "type": "string"}}, "items": {"$ref": "http://x/y"}}


def row(answer: Any) -> PromptRow:
    return PromptRow("a", "What?", [1], answer, {})


def rewards(*sources: dict[str, Any], folder: Path = Path()) -> WeightedRewards:
    return WeightedRewards(RewardSpec.model_validate({"sources": sources}), Sources(folder), "answer")


@pytest.mark.parametrize(
    ("source", "answer", "response", "score"),
    [
        ({"kind": "exact_match"}, "Paris", " Paris\n", 1.0),
        ({"kind": "exact_match"}, "Paris", "paris", 0.0),
        ({"kind": "exact_match", "ignore_case": True}, "Paris", "paris", 1.0),
        ({"kind": "exact_match"}, 7, "7", 1.0),
        ({"kind": "number"}, "7", "3 + 4 = 7", 1.0),
        ({"kind": "number"}, 7, "the answer is 7.0.", 1.0),
        ({"kind": "number"}, "1,260", "1260", 1.0),
        ({"kind": "number"}, "7", "7, or 8", 0.0),
        ({"kind": "number"}, "-7", "-7", 1.0),
        ({"kind": "number"}, "7", "seven", 0.0),
        ({"kind": "number"}, "5", "pages 3-5", 1.0),
        ({"kind": "number"}, "7", "in room B-7", 1.0),
        ({"kind": "number"}, "-5", "x=-5", 1.0),
        ({"kind": "number"}, "-5", "x = \u22125", 1.0),
        ({"kind": "number"}, "\u22121,200", "-1200", 1.0),
        ({"kind": "number"}, "5", "x = \u22125", 0.0),
        ({"kind": "number"}, "5", "pages 3\u22125", 1.0),
        ({"kind": "number"}, "0.005", "about 5e\u22123", 1.0),
        ({"kind": "number"}, "0.005", "about 5e-3", 1.0),
        ({"kind": "number"}, "5", "1,2345", 0.0),
        ({"kind": "number", "tolerance": 0.1}, "0.3", "0.4", 1.0),  # 0.4 - 0.3 > 0.1 in binary floats
        ({"kind": "number", "tolerance": 0.1}, "0.3", "0.41", 0.0),
        ({"kind": "number", "pattern": "#### (.*)"}, "7", "#### 6 no: #### 7 (I had 9 before)", 0.0),
        ({"kind": "number", "pattern": "#### ([0-9]+)"}, "7", "#### 6 no: #### 7 (I had 9 before)", 1.0),
        ({"kind": "number", "pattern": "####.*"}, "7", "8 #### 7", 1.0),
        ({"kind": "number", "pattern": "#### (.*)"}, "7", "7", 0.0),
        ({"kind": "number", "pattern": "a|#### (.*)"}, "7", "a", 0.0),
        ({"kind": "regex", "pattern": "^<think>.*</think>"}, None, "<think>x</think>4", 1.0),
        ({"kind": "regex", "pattern": "^<think>.*</think>"}, None, "4", 0.0),
        ({"kind": "length", "max": 3}, None, "a b c", 1.0),
        ({"kind": "length", "max": 3}, None, "a b c d", 0.0),
        ({"kind": "length", "min": 4, "max": 6, "slope": 4, "unit": "characters"}, None, "abcde", 1.0),
        ({"kind": "length", "min": 4, "max": 6, "slope": 4, "unit": "characters"}, None, "a", 0.25),
        ({"kind": "length", "min": 4, "max": 6, "slope": 4, "unit": "characters"}, None, "abcdefgh", 0.5),
        ({"kind": "length", "min": 4, "max": 6, "slope": 4, "unit": "characters"}, None, "", 0.0),
        ({"kind": "length", "min": 4, "max": 6, "slope": 4, "unit": "characters"}, None, "x" * 99, 0.0),
        ({"kind": "length", "target": 2, "slope": 2}, None, "a", 0.5),
        ({"kind": "format", "pattern": "[0-9]+"}, None, "12", 1.0),
        ({"kind": "format", "pattern": "[0-9]+"}, None, "12 ", 0.0),
        ({"kind": "format", "pattern": "a|ab"}, None, "ab", 1.0),
        ({"kind": "format", "pattern": ".*"}, None, "a\n", 0.0),
        ({"kind": "format", "tags": ["think", "answer"]}, None, "<think>a\nb</think>\n<answer>4</answer>\n", 1.0),
        ({"kind": "format", "tags": ["think", "answer"]}, None, "<think></think><answer></answer>", 1.0),
        ({"kind": "format", "tags": ["think", "answer"]}, None, "<answer>4</answer><think>a</think>", 0.0),
        ({"kind": "format", "tags": ["think", "answer"]}, None, "so <think>a</think><answer>4</answer>", 0.0),
        ({"kind": "format", "tags": ["think", "answer"]}, None, "<think>a</think>so<answer>4</answer>", 0.0),
        ({"kind": "format", "tags": ["think", "answer"]}, None, "<think>a</think><answer>4", 0.0),
        ({"kind": "format", "tags": ["think"]}, None, "<think>a</think><think>b</think>", 0.0),
        ({"kind": "format", "tags": ["think"]}, None, "<think>a<think>b</think>", 0.0),
        ({"kind": "format", "tags": ["think"]}, None, "<think>" + "<" * 50_000, 0.0),
        ({"kind": "format", "tags": ["a"], "pattern": ".*4.*"}, None, "<a>4</a>", 1.0),
        ({"kind": "format", "tags": ["a"], "pattern": ".*4.*"}, None, "<a>5</a>", 0.0),
        ({"kind": "json_schema", "json_schema": NAMED}, None, ' {"name": "x", "size": 1e3}\n', 1.0),
        ({"kind": "json_schema", "json_schema": NAMED}, None, '{"name": 1}', 0.0),
        ({"kind": "json_schema", "json_schema": NAMED}, None, '{"size": 1}', 0.0),
        ({"kind": "json_schema", "json_schema": NAMED}, None, "[]", 0.0),
        ({"kind": "json_schema", "json_schema": NAMED, "no_json": -1}, None, "[]", 0.0),
        ({"kind": "json_schema", "json_schema": NAMED, "no_json": -1}, None, '{"name": "x"', -1.0),
        ({"kind": "json_schema", "json_schema": NAMED, "no_json": -1}, None, "", -1.0),
        ({"kind": "json_schema", "json_schema": {}, "no_json": -1}, None, "NaN", -1.0),
        ({"kind": "json_schema", "json_schema": {}, "no_json": -1}, None, "9" * 5000, -1.0),
        ({"kind": "json_schema", "json_schema": {}, "no_json": -1}, None, "[" * 100_000, -1.0),
        ({"kind": "json_schema", "json_schema": NESTED}, None, "[[], [[]]]", 1.0),
        ({"kind": "json_schema", "json_schema": NESTED}, None, "[[], [4]]", 0.0),
        ({"kind": "json_schema", "json_schema": NESTED}, None, "[" * 400 + "]" * 400, None),
        ({"kind": "json_schema", "json_schema": DATA}, None, '{"$ref": "http://foo"}', 1.0),
        ({"kind": "json_schema", "json_schema": DATA}, None, "4", 0.0),
        ({"kind": "json_schema", "json_schema": BY_ID}, None, '["a"]', 1.0),
        ({"kind": "json_schema", "json_schema": BY_ID}, None, "[4]", 0.0),
        ({"kind": "json_schema", "json_schema": {"multipleOf": 0.1}, "no_json": -1}, None, "1e999", None),
        ({"kind": "json_schema", "json_schema": {"multipleOf": 0.1}, "no_json": -1}, None, "1" + "0" * 400, None),
        ({"kind": "json_schema", "json_schema": NAMED, "pattern": "<a>(.*)</a>"}, None, '<a>{"name": "x"}</a>', 1.0),
        ({"kind": "json_schema", "json_schema": {}, "pattern": "<a>(.*)</a>", "no_json": -1}, None, "4", -1.0),
    ],
)
def test_what_is_right(source: dict[str, Any], answer: Any, response: str, score: float | None) -> None:
    (kind,) = {source["kind"]}
    found = rewards(source)
    found.check_rows([row(answer)])
    (parts,) = found.score([Sample(row(answer), response)])
    assert parts.scores == {kind: score}


ENDLESS = "(a+)+$"
"""On many a and a b it tries every way of dividing them: 2**n."""


@pytest.mark.parametrize(
    ("source", "which"),
    [
        ({"kind": "regex", "pattern": ENDLESS}, r"the pattern '\(a\+\)\+\$'"),
        ({"kind": "format", "pattern": f'"{ENDLESS}'}, r"the pattern '\"\(a\+\)\+\$'"),
        ({"kind": "number", "pattern": ENDLESS}, r"the pattern '\(a\+\)\+\$'"),
        ({"kind": "json_schema", "json_schema": {"pattern": ENDLESS}}, "a pattern or schema"),
        ({"kind": "unit_tests", "pattern": ENDLESS}, r"the pattern '\(a\+\)\+\$'"),
    ],
)
def test_a_pattern_without_end_costs_its_sample_its_score(source: dict[str, Any], which: str) -> None:
    spec = RewardSpec.model_validate({"sources": [{**source, "pattern_timeout_s": 0.2}]})
    found = WeightedRewards(spec, Sources(Path(), run_generated_code=True), "answer")
    rows = [PromptRow("a", "What?", [1], "1", {"tests": "assert True"})] * 2
    endless, other = found.score([Sample(rows[0], f'"{"a" * 60}b"'), Sample(rows[1], '"b"')])
    (kind,) = endless.scores
    assert endless.scores[kind] is None
    assert other.scores[kind] is not None
    assert re.search(
        rf"not scored by {kind}: {which} of the reward {kind} took more than pattern_timeout_s=0.2 \(seconds of "
        r"processor time\) on its 63 characters: write it without repeats within repeats, such as \(a\+\)\+, or raise",
        endless.error() or "",
    )


@pytest.mark.parametrize(
    "source",
    [
        {"kind": "regex", "pattern": "a"},
        {"kind": "format", "pattern": "a"},
        {"kind": "number", "pattern": "a"},
        {"kind": "json_schema", "json_schema": {}},
        {"kind": "unit_tests", "pattern": "a"},
    ],
)
@pytest.mark.parametrize(("seconds", "told"), [(-1.0, [(1, 3), (2, 3), (3, 3)]), (60.0, [])])
def test_rules_are_heard_while_they_work_but_not_at_each_sample(
    source: dict[str, Any], seconds: float, told: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "TELL_EVERY_S", seconds)
    spec, heard = RewardSpec.model_validate({"sources": [source]}), list[tuple[int, int, str]]()
    sources = Sources(Path(), run_generated_code=True)
    found = WeightedRewards(spec, sources, "answer", lambda *progress: heard.append(progress))
    found.score([Sample(PromptRow("a", "What?", [1], "1", {"tests": "assert True"}), "b")] * 3)
    assert [one[:2] for one in heard if one[2] == f"responses read by {source['kind']}"] == told


def test_a_sum_that_fits_into_no_float32_is_refused() -> None:
    huge = {"kind": "json_schema", "json_schema": {}, "no_json": 1e308, "name": "huge", "weight": 2.0}
    found = rewards(huge, {"kind": "regex", "pattern": "a"})
    (parts,) = found.score([Sample(row(None), "a")])
    with pytest.raises(InputError, match=r"of float32, .*: the reward huge gave 1e\+308 and has weight=2: lower that"):
        found.total(parts.scores)
    assert found.total({"huge": 1.0, "regex": 1.0}) == 3.0
    with pytest.raises(InputError, match=r"the reward huge gave -1e\+308"):
        found.total({"huge": -1e308, "regex": None})
    with pytest.raises(InputError, match=r"is beyond 3e\+38, .*: the reward huge gave 1e\+39"):
        found.total({"huge": 1e39, "regex": 1.0})


@pytest.mark.parametrize("weights", [(0.7, 0.2, 0.1), (0.6, 0.3, 0.1), (0.1, 0.7, 0.2)])
def test_parts_that_make_one_whole_make_exactly_one(weights: tuple[float, ...]) -> None:
    """Summed one after the other they can make less: then no right answer would reach evaluation.pass_score."""
    sources = [
        {"kind": "regex", "pattern": "a", "name": f"r{number}", "weight": weight}
        for number, weight in enumerate(weights)
    ]
    found = rewards(*sources)
    (parts,) = found.score([Sample(row(None), "a")])
    assert found.total(parts.scores) == 1.0


def test_tokens_are_those_that_were_sampled() -> None:
    found = rewards({"kind": "length", "min": 2, "max": 2})
    parts = found.score([Sample(row(None), "a b c", (7, 2)), Sample(row(None), "a b", (7, 7, 2))])
    assert [part.scores["length"] for part in parts] == [1.0, 0.0]


@given(number=st.decimals(allow_nan=False, allow_infinity=False, places=3, min_value=-(10**9), max_value=10**9))
def test_any_number_is_read_exactly_in_both_ways_of_writing(number: Decimal) -> None:
    assert last_number(f"first 12, then {number}") == last_number(f"= {number:,}.") == number


@pytest.mark.parametrize("text", ["-$1,250.50", "owes \u2212€1250.5", "-1250.5", "a loss of (-£1,250.50)"])
def test_a_minus_may_stand_before_a_currency(text: str) -> None:
    assert last_number(text) == Decimal("-1250.5")
    assert last_number("$5") == last_number("5-$5") == 5


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *((r"\boxed{10,\!000}", 10_000), ("1{,}234{,}567", 1_234_567), (r"$1\,234$", 1234)),
        *(("_-5_", -5), ("\u20135", -5), ("3\u20135", 5), ("a, 1,23", 23)),
    ],
)
def test_numbers_are_read_as_latex_and_markdown_have_them(text: str, number: int) -> None:
    assert last_number(text) == number


@pytest.mark.parametrize(
    ("kind", "answer", "message"),
    [
        (
            "exact_match",
            None,
            r"the reward exact_match compares with the column 'answer', which row 2 \('What\?'\) lacks",
        ),
        (
            "exact_match",
            ["Paris"],
            r"answer of row 2 \(\['Paris'\]\) is neither a text nor a whole number: write it as the response should be",
        ),
        ("exact_match", True, r"the answer of row 2 \(True\) is neither a text nor a whole number"),
        ("exact_match", 0.00001, r"\(1e-05\) is neither a text nor a whole number: .* in quotes, or use the reward"),
        ("number", None, "the reward number compares with the column 'answer', which row 2"),
        ("number", "seven", r"the answer of row 2 \('seven'\) has none: correct it, or use the reward exact_match"),
    ],
)
def test_a_row_that_cannot_be_judged_is_refused_before_sampling(kind: str, answer: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        rewards({"kind": kind}).check_rows([row("1"), row(answer)])


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (
            {"properties": {"a": {"$id": "http://x/y", "$ref": "#/$defs/s"}}, "$defs": {"s": {}}},
            r"its \$ref '#/\$defs/s' below the \$id 'http://x/y', from which it counts, .* or leave the \$id out",
        ),
        ({"parts": {"x": {"$ref": "#/no"}}, "$ref": "#/parts/x"}, r"its \$ref '#/no' cannot be resolved: write"),
        ({"title": "a", "$ref": "#/title"}, r"its \$ref '#/title' cannot be resolved"),
        ({"minLength": 5, "$ref": "#/minLength/x"}, r"its \$ref '#/minLength/x' cannot be resolved"),
    ],
)
def test_a_reference_that_leads_to_no_schema_is_refused_wherever_it_is(schema: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rewards({"kind": "json_schema", "json_schema": schema})


@pytest.mark.parametrize(
    "schema", [{"$ref": "#"}, {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}]
)
def test_a_schema_that_refers_to_itself_without_end_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"json_schema refers to itself without end, .* below `properties` or `items`"):
        rewards({"kind": "json_schema", "json_schema": schema})


def test_kinds_are_added_up_with_their_weights(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def short(completions, limit):\n    return [-len(c) / limit for c in completions]"
    )
    found = rewards(
        {"kind": "number", "weight": 2.0},
        {"kind": "regex", "pattern": "=", "weight": 0.5, "name": "shows_work"},
        {"function": "mine.py:short", "options": {"limit": 4}},
        folder=tmp_path,
    )
    (parts,) = found.score([Sample(row("7"), "=  7")])
    assert parts.scores == {"number": 1.0, "shows_work": 1.0, "short": -1.0}
    assert found.total(parts.scores) == 1.5


def test_the_short_form_and_the_list_are_one() -> None:
    short = RewardSpec(function={"a.py:f": 1.0, "a.py:g": 0.2}, options={"k": 3})
    listed = [{"function": "a.py:f", "options": {"k": 3}}, {"function": "a.py:g", "weight": 0.2, "options": {"k": 3}}]
    assert short.rewards == RewardSpec.model_validate({"sources": listed}).rewards
    assert RewardSpec.model_validate(short.model_dump(mode="json")) == short
    assert short.code == ("a.py:f", "a.py:g")
