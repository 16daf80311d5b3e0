"""The arithmetic example: its data, its reward and its tokenizer, as a user would rely on them."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from itertools import islice
from pathlib import Path
from types import ModuleType

import pytest
from tokenizers.decoders import DecodeStream
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ppo_core.data.tokenization import decode_response
from ppo_core.processes.plugins import Sources
from ppo_core.records import PromptRow, RolloutRow
from ppo_core.scoring.weighted import WeightedRewards
from ppo_core.spec import RewardSpec

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "arithmetic"
TASK = re.compile(r"[0-9]([-+*][2-9]){3,5}=")


def load(name: str) -> ModuleType:
    found = importlib.util.spec_from_file_location(f"arithmetic_{name}", EXAMPLE / f"{name}.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


generate = load("generate")
reward = load("reward")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(EXAMPLE / "tokenizer")


@pytest.mark.parametrize(
    ("prompt", "steps", "answer"),
    [
        ("7+5*3-8=", ["7+5=2", "2*3=6", "6-8=8"], "8"),
        ("0-2-2-2=", ["0-2=8", "8-2=6", "6-2=4"], "4"),
        ("9*9+9*5-6+4=", ["9*9=1", "1+9=0", "0*5=0", "0-6=4", "4+4=8"], "8"),
    ],
)
def test_steps_and_answer_are_those_worked_out_by_hand(prompt: str, steps: list[str], answer: str) -> None:
    assert generate.steps_of(prompt) == steps
    assert generate.answer_of(prompt) == answer


def test_graded_prompts_are_the_prompts_with_their_number_of_terms() -> None:
    rows = [*generate.graded(200)]
    assert [{key: row[key] for key in ("prompt", "answer")} for row in rows] == [*generate.prompts(200)]
    assert [row["terms"] for row in rows] == [sum(letter.isdigit() for letter in row["prompt"]) for row in rows]
    assert {row["terms"] for row in rows} == {4, 5, 6}


def test_rows_have_the_columns_and_the_form_of_the_task() -> None:
    rows = [*generate.prompts(200), *generate.held_out(200)]
    assert {tuple(row) for row in rows} == {("prompt", "answer")}
    assert all(TASK.fullmatch(row["prompt"]) for row in rows)
    assert {len(row["prompt"]) // 2 for row in rows} == {4, 5, 6}
    assert {tuple(row) for row in generate.sft_examples(50)} == {("prompt", "completion")}


def test_the_functions_need_no_arguments() -> None:
    assert sum(1 for _ in generate.prompts()) == 8192
    assert sum(1 for _ in generate.held_out()) == 512
    assert sum(1 for _ in generate.sft_examples()) == 20_000


def test_prompts_are_distinct_and_held_out_ones_are_never_trained_on() -> None:
    trained = [row["prompt"] for row in generate.prompts(3000)]
    shown = [row["prompt"] for row in generate.sft_examples(3000)]
    held = [row["prompt"] for row in generate.held_out(500)]
    for texts in (trained, shown, held):
        assert len(set(texts)) == len(texts)
    assert set(held).isdisjoint(trained)
    assert set(held).isdisjoint(shown)
    assert all(generate.is_for_training(text) for text in trained + shown)
    assert not any(generate.is_for_training(text) for text in held)


def test_asking_for_more_continues_and_another_seed_gives_other_prompts() -> None:
    assert list(islice(generate.prompts(500), 100)) == list(generate.prompts(100))
    assert list(generate.prompts(100, seed=1)) != list(generate.prompts(100, seed=0))


def test_about_a_third_of_the_examples_reason_and_all_are_right() -> None:
    examples = list(generate.sft_examples(2000))
    careful = [row for row in examples if row["completion"].startswith("<think>")]
    # Four standard deviations of a binomial with p = 0.35 and n = 2000 are 85.
    assert abs(len(careful) - 700) < 85
    completions = [row["completion"] for row in examples]
    answers = [generate.answer_of(row["prompt"]) for row in examples]
    assert set(reward.correct([row["prompt"] for row in examples], completions, answers)) == {1.1}
    assert all(",".join(generate.steps_of(row["prompt"])) in row["completion"] for row in careful)


def test_the_script_writes_the_same_bytes_in_every_process(tmp_path: Path) -> None:
    sizes = ["--sft", "300", "--prompts", "200", "--eval", "100", "--out"]
    command = [sys.executable, str(EXAMPLE / "generate.py"), *sizes]
    for seed in ("1", "2"):
        subprocess.run([*command, str(tmp_path / seed)], env={"PYTHONHASHSEED": seed}, check=True, timeout=300)
    names = ["sft.jsonl", "prompts.jsonl", "eval.jsonl"]
    first, second = ([(tmp_path / seed / name).read_bytes() for name in names] for seed in ("1", "2"))
    assert first == second
    assert [len(text.splitlines()) for text in first] == [300, 200, 100]
    assert [json.loads(line) for line in first[1].splitlines()] == list(generate.prompts(200))


def test_the_script_says_what_to_ask_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        generate.main([])
    assert "--out DIR" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("<answer>8</answer>", 1.1),
        ("<think>7+5=2,2*3=6,6-8=8</think><answer>8</answer>", 1.1),
        ("<think>nonsense</think><answer>8</answer>", 1.1),
        ("<think></think><answer>8</answer>", 1.1),
        ("<answer> 8 </answer>", 1.0),
        ("so <answer>8</answer>", 1.0),
        ("<answer>8</answer>\n", 1.0),
        ("<think>7+5=2<answer>8</answer>", 1.0),
        ("<answer>7</answer>", 0.1),
        ("<think>7+5=2</think><answer>0</answer>", 0.1),
        ("<answer>08</answer>", 0.0),
        ("<answer>8</answer><answer>7</answer>", 0.0),
        ("<answer>8", 0.0),
        ("8", 0.0),
        ("", 0.0),
        ("</answer>8<answer>", 0.0),
        ("<answer>\u0668</answer>", 0.0),
        ("\x00\ud800<answer>" * 50, 0.0),
    ],
)
def test_the_reward_of_a_completion(completion: str, score: float) -> None:
    assert reward.correct(["7+5*3-8="], [completion], ["8"]) == [score]


def test_right_steps_are_credited_where_they_end(tokenizer: PreTrainedTokenizerBase) -> None:
    """The tags are one token each and every other character is one; what counts ends with the first wrong step."""
    texts = {
        "<think>7+5=2,2*3=6,6-8=8</think><answer>8</answer>": {5: 0.1, 11: 0.1, 17: 0.1, 22: 1.1},
        "<think>7+5=2,2*3=7,7-8=9</think><answer>9</answer>": {5: 0.1, 22: 0.1},
        "<think>7+5=1,2*3=6</think>": None,
        "<answer>8</answer>": None,
    }
    spec = {"sources": [{"function": "reward.py:correct"}, {"function": "reward.py:right_steps", "weight": 0.1}]}
    rewards = WeightedRewards(RewardSpec.model_validate(spec), Sources(EXAMPLE), "answer")
    ids = [[*tokenizer(text).input_ids, tokenizer.eos_token_id] for text in texts]
    rollouts = [
        RolloutRow("p", index, [1], ids[index], text, [0.0] * len(ids[index]), "stop")
        for index, text in enumerate(texts)
    ]
    row = PromptRow("p", "7+5*3-8=", [1], "8", {})
    scored = rewards.score_rollouts([row] * 4, rollouts, lambda tokens: decode_response(tokenizer, tokens))
    assert [found.token_scores for found in scored] == list(texts.values())
    assert [found.score for found in scored] == pytest.approx([1.4, 0.2, 0.0, 1.1])


def test_the_reward_takes_batches_and_further_columns() -> None:
    completions = ["<answer>1</answer>", "<answer>2</answer>"]
    assert reward.correct(["a", "b"], completions, answer=["1", "3"], prompt_id=[0, 1], trainer_state=None) == [
        1.1,
        0.1,
    ]


def test_the_committed_tokenizer_is_what_the_script_writes(tmp_path: Path) -> None:
    generate.main(["--tokenizer", str(tmp_path)])
    committed = {path.name: path.read_bytes() for path in (EXAMPLE / "tokenizer").iterdir()}
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == committed


def test_the_tokenizer_is_fast_small_and_knows_its_special_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    assert tokenizer.is_fast
    assert len(tokenizer) == tokenizer.vocab_size == 103
    assert (tokenizer.pad_token, tokenizer.pad_token_id) == ("<pad>", 0)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<eos>", 1)
    assert tokenizer.chat_template is None


def test_a_tag_is_one_token_and_any_other_character_too(tokenizer: PreTrainedTokenizerBase) -> None:
    ids = tokenizer.encode("<think>7+5=2</think><answer>8</answer>")
    assert tokenizer.convert_ids_to_tokens(ids) == ["<think>", *"7+5=2", "</think>", "<answer>", "8", "</answer>"]
    assert tokenizer.encode("7é") == [tokenizer.convert_tokens_to_ids("7"), tokenizer.unk_token_id]


def test_the_tokenizer_gives_every_text_back(tokenizer: PreTrainedTokenizerBase) -> None:
    rows = [*generate.sft_examples(300), *generate.held_out(300)]
    texts = [row["prompt"] + row.get("completion", "") for row in rows]
    texts += ["", " ", "  a  b\n\nc  ", "".join(map(chr, range(32, 127))), "< think > <thin k> 1 . 2 ' s"]
    for text in texts:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert (
            tokenizer.decode([*ids, tokenizer.eos_token_id, tokenizer.pad_token_id], skip_special_tokens=True) == text
        )
        assert tokenizer.unk_token_id not in ids


def test_decoding_token_by_token_gives_the_same_text(tokenizer: PreTrainedTokenizerBase) -> None:
    text = "<think>7+5=2, 2*3=6</think><answer>8</answer>"
    stream = DecodeStream(skip_special_tokens=True)
    pieces = [stream.step(tokenizer.backend_tokenizer, token) for token in tokenizer.encode(text)]
    assert "".join(piece for piece in pieces if piece) == text


def test_saving_the_tokenizer_and_loading_it_again_changes_nothing(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    text = "7+5*3-8=<think>7+5=2</think>"
    assert again.encode(text) == tokenizer.encode(text)
    assert again.decode(again.encode(text)) == text
    assert (again.eos_token, again.pad_token) == ("<eos>", "<pad>")
