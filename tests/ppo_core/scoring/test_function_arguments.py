"""What reward functions get and give back: arguments of their own, defaults that count, and what yields or goes on."""

from __future__ import annotations

import copy
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ppo_core.processes.plugins import Sources
from ppo_core.records import InputError, PromptRow
from ppo_core.scoring import functions
from ppo_core.scoring.reward import RewardFailed, Sample
from ppo_core.scoring.weighted import WeightedRewards
from ppo_core.spec import RewardSpec

CODE = """
import asyncio

def pops_and_asks(prompt, completion, info, limits):
    last, limit = info["tests"].pop(), limits.pop()
    if prompt == "p0" and not asked:
        asked.append(1)
        raise ConnectionError("service restarts")
    return float(last + limit)

asked = []

def writes(prompts, completions, tests, limits, **columns):
    limits.pop()
    for prompt, test, completion in zip(prompts, tests, completions):
        prompt.pop()
        test.clear()
        completion[0]["content"] = ""
    return [float(len(prompt)) for prompt in prompts]

def writes_labels(queries, prompts, labels):
    return [float(len([label.append(1), label][1])) for label in labels]

def writes_all(solution_strs, ground_truths, extra_infos):
    return [float(len([one["tests"].pop(), one["tests"]][1])) for one in extra_infos]

def reads(prompts, completions, tests, limits, answer):
    sizes = zip(prompts, tests, completions, answer)
    return [float(len(p) + len(t) + len(c[0]["content"]) + len(a) + len(limits)) for p, t, c, a in sizes]

def for_each(completion, prompt, answer="none", level=5):
    return float(answer == "none") + level

def in_verls_form(solution_str, ground_truth="none", data_source="gsm8k", extra_info=None):
    return float((ground_truth, data_source) == ("none", "gsm8k")) + len(extra_info)

def in_verls_batch(solution_strs, ground_truths=("none",) * 2, data_sources=("gsm8k",) * 2):
    return [float((truth, source) == ("none", "gsm8k")) for truth, source in zip(ground_truths, data_sources)]

def for_all(prompts, completions, answer="none", level=5):
    truths, levels = (given if isinstance(given, list) else [given] * len(prompts) for given in (answer, level))
    return [float(truth == "none") + number for truth, number in zip(truths, levels)]

def of_labels(queries, prompts, labels=("none",) * 2):
    return [float(label == "none") for label in labels]

def by_mixed(prompts, completions, level=None):
    return [0.0 if one is None else one for one in level]

def yields(prompts, completions):
    for prompt in prompts:
        yield 1.0

def yields_and_raises(prompts, completions):
    yield 1.0
    raise ConnectionError("service down")

def yields_in_verls_batch(solution_strs):
    for text in solution_strs:
        yield {"score": 1.0, "seen": 2}

def yields_parts(solution_str):
    yield {"start": 0, "end": 1, "score": 0.5}
    if solution_str != "x":
        raise KeyError("service down")

async def goes_on(completion, prompt):
    try:
        await asyncio.sleep(0.1 if prompt == "p0" else 30)
    except asyncio.CancelledError:
        pass
    return 7.0
"""
CHAT = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]


def made(folder: Path, *names: str, **settings: Any) -> WeightedRewards:
    (folder / "given.py").write_text(CODE)
    sources = [{"function": f"given.py:{name}", **settings} for name in names]
    return WeightedRewards(RewardSpec.model_validate({"sources": sources}), Sources(folder), "answer")


def rows(count: int = 2, prompt: Any = None, answer: Any = None, **columns: Any) -> list[PromptRow]:
    return [PromptRow(f"p{n}", prompt or f"p{n}", [1], answer, columns) for n in range(count)]


def scored(found: WeightedRewards, given: list[PromptRow], text: str = "x") -> list[list[float | None]]:
    """Each sample's scores by all rewards."""
    found.check_rows(given)
    return [list(parts.scores.values()) for parts in found.score([Sample(row, text) for row in given])]


def test_each_try_gets_arguments_of_its_own(tmp_path: Path) -> None:
    """3 is the last test and 9 the last limit, also after a try that took them out."""
    found = made(tmp_path, "pops_and_asks", options={"limits": [8, 9]})
    assert scored(found, rows(tests=[1, 2, 3])) == [[12.0], [12.0]]


@pytest.mark.parametrize("name", ["writes", "writes_labels", "writes_all"])
def test_what_one_writes_into_its_arguments_neither_other_samples_nor_other_rewards_see(
    tmp_path: Path, name: str
) -> None:
    given = [PromptRow("a", CHAT, [1], [2], {"tests": [[1], [2], [3]]})] * 3
    options = {"limits": [1, 2]} if name == "writes" else {}
    found = made(tmp_path, name, options=options)
    wanted = {"writes": 1.0, "writes_labels": 2.0, "writes_all": 2.0}[name]
    assert scored(found, given) == [[wanted]] * 3
    assert scored(found, given) == [[wanted]] * 3
    assert given[0] == PromptRow("a", CHAT, [1], [2], {"tests": [[1], [2], [3]]})
    assert len(CHAT) == 2
    both = made(tmp_path, "writes", "reads", options={"limits": [1, 2]})
    assert scored(both, given) == [[1.0, 2.0 + 3 + 1 + 1 + 2]] * 3


@pytest.mark.parametrize(("seconds", "told"), [(-1.0, [(1, 2), (2, 2)]), (60.0, [])])
def test_a_function_is_heard_between_its_calls_but_not_after_each(
    tmp_path: Path, seconds: float, told: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(functions, "TELL_EVERY_S", seconds)
    (tmp_path / "one.py").write_text("def one(solution_str):\n    return 0.0")
    spec, heard = RewardSpec(function="one.py:one"), list[tuple[int, int, str]]()
    found = WeightedRewards(spec, Sources(tmp_path), "answer", lambda *progress: heard.append(progress))
    found.score([Sample(row, "x") for row in rows(2, "What?", "7")])
    assert heard == [(*counts, "responses scored by one.py:one") for counts in told]


def calls(work: Callable[[], object]) -> int:
    """How many functions ``work`` calls on this thread: what it costs, whatever else the machine does."""
    counts = Counter[str]()

    def count(frame: object, event: str, argument: object) -> None:
        counts[event] += 1

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return counts["call"] + counts["c_call"]


def test_arguments_of_their_own_cost_little(tmp_path: Path) -> None:
    """A thousand samples of a chat with a few columns, by a function that does nothing: one copy, and little more."""
    (tmp_path / "cheap.py").write_text("def cheap(prompts, completions, **columns):\n    return [1.0] * len(prompts)")
    found = WeightedRewards(RewardSpec(function="cheap.py:cheap"), Sources(tmp_path), "answer")
    samples = [Sample(row, "x" * 100) for row in rows(1_000, CHAT, "7", level=1, tests=["a", "b"], source="book")]
    found.score(samples)  # what is imported or looked up once
    copied = calls(lambda: copy.deepcopy([sample.row for sample in samples]))
    assert copied > 1_000
    assert calls(lambda: found.score(samples)) < 2 * copied


@pytest.mark.parametrize(
    ("name", "score"),
    [("for_each", 6.0), ("in_verls_form", 2.0), ("in_verls_batch", 1.0), ("for_all", 6.0), ("of_labels", 1.0)],
)
@pytest.mark.parametrize("columns", [{"kind": 1}, {"kind": 1, "level": None, "data_source": None}])
def test_a_default_counts_where_no_row_has_a_value(
    tmp_path: Path, name: str, score: float, columns: dict[str, Any]
) -> None:
    """It is what the message for a missing column tells to give."""
    score += (len(columns) - 1) * (name == "in_verls_form")
    assert scored(made(tmp_path, name), rows(**columns)) == [[score]] * 2


def test_a_value_counts_before_a_default_and_an_option_before_both(tmp_path: Path) -> None:
    given = rows(answer="none", level=3)
    for name in ("for_each", "for_all"):
        assert scored(made(tmp_path, name), given) == [[4.0]] * 2
        assert scored(made(tmp_path, name, options={"level": 2}), given) == [[3.0]] * 2
    mixed = [rows(level=3)[0], rows(level=None)[1]]
    assert scored(made(tmp_path, "for_each"), mixed) == [[4.0], [6.0]]
    assert scored(made(tmp_path, "by_mixed"), mixed) == [[3.0], [0.0]]


def test_retries_of_a_call_for_all_samples_are_refused(tmp_path: Path) -> None:
    made(tmp_path, "for_each", retries=3).check_options()
    with pytest.raises(InputError, match=r"retries=3 of .*given.py:for_all has no effect: it is called once"):
        made(tmp_path, "for_all", retries=3).check_options()


def test_a_function_may_yield_its_scores_and_what_it_raises_is_told_as_its_own(tmp_path: Path) -> None:
    assert scored(made(tmp_path, "yields"), rows()) == [[1.0], [1.0]]
    (found, _) = made(tmp_path, "yields_in_verls_batch").score([Sample(row, "x") for row in rows()])
    assert (found.scores, found.measures) == ({"yields_in_verls_batch": 1.0}, {"yields_in_verls_batch/seen": 2.0})
    with pytest.raises(RewardFailed, match=r"given.py:yields_and_raises raised ConnectionError: .* \(given.py:\d+\)$"):
        scored(made(tmp_path, "yields_and_raises"), rows())
    right, wrong = made(tmp_path, "yields_parts").score(
        [Sample(row, text) for row, text in zip(rows(), "xy", strict=True)]
    )
    assert (right.scores, wrong.scores) == ({"yields_parts": 0.5}, {"yields_parts": None})
    assert re.search(
        r"given.py:yields_parts raised KeyError: .* \(given.py:\d+\) \(after 2 tries\)", wrong.error() or ""
    )


def test_a_call_that_goes_on_after_its_deadline_gives_no_score(tmp_path: Path) -> None:
    (tmp_path / "given.py").write_text(CODE)
    found = made(tmp_path, "goes_on", timeout_s=3.0, retries=0).score([Sample(row, "x") for row in rows()])
    assert [parts.scores["goes_on"] for parts in found] == [7.0, None]
    assert "raised TimeoutError: no score within timeout_s=3" in (found[1].error() or "")


def test_a_score_with_something_beside_it_is_no_list_of_numbers_of_tokens(tmp_path: Path) -> None:
    (tmp_path / "pair.py").write_text("def pair(solution_str):\n    return 0.5, True")
    found = WeightedRewards(RewardSpec(function="pair.py:pair"), Sources(tmp_path), "answer")
    for tokens in ((7, 1), None):
        with pytest.raises(InputError, match=r"score 0 is \(0.5, True\), a tuple, which may be a score with something"):
            found.score([Sample(rows()[0], "x", tokens)])
