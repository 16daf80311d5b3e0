"""The reward `http` against a real server: what it is asked, and what its troubles come to."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ppo_core.processes.plugins import Sources
from ppo_core.records import InputError, RolloutRow
from ppo_core.scoring import reward
from ppo_core.scoring.reward import RewardFailed, Span, SpanScores
from ppo_core.scoring.weighted import WeightedRewards
from ppo_core.spec import RewardSpec
from tests.ppo_core.scoring.reward_server import ROWS, RUBRIC, SAMPLES, Answer, lengths, reward_server, rewards, scores


def test_the_proxy_of_the_environment_is_asked_and_no_login_of_the_user_is_sent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / ".netrc").write_text("default login me password secret\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    with reward_server(lengths) as server:
        assert scores(rewards("http", server.url)) == [float(n) for n in range(10)]
        monkeypatch.setenv("http_proxy", server.url)
        assert scores(rewards("http", "http://no-such-host.invalid/score")) == [float(n) for n in range(10)]
    assert not any("Authorization" in headers for headers in server.headers)


def test_batches_in_flight_side_by_side_come_back_in_order() -> None:
    with reward_server(lengths, together=3) as server:
        assert scores(rewards("http", server.url, batch_size=3, concurrency=3)) == [float(n) for n in range(10)]
    assert sorted(len(document["samples"]) for document in server.asked) == [1, 3, 3, 3]
    assert server.most_in_flight == 3
    first = next(d for d in server.asked if d["samples"][0]["response"] == "")
    assert first["samples"][1] == {
        "prompt": "prompt 1", "response": "x", "token_ids": None, "reference_answer": 1, "metadata": {"level": 1},
    }  # fmt: skip


def test_the_server_knows_the_tokens_that_were_sampled() -> None:
    def one_for_each(_: int, document: Any) -> Answer:
        return 200, {}, {"scores": [[1.0] * len(sample["token_ids"]) for sample in document["samples"]]}

    with reward_server(one_for_each) as server:
        (found,) = rewards("http", server.url).score([replace(SAMPLES[0], token_ids=(7, 2, 1))])
    assert found.scores == {"http": 3.0}


def test_a_key_comes_from_the_environment_and_is_missed_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "a secret\n")
    with reward_server(lengths) as server:
        scores(rewards("http", server.url, key_variable="JUDGE_KEY"))
    assert server.headers[0]["Authorization"] == "Bearer a secret"
    monkeypatch.setenv("JUDGE_KEY", "two\nlines")
    with pytest.raises(InputError, match="JUDGE_KEY has line breaks or control characters"):
        rewards("http", server.url, key_variable="JUDGE_KEY")
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(
        InputError, match=r"takes its key from JUDGE_KEY, which is not set .* list it in PPOFLOW_REWARD_ENV"
    ):
        rewards("http", server.url, key_variable="JUDGE_KEY")


@pytest.mark.parametrize("kind", ["http", "judge"])
def test_samples_go_to_the_servers_that_the_owner_names_alone(kind: str) -> None:
    more = {"model": "m", "rubric": RUBRIC} if kind == "judge" else {}

    def made(url: str, *allowed: str) -> WeightedRewards:
        spec = RewardSpec.model_validate({"sources": [{"kind": kind, "url": url, **more}]})
        return WeightedRewards(spec, Sources(Path(), reward_urls=allowed), "answer")

    for url, allowed in (
        ("http://rewards:8100/score", "http://rewards:8100"),
        ("http://REWARDS/v1", "http://rewards:80"),
        ("https://rewards:443", "https://Rewards"),
    ):
        made(url, "http://other", allowed)
        made(url)
    for url in (
        "http://rewards:8101",
        "https://rewards:8100",
        "http://rewards.evil:8100",
        "http://169.254.169.254",
    ):
        with pytest.raises(
            InputError, match=r"may not send samples to .* only to http://rewards:8100, http://b: .*_URLS"
        ):
            made(url, "http://rewards:8100", "http://b")


@pytest.mark.parametrize("status", [500, 503, 429])
def test_a_passing_trouble_is_tried_again(status: int) -> None:
    def answer(number: int, document: Any) -> Answer:
        return (status, {"Retry-After": "0"}, "<html>busy") if number % 2 == 0 else lengths(number, document)

    said: list[str] = []
    with reward_server(answer) as server:
        assert scores(rewards("http", server.url, said, batch_size=5, concurrency=1)) == [float(n) for n in range(10)]
    assert len(server.asked) == 4
    assert f"http: {status} " in said[0]


def test_a_server_may_give_parts_of_the_text() -> None:
    def answer(number: int, document: Any) -> Answer:
        ends = [len(sample["response"]) for sample in document["samples"]]
        return 200, {}, {"scores": [[{"start": 0, "end": end, "score": 0.5}] * 2 if end else None for end in ends]}

    with reward_server(answer) as server:
        found = rewards("http", server.url).score(SAMPLES)
    assert [parts.scores["http"] for parts in found] == [None, *[1.0] * 9]
    assert found[3].parts["http"] == SpanScores((Span(0, 3, 0.5), Span(0, 3, 0.5)))


def test_a_server_may_give_numbers_beside_the_score() -> None:
    def answer(number: int, document: Any) -> Answer:
        given = [{"score": len(sample["response"]), "format": 0.5, "why": "so"} for sample in document["samples"]]
        return 200, {}, {"scores": [None, 1, *given[2:]]}

    rollouts = [RolloutRow(row.prompt_id, 0, [1], [2], "x" * n, [0.0], "stop") for n, row in enumerate(ROWS)]
    with reward_server(answer) as server:
        rows = rewards("http", server.url).score_rollouts(ROWS, rollouts)
    assert [row.score for row in rows] == [None, *map(float, range(1, 10))]
    assert [row.components.get("http/format") for row in rows] == [None, None, *[0.5] * 8]
    assert all("http/why" not in row.components for row in rows)


def test_one_batch_that_always_fails_has_no_scores_and_the_others_have() -> None:
    def answer(number: int, document: Any) -> Answer:
        broken = any(sample["response"] == "xxx" for sample in document["samples"])
        return (500, {}, "out of memory") if broken else lengths(number, document)

    with reward_server(answer) as server:
        found = rewards("http", server.url, batch_size=2, retries=1)
        rollouts = [RolloutRow(row.prompt_id, 0, [1], [2], "x" * n, [0.0], "stop") for n, row in enumerate(ROWS)]
        rows = found.score_rollouts(ROWS, rollouts)
    assert [row.score for row in rows] == [0.0, 1.0, None, None, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]
    assert rows[2].error == "not scored by http: 500 Internal Server Error: out of memory (after 2 tries)"


def test_bad_batches_among_many_leave_their_samples_alone_without_a_score(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their tries end long after the others were answered: the server is not down."""
    monkeypatch.setattr(reward, "FIRST_PAUSE_S", 0.2)

    def answer(number: int, document: Any) -> Answer:
        bad = document["samples"][0]["response"] in ("x", "xxxx", "xxxxxx")
        return (500, {}, "no") if bad else lengths(number, document)

    with reward_server(answer) as server:
        found = scores(rewards("http", server.url, batch_size=1, retries=1))
    assert found == [0.0, None, 2.0, 3.0, None, 5.0, None, 7.0, 8.0, 9.0]


def test_a_sample_that_the_server_refuses_has_no_score_and_is_not_sent_again() -> None:
    def answer(number: int, document: Any) -> Answer:
        long = len(document["samples"][0]["response"]) > 7
        return (400, {}, "context is 7 tokens") if long else lengths(number, document)

    with reward_server(answer) as server:
        found = rewards("http", server.url, batch_size=1).score(SAMPLES)
    assert [parts.scores["http"] for parts in found] == [*map(float, range(8)), None, None]
    assert str(found[9].error()).endswith("answered 400 Bad Request: context is 7 tokens")
    assert len(server.asked) == 10


def test_of_a_batch_that_is_refused_each_sample_is_asked_for_alone() -> None:
    def answer(number: int, document: Any) -> Answer:
        return (422, {}, "no xxx") if "'xxx'" in str(document) else lengths(number, document)

    with reward_server(answer) as server:
        assert scores(rewards("http", server.url, batch_size=4)) == [0.0, 1.0, 2.0, None, *map(float, range(4, 10))]


WRONG: list[Answer] = [
    (200, {"Content-Type": "text/html"}, "<html>Back soon"),
    (200, {}, {"error": "overloaded"}),
    (200, {}, {"scores": []}),
    (200, {}, '{"scores": [NaN]}'),
    (200, {}, f'{{"scores": [{"1" * 5000}]}}'),
    (200, {}, {"scores": [True]}),
]


@pytest.mark.parametrize("wrong", WRONG, ids=range(6))
def test_a_wrong_answer_among_good_ones_is_asked_for_again(wrong: Answer) -> None:
    with reward_server(lambda number, document: wrong if number == 4 else lengths(number, document)) as server:
        assert scores(rewards("http", server.url, batch_size=1, concurrency=1)) == [float(n) for n in range(10)]
    assert len(server.asked) == 11


@pytest.mark.parametrize("wrong", WRONG, ids=range(6))
def test_a_sample_that_is_always_answered_wrongly_has_no_score_and_the_others_have(wrong: Answer) -> None:
    """Also where it is the first that is asked for."""

    def answer(number: int, document: Any) -> Answer:
        return wrong if document["samples"][0]["response"] in ("", "xxx") else lengths(number, document)

    with reward_server(answer) as server:
        found = rewards("http", server.url, batch_size=1, concurrency=1, retries=1).score(SAMPLES)
    assert [parts.scores["http"] for parts in found] == [None, 1.0, 2.0, None, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]
    assert len(server.asked) == 12
    assert str(found[3].error()).endswith("(after 2 tries)")


@pytest.mark.parametrize("wrong", WRONG, ids=range(6))
def test_three_wrong_answers_before_any_other_end_the_scoring_as_bad_input(wrong: Answer) -> None:
    with reward_server(lambda *_: wrong) as server:
        with pytest.raises(InputError, match=re.escape(server.url)):
            rewards("http", server.url, batch_size=1, concurrency=1, retries=0).score(SAMPLES)
        assert len(server.asked) == 3


def test_two_wrong_answers_are_bad_input_where_nothing_else_was_asked_or_answered() -> None:
    with reward_server(lambda number, _: (400, {}, "no") if number else WRONG[0]) as server:  # noqa: SIM117
        with pytest.raises(InputError, match="not JSON: '<html>Back soon'"):
            rewards("http", server.url, batch_size=5, concurrency=1, retries=0).score(SAMPLES)


def test_a_server_that_is_down_ends_the_scoring_and_is_not_asked_for_the_rest() -> None:
    with reward_server(lambda *_: (502, {}, "no upstream")) as server:
        found = rewards("http", server.url, batch_size=1, concurrency=1, retries=1)
        with pytest.raises(
            RewardFailed, match=r"http: http://.* keeps answering 502 .* no upstream \(after 2 tries of each"
        ):
            found.score(SAMPLES)
    assert len(server.asked) == 6  # three requests, two tries each
    with pytest.raises(RewardFailed, match=r"Cannot connect to host 127.0.0.1"):  # it has ended
        found.score(SAMPLES)


def test_a_server_that_never_answers_is_given_up_at_the_deadline() -> None:
    with reward_server(lengths, delay_s=1.0) as server:
        found = rewards("http", server.url, timeout_s=0.1, retries=0)
        with pytest.raises(RewardFailed, match=r"no answer within timeout_s=0.1 \(after 1 try\)"):
            found.score(SAMPLES)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((400, {}, "what is this"), "answered 400 Bad Request: what is this$"),
        ((404, {}, "no such page"), "answered 404 Not Found: no such page: correct the reward's `url`"),
        ((401, {}, ""), "answered 401 Unauthorized"),
        ((301, {"Location": "/"}, ""), "answered 301"),
        ((200, {"Content-Type": "text/html"}, "<html>Welcome"), "answered text/html, not JSON: '<html>Welcome'"),
        ((200, {}, "[" * 100_000), "answered application/json, not JSON"),
        ((200, {}, [1.0]), r'answered \[1.0\]: it must answer an object with the list "scores"'),
        ((200, {}, {"scores": [1.0]}), "returned 1 scores for 10 completions"),
        ((200, {}, '{"scores": [NaN, 1, 1, 1, 1, 1, 1, 1, 1, 1]}'), "score 0 is nan"),
        ((200, {}, {"scores": ["1"] * 10}), r"score 0 is '1' \(str\)"),
        ((200, {}, {"scores": [1] * 9 + [[0.5, False]]}), r"score 9 is \[0.5, False\]: true and false are no sc"),
        ((200, {}, f"[{'1' * 5000}]"), "answered with an integer that is too long to be read, '.1*[.]{3}: let it"),
    ],
)
def test_what_a_server_keeps_answering_is_told_and_what_it_refuses_at_once(answer: Answer, message: str) -> None:
    with reward_server(lambda *_: answer) as server:
        with pytest.raises(InputError, match=message):
            rewards("http", server.url, retries=2).score(SAMPLES)
        assert len(server.asked) == (3 if answer[0] == 200 else 1)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"kind": "http", "url": "rewards:8000"}, "is not an HTTP address: write http://host:port/path"),
        ({"kind": "http", "url": "ftp://host/x"}, "is not an HTTP address"),
        ({"kind": "http", "url": "http://host:99999/"}, "is not an HTTP address"),
        ({"kind": "http", "url": "http://me:secret@host/"}, "the url holds a login, which would be stored"),
        (
            {"kind": "http", "url": "http://host/x?a=1&api_key=s"},
            r"what looks like a key .api_key., .* into key_variable",
        ),
        ({"kind": "judge", "url": "http://h", "model": "m", "rubric": "Rate it."}, "has no {response}"),
        (
            {"kind": "judge", "url": "http://h", "model": "m", "rubric": "{response} {x}"},
            "has the unknown field {x}: use",
        ),
        ({"kind": "judge", "url": "http://h", "model": "m", "rubric": "{response} {"}, "unbalanced braces"),
        (
            {"kind": "judge", "url": "http://h", "model": "m", "rubric": "{response:.2f}"},
            "has a format or conversion after response: write {response} alone",
        ),
        ({"kind": "judge", "url": "http://h?a=1", "model": "m", "rubric": "{response}"}, "is not a base address"),
        (
            {"kind": "judge", "url": "http://h", "model": "m", "rubric": "{response}", "lowest": 10},
            "lowest=10 must be less than highest=10",
        ),
    ],
)
def test_a_server_that_cannot_be_asked_is_refused_in_the_spec(source: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RewardSpec.model_validate({"sources": [source]})


@pytest.mark.parametrize("query", ["max_tokens=512", "tokenizer=gpt2", "keywords=a", "code=python"])
def test_a_url_may_have_a_query_without_a_key(query: str) -> None:
    RewardSpec.model_validate({"sources": [{"kind": "http", "url": f"http://h/x?{query}"}]})
