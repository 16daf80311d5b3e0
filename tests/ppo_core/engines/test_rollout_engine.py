"""The rollout engine as a real process: weights swapped in place, logprobs, seeds, endings."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from infra.engines.process import EngineJobError
from ppo_core.records import RolloutRow
from tests.ppo_core.engines.engine_jobs import (
    Client,
    ends_by_itself,
    generate_spec,
    open_engine,
    tokens_of,
    write_dataset,
)
from tests.ppo_core.tiny_policies import (
    CONTEXT,
    END,
    EOS,
    PAD,
    UNK,
    VOCABULARY,
    forward_logprobs,
    greedy_tokens,
    make_policy,
    make_tokenizer,
    next_probabilities,
)

pytest_plugins = ["tests.ppo_core.engines.engine_fixtures"]

SHARED_PREFIX = [4 + (7 * n) % 60 for n in range(140)]  # longer than the 128 tokens of a prefix cache block
SHORT = [[4 + (13 * n + k) % 60 for k in range(3 + n)] for n in range(4)]
PROMPTS = [*SHORT, *([*SHARED_PREFIX, 4 + n, 9 + n] for n in range(4))]
ALL = {"num_prompts": len(PROMPTS), "max_response_tokens": 24}
Answers = tuple[list[RolloutRow], list[RolloutRow]]


@dataclass(frozen=True)
class Fresh:
    """What a process said that never saw a policy A and never swapped, and whether it ended by itself."""

    answers: dict[bool, Answers]
    other_cut: list[RolloutRow]
    ended_by_itself: bool


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "dataset", PROMPTS)


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[bool, str], Path]:
    """Checkpoints A and B with tied and with untied embeddings."""
    folder = tmp_path_factory.mktemp("policies")
    made = {(tied, name): folder / f"{name}-{tied}" for tied in (True, False) for name in "AB"}
    for (tied, name), checkpoint in made.items():
        make_policy(checkpoint / "policy", tied=tied, seed="AB".index(name))
    return made


@pytest.fixture(scope="module")
def fresh(policies: dict[tuple[bool, str], Path], dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Fresh:
    """Policy B, tied and untied: other shapes, so each gets a vLLM engine of its own."""
    client = open_engine("rollout", tmp_path_factory.mktemp("fresh"))
    try:
        cut = client.generate(policies[True, "B"], dataset, position=5, num_prompts=6, max_response_tokens=24)
        given = {tied: answers(client, policies[tied, "B"], dataset) for tied in (True, False)}
    finally:
        ended = ends_by_itself(client)
    return Fresh(given, cut, ended)


def answers(client: Client, checkpoint: Path, dataset: Path) -> Answers:
    """Greedy and sampled."""
    return (
        client.generate(checkpoint, dataset, temperature=0.0, **ALL),
        client.generate(checkpoint, dataset, samples_per_prompt=2, **ALL),
    )


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_policy_swapped_in_answers_as_in_a_fresh_engine(
    rollout: Client, policies: dict[tuple[bool, str], Path], dataset: Path, fresh: Fresh, tied: bool
) -> None:
    before = answers(rollout, policies[tied, "A"], dataset)
    swapped = answers(rollout, policies[tied, "B"], dataset)
    back = answers(rollout, policies[tied, "A"], dataset)
    assert swapped == fresh.answers[tied]
    assert back == before
    assert not any(a == b for a, b in zip(tokens_of(before[0]), tokens_of(swapped[0]), strict=True))
    for row, ids in zip(swapped[0], PROMPTS, strict=True):
        assert row.response_token_ids == greedy_tokens(policies[tied, "B"] / "policy", ids, 24)


def test_an_engine_that_made_room_answers_as_before(
    rollout: Client, policies: dict[tuple[bool, str], Path], dataset: Path
) -> None:
    before = answers(rollout, policies[True, "A"], dataset)
    freed = [rollout.run("make_room", {}, {}, None).result["freed_gib"] for _ in range(2)]
    assert freed == [pytest.approx(generate_spec()["kv_cache_gib"], rel=0.05), 0.0]
    assert answers(rollout, policies[True, "A"], dataset) == before


def test_tokens_depend_on_neither_process_nor_company(
    rollout: Client, policies: dict[tuple[bool, str], Path], dataset: Path, fresh: Fresh
) -> None:
    together = {row.prompt_id: row for row in fresh.answers[True][1] if row.sample_index == 0}
    alone = [
        *rollout.generate(policies[True, "B"], dataset, position=2, num_prompts=1, max_response_tokens=24),
        *rollout.generate(policies[True, "B"], dataset, position=6, num_prompts=1, max_response_tokens=24),
    ]
    assert [row.prompt_id for row in fresh.other_cut] == ["p5", "p6", "p7", "p0", "p1", "p2"]
    for row in (*fresh.other_cut, *alone):
        assert row == together[row.prompt_id]


def test_shards_merge_into_the_bytes_that_one_engine_gives(
    rollout: Client, policies: dict[tuple[bool, str], Path], dataset: Path
) -> None:
    inputs = {"checkpoint": policies[True, "A"], "dataset": dataset}
    # Ten of eight prompts: two come twice, and their samples go on counting in another shard.
    whole = generate_spec(num_prompts=10, samples_per_prompt=2, max_response_tokens=24, shuffle=True)
    expected = rollout.run("generate_rollouts", inputs, whole, one := rollout.output())
    for sizes in ([5, 5], [1, 7, 2]):
        shards: dict[str, Path] = {}
        for number, size in enumerate(sizes):
            spec = {"whole": whole, "first": sum(sizes[:number]), "count": size}
            rollout.run("generate_shard", inputs, spec, shard := rollout.output())
            shards[f"shard_{number}"] = shard
        merged = rollout.run("merge_rollouts", shards, {}, several := rollout.output())
        assert merged.result == expected.result
        assert (several / "rollouts.parquet").read_bytes() == (one / "rollouts.parquet").read_bytes()


def test_what_vllm_can_never_do_is_said_in_the_specs_words_and_not_tried_again(
    rollout: Client, policies: dict[tuple[bool, str], Path], dataset: Path, tmp_path: Path
) -> None:
    small = tmp_path / "small"
    shutil.copytree(policies[True, "A"], small)
    config = small / "policy" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "head_dim": 16}))
    for checkpoint, change, message in (
        (small, {}, "vLLM on CPU takes only 32, 64"),
        (policies[True, "A"], {"kv_cache_gib": 0.0001}, "engines.kv_cache_gib=0.0001 is too small for one sequence of"),
    ):
        with pytest.raises(EngineJobError, match=message) as failure:
            rollout.generate(checkpoint, dataset, **{**ALL, **change})
        assert (failure.value.error_type, failure.value.retryable) == ("InputError", False)


def test_other_seeds_iterations_and_samples_give_other_tokens(
    rollout: Client, policies: dict[tuple[bool, str], Path], dataset: Path
) -> None:
    drawn = [
        rollout.generate(policies[True, "A"], dataset, samples_per_prompt=4, **{**ALL, **change})
        for change in ({}, {"seed": 4}, {"stream": 2}, {"stream": "evaluation"})
    ]
    responses = [(row.prompt_id, *row.response_token_ids) for rows in drawn for row in rows]
    assert len(responses) == 4 * 4 * len(PROMPTS)
    # Short ones, ended by EOS, may be equal by chance.
    assert not [response for response, times in Counter(responses).items() if times > 1 and len(response) > 6]
    assert [(row.prompt_id, row.sample_index) for row in drawn[0]] == [(f"p{n}", k) for n in range(8) for k in range(4)]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampler_logprobs_are_those_of_a_forward_pass(
    rollout: Client, policies: dict[tuple[bool, str], Path], dataset: Path, temperature: float
) -> None:
    checkpoint = policies[True, "A"]
    worst = 0.0
    for row in rollout.generate(checkpoint, dataset, temperature=temperature, **ALL):
        prompt, response = row.prompt_token_ids, row.response_token_ids
        expected = forward_logprobs(checkpoint / "policy", prompt, response, temperature=temperature)
        worst = max(worst, *(abs(a - b) for a, b in zip(row.sampler_logprobs, expected, strict=True)))
    assert 0.0 < worst < 1e-4, worst


def test_tokens_come_from_the_distribution_of_their_logprobs(
    rollout: Client, policies: dict[tuple[bool, str], Path], dataset: Path
) -> None:
    count, checkpoint = 3000, policies[True, "A"]
    rows = rollout.generate(
        checkpoint, dataset, num_prompts=1, samples_per_prompt=count, max_response_tokens=1, temperature=0.7
    )
    drawn = Counter(row.response_token_ids[0] for row in rows)
    frequencies = torch.tensor([drawn[token] / count for token in range(len(VOCABULARY))])

    def distance(temperature: float) -> float:
        expected = next_probabilities(checkpoint / "policy", SHORT[0], temperature=temperature)
        return float((frequencies - expected).abs().sum() / 2)

    # The expected total variation of 3000 draws is at most sqrt(66 / 3000) / 2 = 0.074.
    assert distance(0.7) < 0.074
    assert distance(1.0) > 2 * distance(0.7)


@pytest.mark.parametrize("pad", ["<pad>", "<eos>"], ids=["pad", "pad is eos"])
def test_a_response_ends_with_its_first_stop_token_or_at_the_limit(
    rollout: Client, policies: dict[tuple[bool, str], Path], dataset: Path, tmp_path: Path, pad: str
) -> None:
    make_policy(tmp_path / "one" / "policy", pad=pad)
    make_policy(tmp_path / "two" / "policy", pad=pad, eos=[EOS, END])
    special = {EOS, UNK, END, *([PAD] if pad == "<pad>" else [])}
    asked = {"num_prompts": 8, "samples_per_prompt": 12, "max_response_tokens": 48}
    one, two = (rollout.generate(tmp_path / name, dataset, **asked) for name in ("one", "two"))
    for rows, stops in ((one, {EOS}), (two, {EOS, END})):
        for row in rows:
            *body, last = row.response_token_ids
            assert not stops & set(body)
            assert row.finish_reason == ("stop" if last in stops else "length")
            assert len(row.sampler_logprobs) == len(row.response_token_ids) <= 48
            assert row.finished or len(row.response_token_ids) == 48
            assert row.response == " ".join(
                VOCABULARY[token] for token in row.response_token_ids if token not in special
            )
        endings = Counter(row.response_token_ids[-1] if row.finished else "length" for row in rows)
        assert set(endings) == {*stops, "length"}
    for longer, shorter in zip(one, two, strict=True):
        assert longer.response_token_ids[: len(shorter.response_token_ids)] == shorter.response_token_ids


def cut_at(row: RolloutRow, ends: Callable[[list[int]], bool]) -> tuple[list[int], str]:
    """What a response is that ends as soon as its tokens so far do; by reading them one by one."""
    for count in range(1, len(row.response_token_ids) + 1):
        if ends(row.response_token_ids[:count]):
            return row.response_token_ids[:count], "stop"
    return row.response_token_ids, row.finish_reason


def test_a_response_ends_with_the_first_text_or_token_that_the_spec_names(
    rollout: Client, policies: dict[tuple[bool, str], Path], dataset: Path
) -> None:
    checkpoint, asked = policies[True, "A"], {**ALL, "samples_per_prompt": 4}
    whole = rollout.generate(checkpoint, dataset, **asked)
    tokenizer = make_tokenizer()

    def text(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True))

    stop = text(whole[0].response_token_ids[3:5])  # two words with the space between them
    token = whole[1].response_token_ids[5]
    named = {
        "stop": ([stop, "w7"], lambda ids: any(s in text(ids) for s in (stop, "w7"))),
        "stop_token_ids": ([token], lambda ids: ids[-1] == token),
    }
    for name, (value, ends) in named.items():
        rows = rollout.generate(checkpoint, dataset, **asked, **{name: value})
        expected = [cut_at(row, ends) for row in whole]
        assert [(row.response_token_ids, row.finish_reason) for row in rows] == expected
        assert sum(cut != row.response_token_ids for (cut, _), row in zip(expected, whole, strict=True)) > 0
        for row, before in zip(rows, whole, strict=True):
            assert row.sampler_logprobs == before.sampler_logprobs[: len(row.response_token_ids)]
            assert row.response == text(row.response_token_ids)
    with pytest.raises(
        EngineJobError, match=r"stop_token_ids=\[66, 99\] are not in the tokenizer's vocabulary of 66 tokens"
    ) as failure:
        rollout.generate(checkpoint, dataset, **asked, stop_token_ids=[1, 66, 99])
    assert failure.value.error_type == "InputError"


def test_a_response_may_fill_the_context_to_the_last_token(rollout: Client, tmp_path: Path) -> None:
    checkpoint = make_policy(tmp_path / "A" / "policy").parent
    dataset = write_dataset(tmp_path / "dataset", [(SHARED_PREFIX * 2)[: CONTEXT - 4], SHORT[0]])
    rows = rollout.generate(checkpoint, dataset, num_prompts=2, max_response_tokens=4, temperature=0.0)
    assert tokens_of(rows)[0] == greedy_tokens(checkpoint / "policy", rows[0].prompt_token_ids, 4)


def test_more_evaluation_prompts_than_rows_are_refused(
    rollout: Client, policies: dict[tuple[bool, str], Path], dataset: Path
) -> None:
    with pytest.raises(EngineJobError, match=r"num_prompts=9.*only 8 rows are held out: lower it") as refused:
        rollout.generate(policies[True, "A"], dataset, split="eval", num_prompts=9)
    assert not refused.value.retryable


def test_an_output_that_cannot_be_written_is_said_and_the_engine_goes_on(
    rollout: Client, policies: dict[tuple[bool, str], Path], dataset: Path, tmp_path: Path
) -> None:
    inputs = {"checkpoint": policies[True, "A"], "dataset": dataset}
    with pytest.raises(EngineJobError, match=r"FileNotFoundError.*nowhere") as failed:
        rollout.run("generate_rollouts", inputs, generate_spec(), tmp_path / "nowhere")
    assert failed.value.retryable
    assert len(rollout.generate(policies[True, "A"], dataset)) == 4


@pytest.mark.thorough
def test_the_process_ends_by_itself_when_there_are_no_more_jobs(fresh: Fresh) -> None:
    assert fresh.ended_by_itself
