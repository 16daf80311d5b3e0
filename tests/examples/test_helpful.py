"""The helpful example: its hidden rule, its rows and its tokenizer."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from transformers import AutoTokenizer

from ppo_core.data.preferences import read_preferences
from ppo_core.data.rankings import RankingMaker
from ppo_core.processes.plugins import Sources
from ppo_core.spec import RunSpec, differing_keys

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "helpful"


def load() -> ModuleType:
    found = importlib.util.spec_from_file_location("helpful_generate", EXAMPLE / "generate.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


generate = load()
BIKE = "how do I fix the old bike ?"


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        (" sure , oil it , then test it . good luck !", 3.0),
        (" hm , oil it .", 1.0),
        (" well , kick it , then test it .", 0.0),
        (" no idea , drop it . bye .", -2.0),
        (" sure , oil it , then oil it , then oil it , then oil it .", 2.5),
        (" hm , oil it , then kick it , then oil it , then oil it , then kick it .", -1.0),
        ("", 0.0),
    ],
)
def test_the_rule_gives_what_was_counted_by_hand(answer: str, score: float) -> None:
    assert generate.helpfulness(BIKE, answer) == score
    assert generate.gold([BIKE], [answer], prompt_id=["x"]) == [score]


def test_the_two_specs_of_ppo_differ_in_the_price_of_kl_alone() -> None:
    good, bad = (RunSpec.from_yaml(EXAMPLE / name).document() for name in ("ppo.yaml", "overoptimised.yaml"))
    (difference,) = differing_keys(*({**spec, "name": ""} for spec in (good, bad)))
    assert difference == "advantages.kl.coef: 0.1 -> 0.001"
    assert good["guards"]["max_gold_fall"] is not None


def test_no_pair_is_about_steps_that_the_rule_punishes() -> None:
    rows = [*generate.preferences(300), *generate.held_out_preferences(300)]
    deeds = set(generate.CAREFUL + generate.CARELESS)
    texts = [row[column] for row in rows for column in ("chosen", "rejected")]
    assert max(sum(word in deeds for word in text.split()) for text in texts) == 3


def test_the_chosen_answer_is_the_more_helpful_one() -> None:
    rows = [*generate.preferences(300), *generate.held_out_preferences(300)]
    assert all(
        generate.helpfulness(row["prompt"], row["chosen"]) > generate.helpfulness(row["prompt"], row["rejected"])
        for row in rows
    )
    assert list(generate.preferences(20)) == list(islice(generate.preferences(), 20))


def test_no_held_out_prompt_is_trained_on() -> None:
    seen = {
        row["prompt"] for rows in (generate.preferences(), generate.sft_examples(), generate.prompts()) for row in rows
    }
    held_out = {row["prompt"] for rows in (generate.held_out_preferences(), generate.held_out()) for row in rows}
    assert (len(held_out) > 50, seen & held_out) == (True, set())


def test_files_hold_the_same_rows_and_the_tokenizer_is_the_one_that_is_written(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE / "generate.py"), "--out", str(tmp_path), "--tokenizer", str(tmp_path / "t")]
    subprocess.run(command, check=True)
    made = {
        **{"preferences": generate.preferences(), "eval": generate.held_out_preferences()},
        **{"sft": generate.sft_examples(), "prompts": generate.prompts(), "held_out": generate.held_out()},
    }
    for file, rows in made.items():
        assert [json.loads(line) for line in (tmp_path / f"{file}.jsonl").read_text().splitlines()] == list(rows)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "t" / name).read_bytes() == (EXAMPLE / "tokenizer" / name).read_bytes()


def test_the_tokenizer_knows_every_word_and_the_texts_fit_the_spec() -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(EXAMPLE / "tokenizer")
    for source in ("generate.py:preferences", "generate.py:held_out_preferences"):
        given = list(read_preferences(source, Sources(EXAMPLE)))
        found = [ranking for _, ranking in RankingMaker(tokenizer, "it", 64, 64).rankings(given)]
        assert tokenizer.unk_token_id not in {token for row in found for text in row.responses for token in text}
        assert tokenizer.decode(found[0].responses[0]) == given[0].prompt + given[0].responses["chosen"]
