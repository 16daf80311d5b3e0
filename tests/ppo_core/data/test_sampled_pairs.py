"""Preference pairs out of scored samples: against rows made by hand, and read back as DPO reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ppo_core.data.preferences import read_preferences
from ppo_core.data.sampled_pairs import SampledPairs
from ppo_core.data.tables import write_rollouts, write_scores
from ppo_core.engines.reward_models import pair_samples
from ppo_core.processes.plugins import Sources
from ppo_core.processes.protocol import Job, JobInput
from ppo_core.records import InputError, Messages, PromptRow, RolloutRow, ScoreRow
from tests.ppo_core.written_tables import write_prompts

Scored = tuple[str, float | None]
CUT = "cut "
"""How texts begin that the length limit has cut."""


def prompts(names: dict[str, str | Messages]) -> list[PromptRow]:
    """A reward's other columns too, of which one has a name that means something in preferences."""
    return [PromptRow(name, prompt, [5], "7", {"responses": ["a", "b"]}) for name, prompt in names.items()]


def samples(groups: list[tuple[str, list[Scored]]]) -> tuple[list[RolloutRow], list[ScoreRow]]:
    """Responses with their scores, as the stages write them."""
    flat = [(name, number, *scored) for name, group in groups for number, scored in enumerate(group)]
    ended = {True: "length", False: "stop"}
    return (
        [RolloutRow(n, i, [5], [7], text, [-1.0], ended[text.startswith(CUT)]) for n, i, text, _ in flat],
        [ScoreRow(n, i, score, {"right": score}, False, None) for n, i, _, score in flat],
    )


def paired(*groups: list[Scored]) -> tuple[list[tuple[str, str]], dict[str, int]]:
    """The pairs of some prompts, and what was counted."""
    named = [(f"p{number}", group) for number, group in enumerate(groups)]
    found, asked = SampledPairs(), {row.prompt_id: row for row in prompts({name: name for name, _ in named})}
    rows = list(found.rows(asked, *samples(named)))
    return [(row["chosen"], row["rejected"]) for row in rows], {key: n for key, n in found.counts.items() if n}


@pytest.mark.parametrize(
    ("group", "pair", "counted"),
    [
        ([("a", 0.1), ("b", 1.1), ("c", 0.0), ("d", 0.5)], ("b", "c"), {"pairs": 1}),
        ([("a", 1.0), ("b", 0.0), ("c", 1.0), ("d", 0.0)], ("a", "b"), {"pairs": 1}),
        ([("a", -2.0), ("b", -1.0)], ("b", "a"), {"pairs": 1}),
        ([("a", 1.0), ("b", None), ("c", 0.0)], ("a", "c"), {"pairs": 1, "unscored": 1}),
        ([("a", 1.0), ("b", 1.0), ("c", None)], None, {"alike": 1, "unscored": 1}),
        ([("a", 1.0), ("a", 0.0)], None, {"alike": 1}),
        ([("a", 1.0), ("a", 0.0), ("b", 0.5)], ("a", "b"), {"pairs": 1}),
        ([("a", 1.0)], None, {"alone": 1}),
        ([("a", 1.0), ("b", None)], None, {"alone": 1, "unscored": 1}),
        ([("cut a", 1.0), ("b", 0.0)], None, {"cut": 1}),
        ([("cut a", 1.0), ("b", 0.5), ("c", 0.0)], ("b", "c"), {"pairs": 1}),
        ([("cut a", 0.0), ("b", 1.0)], ("b", "cut a"), {"pairs": 1}),
        ([("cut a", 0.0), ("cut b", 1.0)], None, {"cut": 1}),
        ([("cut a", 0.0), ("cut b", 0.0)], None, {"alike": 1}),
    ],
)
def test_the_best_response_is_paired_with_the_worst(
    group: list[Scored], pair: tuple[str, str] | None, counted: dict[str, int]
) -> None:
    assert paired(group) == ([] if pair is None else [pair], {"prompts": 1, **counted})


def test_a_prompt_that_comes_twice_is_one_and_prompts_keep_their_order() -> None:
    found, asked = SampledPairs(), {row.prompt_id: row for row in prompts({"x": "x=", "y": "y="})}
    twice: list[tuple[str, list[Scored]]] = [("y", [("a", 0.0)]), ("x", [("b", 1.0), ("c", 0.0)]), ("y", [("d", 1.0)])]
    rows = list(found.rows(asked, *samples(twice)))
    assert [(row["prompt"], row["chosen"], row["rejected"]) for row in rows] == [("y=", "d", "a"), ("x=", "b", "c")]
    assert found.counts["prompts"] == 2


def test_scores_of_other_responses_are_refused() -> None:
    rollouts, scores = samples([("x", [("a", 0.0), ("b", 1.0)])])
    with pytest.raises(InputError, match="not those of these rollouts"):
        list(SampledPairs().rows({}, rollouts, scores[::-1]))


def test_the_file_is_what_preferences_are_read_from(tmp_path: Path) -> None:
    talk: Messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Wie geht es? äöü"}]
    groups: dict[int, list[tuple[str, list[Scored]]]] = {
        2: [("text", [("worse\n", 0.0), ("better", 1.0)])],
        4: [("talk", [("so lala 🙂", 1.0), ("", 0.0)]), ("text", [("same", 1.0), ("other", 1.0)])],
    }
    inputs: dict[str, JobInput] = {}
    for number, group in groups.items():
        folder = tmp_path / str(number)
        folder.mkdir()
        rollouts, scores = samples(group)
        write_prompts(folder / "train.parquet", prompts({"unused": "u", "text": "1+1=", "talk": talk}))
        write_rollouts(folder / "rollouts.parquet", rollouts)
        write_scores(folder / "scores.parquet", scores)
        inputs |= {f"{name}_{number}": JobInput(folder, "") for name in ("dataset", "rollouts", "scores")}
    job = Job("", inputs, tmp_path, {"iterations": [2, 4]}, lambda *_: None)
    counts = pair_samples(job)
    assert counts == {"prompts": 3, "pairs": 2, "alone": 0, "alike": 1, "cut": 0, "unscored": 0}
    read: list[Any] = list(read_preferences("pairs.jsonl", Sources(tmp_path)))
    assert [row[:3] for row in read] == [
        ("1+1=", {"chosen": "better", "rejected": "worse\n"}, 0.0),
        (talk, {"chosen": "so lala 🙂", "rejected": ""}, 0.0),
    ]
    before = (tmp_path / "pairs.jsonl").read_bytes()
    pair_samples(job)
    assert (tmp_path / "pairs.jsonl").read_bytes() == before
