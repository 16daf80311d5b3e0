"""Scores given while others were sampled: each sample is asked for once over both jobs, and the table is the same."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ppo_core.data.tables import read_scores, write_rollouts
from ppo_core.engines.finished import as_document
from ppo_core.engines.scoring import score_ahead, score_rollouts
from ppo_core.processes.plugins import Sources, source_digest
from ppo_core.processes.protocol import Job, JobInput
from ppo_core.records import InputError, PromptRow, RolloutRow, content_digest
from ppo_core.scoring.ahead import ScoresAhead
from ppo_core.scoring.reward import RewardFailed
from ppo_core.spec import RewardSpec
from tests.ppo_core.scoring.reward_server import Answer, RewardServer, lengths, reward_server
from tests.ppo_core.written_tables import write_prompts

PROMPTS = [PromptRow(name, f"prompt {name}", [5], None, {}) for name in "abcd"]
ROLLOUTS = [
    RolloutRow(name, sample, [5], [7 + sample, 1], f"{name}{'x' * sample}", [0.0, 0.0], "stop")
    for name in "abcd"
    for sample in (0, 1)
]
NUMBERS = itertools.count()
ONE_BY_ONE = {"batch_size": 1, "retries": 0}
CODE = """
def noted(completions, notes, **columns):
    with open(notes, "a") as file:
        file.writelines(f"{text}\\n" for text in completions)
    return [float(len(text)) for text in completions]

def one_is_not_finite(solution_str):
    return float("nan") if solution_str == "bx" else float(len(solution_str))

def one_raises(solution_str):
    return 1.0 / (solution_str != "bx")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A dataset, its rollouts, and the user's code."""
    write_prompts(tmp_path / "train.parquet", PROMPTS)
    write_rollouts(tmp_path / "rollouts.parquet", ROLLOUTS)
    (tmp_path / "rewards.py").write_text(CODE)
    return tmp_path


def job(folder: Path, **spec: Any) -> Job:
    inputs = {name: JobInput(folder, "0" * 64) for name in ("dataset", "rollouts")} | {"sources": JobInput(folder, "")}
    output = folder / f"job-{next(NUMBERS)}"
    output.mkdir()
    return Job("", inputs, output, {"answer_column": "answer", "split": "train", **spec}, lambda *_: None)


def ask_ahead(folder: Path, ahead: ScoresAhead, reward: dict[str, Any], rows: list[RolloutRow]) -> list[int]:
    """As the flow does, with those rewards that score each sample by itself."""
    kinds = [one.model_dump(mode="json") for one in RewardSpec.model_validate(reward).rewards if one.sample_by_sample]
    asked = job(folder, rewards=kinds, responses=[as_document(row) for row in rows])
    scored: list[int] = score_ahead(asked, ahead)["scored"]
    return scored


def table(folder: Path, ahead: ScoresAhead | None, reward: dict[str, Any]) -> bytes:
    """The scores as they are written."""
    asked = job(folder, reward=reward)
    score_rollouts(asked, ahead)
    return (asked.output / "scores.parquet").read_bytes()


def asked_for(server: RewardServer) -> Counter[str]:
    """How often the server saw each response."""
    return Counter(sample["response"] for document in server.asked for sample in document["samples"])


ONCE = Counter(row.response for row in ROLLOUTS)


def http(server: RewardServer, **options: Any) -> dict[str, Any]:
    return {"sources": [{"kind": "http", "url": server.url, **options}]}


@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_each_sample_is_asked_for_once_and_the_bytes_are_the_same(folder: Path, batch_size: int) -> None:
    with reward_server(lengths) as server:
        reward, ahead = http(server, batch_size=batch_size), ScoresAhead()
        alone = table(folder, ScoresAhead(), reward)
        assert asked_for(server) == ONCE
        server.asked.clear()
        assert ask_ahead(folder, ahead, reward, ROLLOUTS[5:7]) == [0, 1]
        assert ask_ahead(folder, ahead, reward, [ROLLOUTS[0], *ROLLOUTS[5:7]]) == [0, 1, 2]
        assert asked_for(server) == Counter(ROLLOUTS[number].response for number in (0, 5, 6))
        assert table(folder, ahead, reward) == alone
        assert asked_for(server) == ONCE


def test_all_may_be_scored_ahead(folder: Path) -> None:
    with reward_server(lengths) as server:
        reward, ahead = http(server), ScoresAhead()
        ask_ahead(folder, ahead, reward, ROLLOUTS[::-1])
        table(folder, ahead, reward)
        assert asked_for(server) == ONCE


def test_scores_in_parts_are_remembered_as_they_are(folder: Path) -> None:
    def by_token(_: int, document: Any) -> Answer:
        return 200, {}, {"scores": [[0.5, len(sample["response"])] for sample in document["samples"]]}

    with reward_server(by_token) as server:
        reward, ahead = http(server), ScoresAhead()
        alone = table(folder, None, reward)
        ask_ahead(folder, ahead, reward, ROLLOUTS[2:])
        assert table(folder, ahead, reward) == alone
        assert asked_for(server) == Counter(2 * list(ONCE.elements()))


def test_of_a_weighted_sum_those_parts_are_asked_ahead_that_score_each_sample_alone(folder: Path) -> None:
    """One function says so, the other does not; a rule never is."""

    def functions(notes: Path) -> list[dict[str, Any]]:
        one = {"function": "rewards.py:noted", "weight": 0.5}
        return [
            {**one, "name": "alone", "while_sampling": True, "options": {"notes": str(notes / "alone")}},
            {**one, "name": "together", "options": {"notes": str(notes / "together")}},
            {"kind": "regex", "pattern": "x", "weight": 0.25},
        ]

    with reward_server(lengths) as server:
        reward = {"sources": [*http(server)["sources"], *functions(folder)]}
        ahead = ScoresAhead()
        assert ask_ahead(folder, ahead, reward, ROLLOUTS[:3]) == [0, 1, 2]
        assert (folder / "alone").read_text().split() == [row.response for row in ROLLOUTS[:3]]
        assert not (folder / "together").exists()
        mixed = table(folder, ahead, reward)
        assert asked_for(server) == ONCE
        for name in ("alone", "together"):
            assert Counter((folder / name).read_text().split()) == ONCE
        assert table(folder, None, reward) == mixed
    scores = [row.score for row in read_scores(max(folder.glob("job-*"), key=number_of) / "scores.parquet")]
    assert scores == [len(row.response) * 2 + (0.25 if "x" in row.response else 0.0) for row in ROLLOUTS]


def number_of(folder: Path) -> int:
    return int(folder.name.removeprefix("job-"))


def test_what_a_dead_engine_had_remembered_is_asked_again(folder: Path) -> None:
    with reward_server(lengths) as server:
        reward = http(server)
        ask_ahead(folder, ScoresAhead(), reward, ROLLOUTS)
        alone = table(folder, ScoresAhead(), reward)
        assert asked_for(server) == Counter(2 * list(ONCE.elements()))
        assert table(folder, None, reward) == alone


@pytest.mark.parametrize("change", ["reward", "response", "tokens", "sample", "code"])
def test_the_score_of_anything_else_is_not_taken(folder: Path, change: str) -> None:
    """Remembered under one thing that is other than in the job that scores all."""
    with reward_server(lengths) as server:
        reward, ahead, rows = http(server), ScoresAhead(), list(ROLLOUTS)
        given = http(server, timeout_s=30.0) if change == "reward" else reward
        if change in ("response", "tokens", "sample"):
            other = {"response": "other", "response_token_ids": [9, 1], "sample_index": 5}
            name = {"response": "response", "tokens": "response_token_ids", "sample": "sample_index"}[change]
            rows = [RolloutRow(**{**vars(row), name: other[name]}) for row in rows]
        asked = job(
            folder,
            rewards=[one.model_dump(mode="json") for one in RewardSpec.model_validate(given).rewards],
            responses=[as_document(row) for row in rows],
        )
        if change == "code":
            asked = Job(
                "", {**asked.inputs, "sources": JobInput(folder, "1" * 64)}, asked.output, asked.spec, asked.progress
            )
        score_ahead(asked, ahead)
        server.asked.clear()
        table(folder, ahead, reward)
        assert asked_for(server) == ONCE


def test_what_was_used_is_forgotten_once_it_is_written_and_not_before(folder: Path) -> None:
    """A job that fails is tried again, and takes the same scores; a later iteration asks anew."""
    broken = [True]

    def sometimes(number: int, document: Any) -> Answer:
        down = broken[0] and any("a" in sample["response"] for sample in document["samples"])
        return (503, {}, "down") if down else lengths(number, document)

    with reward_server(sometimes) as server:
        reward, ahead = http(server, retries=0, batch_size=16), ScoresAhead()
        ask_ahead(folder, ahead, reward, ROLLOUTS[2:])
        reward["max_failed_fraction"] = 0.1
        with pytest.raises(RewardFailed, match=r"2 of 8 responses have no score"):
            table(folder, ahead, reward)
        broken[0] = False
        server.asked.clear()
        table(folder, ahead, reward)
        assert asked_for(server) == Counter(row.response for row in ROLLOUTS[:2])
        server.asked.clear()
        table(folder, ahead, reward)
        assert asked_for(server) == ONCE


def test_what_was_scored_ahead_for_the_next_iteration_stays(folder: Path) -> None:
    """With `schedule: overlapped` the next responses come before these are written."""
    following = [RolloutRow("a", sample, [5], [9, 1], "next", [0.0, 0.0], "stop") for sample in (0, 1)]
    with reward_server(lengths) as server:
        reward, ahead = http(server), ScoresAhead()
        ask_ahead(folder, ahead, reward, [*following, *ROLLOUTS[:2]])
        table(folder, ahead, reward)
        assert ask_ahead(folder, ahead, reward, following) == [0, 1]
        assert asked_for(server) == ONCE + Counter({"next": 2})


@pytest.mark.parametrize("status", [400, 503])
@pytest.mark.parametrize("bad", [ROLLOUTS[3:4], ROLLOUTS[3:6]], ids=["one", "three"])
def test_what_alone_has_no_score_is_as_without(folder: Path, status: int, bad: list[RolloutRow]) -> None:
    """Some responses are refused, or fail: among others that are answered they have no score, also where they are the
    only ones that are left, or came alone ahead."""

    def answer(number: int, document: Any) -> Answer:
        poison = {sample["response"] for sample in document["samples"]} & {row.response for row in bad}
        return (status, {}, "bad") if poison else lengths(number, document)

    with reward_server(answer) as server:
        reward = {**http(server, **ONE_BY_ONE, concurrency=1), "max_failed_fraction": 0.5}
        alone = table(folder, None, reward)
        server.asked.clear()
        ahead, good = ScoresAhead(), [row for row in ROLLOUTS if row not in bad]
        assert ask_ahead(folder, ahead, reward, good) == list(range(len(good)))
        assert ask_ahead(folder, ahead, reward, bad) == []
        assert table(folder, ahead, reward) == alone
        asks_whether_it_answers = Counter([good[0].response] if status == 503 and len(bad) == 3 else [])
        assert asked_for(server) == ONCE + Counter(row.response for row in bad) + asks_whether_it_answers


def test_what_was_only_measured_is_no_score(folder: Path) -> None:
    """A server that has no score yet, but something that it measured, is asked again by the stage."""
    asked = set[str]()

    def later(_: int, document: Any) -> Answer:
        responses = [sample["response"] for sample in document["samples"]]
        scores = [{"score": float(len(text)) if text in asked else None, "seen": 1} for text in responses]
        asked.update(responses)
        return 200, {}, {"scores": scores}

    with reward_server(later) as server:
        reward, ahead = http(server), ScoresAhead()
        assert ask_ahead(folder, ahead, reward, ROLLOUTS) == []
        later_on = table(folder, ahead, reward)
        assert asked_for(server) == Counter(2 * list(ONCE.elements()))
        assert table(folder, None, reward) == later_on


@pytest.mark.parametrize("name", ["one_is_not_finite", "one_raises"])
def test_what_alone_has_no_score_by_a_function_is_as_without(folder: Path, name: str) -> None:
    reward, bad = {"sources": [{"function": f"rewards.py:{name}", "while_sampling": True}]}, ROLLOUTS[3]
    alone, ahead = table(folder, None, reward), ScoresAhead()
    assert ask_ahead(folder, ahead, reward, [bad]) == []
    assert ask_ahead(folder, ahead, reward, [row for row in ROLLOUTS if row is not bad]) == list(range(7))
    assert table(folder, ahead, reward) == alone
    scores = read_scores(max(folder.glob("job-*"), key=number_of) / "scores.parquet")
    assert [row.prompt_id for row in scores if row.score is None] == ["b"]


def test_a_server_that_refuses_all_or_is_down_is_told_by_the_stage_alone_as_without(folder: Path) -> None:
    for status, error in ((400, InputError), (503, RewardFailed)):
        with reward_server(lambda *_, status=status: (status, {}, "no")) as server:
            reward, ahead = http(server, **ONE_BY_ONE), ScoresAhead()
            assert ask_ahead(folder, ahead, reward, ROLLOUTS[:2]) == []
            with pytest.raises(error) as with_ahead:
                table(folder, ahead, reward)
            with pytest.raises(error) as without:
                table(folder, None, reward)
            assert str(with_ahead.value) == str(without.value)


def test_code_that_was_other_when_it_scored_ahead_is_refused_although_its_file_is_back(folder: Path) -> None:
    reward = {"sources": [{"function": "rewards.py:one_raises", "while_sampling": True}]}
    key = content_digest({"rewards.py:one_raises": source_digest("rewards.py:one_raises", Sources(folder))})
    (folder / "rewards.py").write_text(CODE.replace("1.0 / ", "2.0 / "))
    assert ask_ahead(folder, ScoresAhead(), reward, ROLLOUTS[:2]) == [0, 1]
    (folder / "rewards.py").write_text(CODE)
    asked = job(folder, reward=reward)
    named = Job("", {**asked.inputs, "sources": JobInput(folder, key)}, asked.output, asked.spec, asked.progress)
    with pytest.raises(InputError, match=r"rewards.py:one_raises changed after this run had read it"):
        score_rollouts(named)


def test_no_more_is_remembered_than_there_is_room_for() -> None:
    ahead = ScoresAhead(most=2)
    ahead.keep("r", ["a", "b", "c", "d"], [1.0, None, 2.0, 3.0])
    assert ahead.of(["a", "b", "c", "d"]) == [None, None, 2.0, 3.0]
    assert (ahead.given("r"), ahead.given("s")) == (3, 0)
