"""The page that says what a run's data is."""

from __future__ import annotations

import pytest

from ppo_core.spec import PreferencesSpec
from tasks.preferences.report_reward_model import input_data
from tasks.preferences.stages import PreferencesRef
from tasks.reports.dataset import dataset_page

TOLD = {
    "splits": {
        "train": {"rows": 1200, "mean": 7.25, "median": 7.0, "longest": 8, "histogram": [[1, 4, 300], [5, 8, 900]]},
        "eval": {"rows": 0, "histogram": []},
    },
    "sources": [
        {"source": "a.csv", "split": "train", "read": 1500, "rows": 1000, "held_out": 20, "dropped": {"repeated": 480},
         "draws": 600},
        {"source": "b.csv", "split": "sft", "read": 9, "rows": 8, "held_out": 0, "dropped": {"too long": 1}},
    ],
    "on_both_sides": 3,
    "examples_held_out": 1002,
}  # fmt: skip


def test_the_page_has_rows_sources_and_lengths() -> None:
    page = dataset_page("first", TOLD)
    assert page.startswith("# Data of run first\n")
    assert "| train on | 1,200 | 7.2 | 7 | 8 |" in page
    assert "3 rows to train on have a held-out prompt" in page
    assert "1,002 SFT examples have a held-out prompt: `dataset.duplicates: drop` takes them out." in page
    assert "| source | rows to | read | kept | moved to held out | repeated | too long | draws in an epoch |" in page
    assert "| a.csv | train on | 1,500 | 1,000 | 20 | 480 | 0 | 600 |" in page
    assert "| b.csv | start from | 9 | 8 | 0 | 0 | 1 |  |" in page
    assert f"| 1 to 4 | 300 | {'█' * 10} |\n| 5 to 8 | 900 | {'█' * 30} |" in page


def test_where_there_is_nothing_to_tell_of_sources_nothing_is() -> None:
    page = dataset_page("first", {**TOLD, "sources": [], "on_both_sides": 0, "examples_held_out": None})
    assert "source" not in page
    assert "held-out" not in page
    preferences = dataset_page("first", {**TOLD, "on_both_sides": None, "held_out_trained": 1234})
    assert (
        "1,234 held-out rows have a prompt that is trained on: `duplicates: drop` takes it out of training."
        in preferences
    )


@pytest.mark.parametrize(
    ("repeated", "words"), [(0, ""), (3, " (3 of 1,000 rows have a prompt that is trained on)")], ids=["none", "some"]
)
def test_the_console_is_told_of_held_out_preferences_that_are_trained_on(repeated: int, words: str) -> None:
    made = PreferencesRef(
        kind="preferences",
        uri="store/preferences/k",
        digest="0" * 64,
        counts={"train": 5, "eval": 1000},
        pairs={"train": 5, "eval": 3000},
        described={"held_out_trained": repeated},
    )
    assert made.in_words() == f"5 pairs to train on, 3,000 held out{words}"


def test_preferences_of_several_sources_have_a_name_in_mlflow() -> None:
    sources = [{"path": "a.jsonl"}, {"path": "b.jsonl"}]
    spec = PreferencesSpec.model_validate({"train": sources, "evaluation_fraction": 0.1})
    told = {"counts": {"train": 5, "eval": 2}, "pairs": {"train": 5, "eval": 2}, "described": {}}
    made = PreferencesRef.model_validate({"kind": "preferences", "uri": "store/k", "digest": "0" * 64, **told})
    names = [data.name for data in input_data(spec, made)]
    assert names == ["a.jsonl and 1 more (training)", "a.jsonl and 1 more (evaluation)"]
