"""Scores in parts: what is refused, the tokens that parts are credited at, their weighted sums, and their table.

The oracle of the tokens knows the bytes of each, and counts.
"""

from __future__ import annotations

import doctest
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from ppo_core.data.tables import read_scores, write_rollouts, write_scores
from ppo_core.data.tokenization import decode_response
from ppo_core.engines.scoring import score_rollouts, try_reward
from ppo_core.processes.plugins import Sources
from ppo_core.processes.protocol import Job, JobInput
from ppo_core.records import InputError, PromptRow, RolloutRow, ScoreRow
from ppo_core.scoring import reward, spans
from ppo_core.scoring.reward import Sample, Span, SpanScores
from ppo_core.scoring.spans import checked_scores, tokens_of
from ppo_core.scoring.weighted import WeightedRewards
from ppo_core.spec import RewardSpec
from tasks.checks.try_reward import TrialRow
from tests.ppo_core.tiny_policies import EOS, PAD, make_tokenizer
from tests.ppo_core.written_tables import write_prompts

ROW = PromptRow("p", "w1", [5], "w2", {})
SAMPLE = Sample(ROW, "w2 w3", (6, 7, EOS))
CODE = """
def words(completions):
    return [[{"start": 0, "end": 2, "score": 1.0}, {"start": 3, "end": 5, "score": -0.5}] if c else 0.0
            for c in completions]

def by_token(completions, completion_ids):
    return [[float(token) for token in ids] for ids in completion_ids]

def length(completions, **columns):
    assert "completion_ids" not in columns
    return [float(len(c)) for c in completions]

def some(completions):
    return [None] * len(completions)
"""


def span(start: Any, end: Any, score: Any) -> dict[str, Any]:
    return {"start": start, "end": end, "score": score}


def rewards(folder: Path, **weights: float) -> WeightedRewards:
    (folder / "parts.py").write_text(CODE)
    spec = RewardSpec(function={f"parts.py:{name}": weight for name, weight in weights.items()})
    return WeightedRewards(spec, Sources(folder), "answer")


@pytest.mark.parametrize("module", [spans, reward])
def test_the_examples_hold(module: Any) -> None:
    failed, tried = doctest.testmod(module)
    assert (failed, tried > 0) == (0, True)


@pytest.mark.parametrize(
    ("given_", "expected", "total"),
    [
        ([span(0, 2, 1), span(1, 5, 0.5)], SpanScores((Span(0, 2, 1.0), Span(1, 5, 0.5))), 1.5),
        ((span(np.int64(3), 5, np.float32(-2)),), SpanScores((Span(3, 5, -2.0),)), -2.0),
        (torch.tensor([0.0, 1.0, 0.25]), SpanScores((Span(0, 1, 0), Span(1, 2, 1), Span(2, 3, 0.25)), True), 1.25),
        ([1, 0, 0], SpanScores((Span(0, 1, 1), Span(1, 2, 0), Span(2, 3, 0)), True), 1.0),
    ],
)
def test_a_score_may_come_in_parts(given_: Any, expected: SpanScores, total: float) -> None:
    (found,) = checked_scores("f", [given_], [SAMPLE])
    assert found == expected
    assert isinstance(found, SpanScores)
    assert found.total == total


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ([], "f: score 0 is an empty list: return 0.0 where nothing is earned, None where there is no score"),
        ([span(0, 6, 1.0)], "f: score 0 has a span from 0 to 6, in a response of 5 characters: let it begin"),
        ([span(-1, 2, 1.0)], "has a span from -1 to 2, in a response of 5"),
        ([span(2, 2, 1.0)], "has a span from 2 to 2, in a response of 5"),
        ([span(0, 2.0, 1.0)], "has the span {'start': 0, 'end': 2.0, 'score': 1.0}: give whole numbers as start and"),
        ([span(0, True, 1.0)], "give whole numbers as start and end"),
        ([span(0, "2", 1.0)], "give whole numbers as start and end"),
        ([span(0, 2, "1")], "and a number as score"),
        ([span(0, 2, None)], "and a number as score"),
        ([{"start": 0, "end": 2}], "has the span {'start': 0, 'end': 2}: give"),
        ([{**span(0, 2, 1.0), "unit": "tokens"}], "'unit': .*: give whole numbers"),
        ([span(0, 2, float("nan"))], "f: score 0 has nan in it or as its sum: return finite numbers"),
        ([0.0, float("inf"), 0.0], "f: score 0 has inf in it or as its sum"),
        ([1e308, 1e308, 0.0], "f: score 0 has inf in it or as its sum"),
        ([1.0, 2.0], "f: score 0 has 2 numbers, for a response of 3 tokens: return one for each"),
        ([1.0, span(0, 2, 1.0), 0.0], "f: score 0 is .* return a float, or None, or a list of spans, as"),
        (span(0, 2, 1.0), r"f: score 0 is {'start': .* \(dict\): return a float, or None, or a list of spans"),
        ({1.0}, r"f: score 0 is {1.0} \(set\): return a float"),
        (
            (0.5, 1.0, 0.0),
            r"f: score 0 is \(0.5, 1.0, 0.0\), a tuple, which may be a score with something beside it",
        ),
    ],
)
def test_parts_that_cannot_be_are_refused(given_: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        checked_scores("f", [given_], [SAMPLE])


def bytes_as_letters() -> dict[int, str]:
    """GPT-2's letters for bytes: those that can be seen stand for themselves, the others for letters from U+0100 on."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in seen]
    return {byte: chr(byte) for byte in seen} | {byte: chr(256 + index) for index, byte in enumerate(others)}


LETTERS = bytes_as_letters()
SPECIAL = "<end>"


def byte_level(pieces: Sequence[bytes]) -> PreTrainedTokenizerFast:
    """With a token for each of the pieces, after the special one, in the form of GPT-2's, Qwen's and Llama 3's."""
    words = {SPECIAL: 0} | {"".join(LETTERS[byte] for byte in piece): number for number, piece in enumerate(pieces, 1)}
    tokenizer = Tokenizer(models.BPE(words, []))
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL)


def byte_fallback(pieces: Sequence[str]) -> PreTrainedTokenizerFast:
    """The same in the form of Llama 2's and Mistral's: words, or single bytes, and no space before the first."""
    words = {SPECIAL: 0} | {piece: number for number, piece in enumerate(pieces, 1)}
    tokenizer = Tokenizer(models.BPE(words, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL)


def credited(tokenizer: Any, token_ids: list[int], text: str) -> list[int]:
    """The token of a span to each character, and to all before it."""
    row = RolloutRow("p", 0, [1], token_ids, text, [0.0] * len(token_ids), "stop")
    found = SpanScores(tuple(Span(start, start + 1, 1.0) for start in range(len(text))))
    return tokens_of(found, row, lambda ids: decode_response(tokenizer, ids))


# U+FFFD is left out: it is what decoders write for a character of which a byte is missing, and counts with the first.
CHARACTERS = st.characters(codec="utf-8", exclude_characters="\ufffd")


@given(
    st.text(CHARACTERS | st.sampled_from("aé字😀 "), min_size=1, max_size=12), st.lists(st.integers(1, 5)), st.data()
)
def test_a_span_is_credited_at_the_token_that_ends_its_last_character(
    text: str, lengths: list[int], data: st.DataObject
) -> None:
    """Tokens are any bytes of the text, and special ones without any lie between them."""
    left, pieces = text.encode(), list[bytes]()
    while left:
        length = lengths.pop() if lengths else 1
        pieces, left = [*pieces, left[:length]], left[length:]
    vocabulary = sorted(set(pieces))
    ids, sizes = list[int](), list[int]()
    for piece in pieces:
        for _ in range(data.draw(st.integers(0, 1))):
            ids, sizes = [*ids, 0], [*sizes, 0]
        ids, sizes = [*ids, 1 + vocabulary.index(piece)], [*sizes, len(piece)]
    ends = [len(text[: end + 1].encode()) for end in range(len(text))]
    expected = [next(t for t in range(len(ids)) if sum(sizes[: t + 1]) >= end) for end in ends]
    assert credited(byte_level(vocabulary), [*ids, 0], text) == expected


@given(st.lists(st.tuples(st.booleans(), st.text(st.sampled_from("aé字😀 "), min_size=1, max_size=3)), min_size=1))
def test_bytes_in_place_of_unknown_words_are_no_character_before_the_last(parts: list[tuple[bool, str]]) -> None:
    """Until a group of such bytes is complete, the decoder takes back what it said of those before."""
    pieces, expected = ["▁"], list[int]()
    for in_bytes, word in parts:
        if in_bytes:
            for character in word:
                pieces += [f"<0x{byte:02X}>" for byte in character.encode()]
                expected.append(len(pieces) - 1)
        else:
            pieces.append(word.replace(" ", "▁"))
            expected += [len(pieces) - 1] * len(word)
    vocabulary = sorted(set(pieces))
    ids = [1 + vocabulary.index(piece) for piece in pieces]
    text = "".join(word for _, word in parts)
    assert credited(byte_fallback(vocabulary), [*ids, 0], text) == expected


def test_a_part_that_fits_into_no_float_with_its_weight_is_refused(tmp_path: Path) -> None:
    (tmp_path / "huge.py").write_text("def huge(completions):\n    return [[1e308, -1e308, 1.0]] * len(completions)")
    found = WeightedRewards(RewardSpec(function={"huge.py:huge": 2.0}), Sources(tmp_path), "answer")
    rollouts = [RolloutRow("p", 0, [5], [6, 7, EOS], "w2 w3", [0.0] * 3, "stop")]
    with pytest.raises(InputError, match=r"the reward huge gave 1e\+308 and has weight=2"):
        found.score_rollouts([ROW], rollouts, str)


def test_what_is_no_text_is_not_taken_for_the_tokens_of_another() -> None:
    row = RolloutRow("p", 0, [5], [6, EOS], "w9", [0.0] * 2, "stop")
    with pytest.raises(InputError, match=r"response 'w9' to prompt p was sampled with another tokenizer: .* 'w2'"):
        tokens_of(SpanScores((Span(0, 2, 1.0),)), row, lambda ids: decode_response(make_tokenizer(), ids))


def test_weighted_sums_are_added_up_token_by_token(tmp_path: Path) -> None:
    """w2 and w3 are the tokens 0 and 1, EOS is token 2; the padding in between has no text."""
    ids = [6, PAD, 7, EOS]
    rollouts = [RolloutRow("p", 0, [5], ids, "w2 w3", [0.0] * 4, "stop"), RolloutRow("p", 1, [5], [1], "", [0], "stop")]
    found = rewards(tmp_path, words=2.0, by_token=0.5, length=10.0)
    tokenizer = make_tokenizer()
    first, second = found.score_rollouts([ROW] * 2, rollouts, lambda ids: decode_response(tokenizer, ids))
    assert first.components == {"words": 0.5, "by_token": 6.0 + PAD + 7.0 + EOS, "length": 5.0}
    assert first.token_scores == {0: 2.0 + 3.0, 1: 0.5 * PAD, 2: -1.0 + 3.5, 3: 0.5 * EOS + 50.0}
    assert first.score == pytest.approx(sum(first.token_scores.values()))
    assert (second.components["words"], second.token_scores) == (0.0, {0: 0.5})
    assert [row.token_scores for row in found.score_rollouts([ROW] * 2, rollouts)] == [None, None]


def test_parts_of_weight_0_and_of_responses_without_a_score_are_credited_nowhere(tmp_path: Path) -> None:
    rollouts = [RolloutRow("p", 0, [5], [6, 7, EOS], "w2 w3", [0.0] * 3, "stop")]
    for weights in ({"words": 0.0, "length": 1.0}, {"words": 1.0, "some": 1.0}):
        (row,) = rewards(tmp_path, **weights).score_rollouts([ROW], rollouts, str)
        assert (row.components["words"], row.token_scores) == (0.5, None)


def test_a_reward_that_reads_tokens_has_no_score_where_none_were_sampled(tmp_path: Path) -> None:
    found = rewards(tmp_path, by_token=1.0)
    found.check_rows([ROW])
    (parts,) = found.score([Sample(ROW, "w2")])
    assert parts.scores == {"by_token": None}
    assert parts.reasons == {"by_token": "it reads completion_ids, and nothing is sampled here: a run has them"}


def test_parts_survive_the_table_and_without_any_its_bytes_are_what_they_were(tmp_path: Path) -> None:
    plain = [ScoreRow("a", 0, 1.5, {"f": 1.5}, False, None), ScoreRow("a", 1, None, {"f": None}, True, "no")]
    parts = [ScoreRow("a", 2, 1.5, {"f": 1.5}, False, None, {7: 1.0, 2: 0.5}), *plain]
    write_scores(tmp_path / "parts.parquet", parts)
    assert read_scores(tmp_path / "parts.parquet") == parts
    stored = pq.read_table(tmp_path / "parts.parquet")["token_scores"].to_pylist()
    assert stored == [[{"token": 2, "score": 0.5}, {"token": 7, "score": 1.0}], None, None]
    write_scores(tmp_path / "plain.parquet", plain)
    assert read_scores(tmp_path / "plain.parquet") == plain
    columns = {
        "prompt_id": pa.array(["a", "a"]), "sample_index": pa.array([0, 1], pa.int32()), "score": [1.5, None],
        "reward/f": [1.5, None], "truncated": [False, True], "error": [None, "no"],
    }  # fmt: skip
    pq.write_table(pa.table(columns), tmp_path / "before.parquet")
    assert (tmp_path / "plain.parquet").read_bytes() == (tmp_path / "before.parquet").read_bytes()


def job(folder: Path, inputs: dict[str, Path], spec: dict[str, Any]) -> Job:
    given = {name: JobInput(path, "" if name == "sources" else str(path)) for name, path in inputs.items()}
    return Job("", given, folder, spec, lambda *_: None)


def test_the_scoring_job_says_at_which_tokens(tmp_path: Path) -> None:
    (tmp_path / "parts.py").write_text(CODE)
    make_tokenizer().save_pretrained(tmp_path / "tokenizer")
    write_prompts(tmp_path / "train.parquet", [ROW])
    texts = [("w2 w3", [6, 7, EOS]), ("", [EOS]), ("w9 w2 w3", [13, 6, 7])]
    rollouts = [
        RolloutRow("p", number, [5], ids, text, [0.0] * len(ids), "stop") for number, (text, ids) in enumerate(texts)
    ]
    write_rollouts(tmp_path / "rollouts.parquet", rollouts)
    inputs = dict.fromkeys(("sources", "rollouts", "dataset"), tmp_path) | {"tokenizer": tmp_path / "tokenizer"}
    reward_ = {"function": {"parts.py:words": 1.0, "parts.py:length": 0.5}}
    spec = {"reward": reward_, "answer_column": "answer", "split": "train"}
    metrics = score_rollouts(job(tmp_path, inputs, spec))["metrics"]
    rows = read_scores(tmp_path / "scores.parquet")
    assert [row.score for row in rows] == [3.0, 0.0, 4.5]
    assert [row.token_scores for row in rows] == [{0: 1.0, 1: -0.5, 2: 2.5}, None, {0: 1.0, 1: -0.5, 2: 4.0}]
    assert (metrics["score/mean"], metrics["score/words"], metrics["score/positions"]) == (2.5, pytest.approx(1 / 3), 3)


def test_a_trial_shows_the_text_of_each_part(tmp_path: Path) -> None:
    (tmp_path / "parts.py").write_text(CODE)
    (tmp_path / "train.jsonl").write_text('{"prompt": "w1"}\n')
    dataset = {
        "dataset": {"train": "train.jsonl"}, "model": {"path": "."}, "sft_data": None, "max_response_tokens": 8,
        "num_eval_prompts": 0, "reward": {"function": {"parts.py:words": 2.0}},
    }  # fmt: skip
    trial = {"dataset": dataset, "completions": ["w2 w3"]}
    (row,) = try_reward(job(tmp_path, {"sources": tmp_path}, trial))["rows"]
    assert TrialRow(**row).cells() == ["w1", "w2 w3", "0.5\n1 for 'w2'\n-0.5 for 'w3'", "1"]
