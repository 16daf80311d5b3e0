"""A reward server with bad samples, a bad moment or a bad end: which samples lose their score, and when it is down."""

from __future__ import annotations

from typing import Any

import pytest

from ppo_core.records import InputError
from ppo_core.scoring import endpoint
from ppo_core.scoring.reward import RewardFailed
from tests.ppo_core.scoring.reward_server import SAMPLES, Answer, lengths, reward_server, rewards, scores

BAD: Answer = (500, {}, "cannot score this one")
PAGE: Answer = (200, {"Content-Type": "text/html"}, "<html>starting")
SQUARED = "\u00b2".encode().decode("latin-1")
"""A header that is read as U+00B2: a digit, but no number."""


@pytest.mark.parametrize("concurrency", [1, 2, 3])
def test_bad_samples_at_the_end_alone_have_no_score(concurrency: int) -> None:
    """However many: the server still answers what it answered before."""

    def answer(number: int, document: Any) -> Answer:
        return BAD if len(document["samples"][0]["response"]) > 3 else lengths(number, document)

    with reward_server(answer) as server:
        found = rewards("http", server.url, batch_size=1, concurrency=concurrency, retries=1)
        assert scores(found) == [0.0, 1.0, 2.0, 3.0, *[None] * 6]


def test_a_judge_with_bad_samples_at_the_end_is_not_down() -> None:
    def answer(_: int, document: Any) -> Answer:
        bad = "Rate xxx" in document["messages"][0]["content"]
        return BAD if bad else (200, {}, {"choices": [{"message": {"content": "Score: 4"}}]})

    with reward_server(answer) as server:
        found = scores(rewards("judge", server.url, concurrency=1, retries=0))
    assert found == [4.0] * 3 + [None] * 7


def test_a_server_that_goes_down_amid_the_samples_is_told_and_not_asked_for_the_rest() -> None:
    with reward_server(lambda number, document: lengths(number, document) if number < 2 else BAD) as server:
        with pytest.raises(RewardFailed, match=r"keeps answering 500 .* \(after 2 tries of each of 3 requests\)"):
            scores(rewards("http", server.url, batch_size=1, concurrency=1, retries=1))
        assert len(server.asked) == 2 + 3 * 2 + 2  # three, and what it answered before, two tries each
        assert server.asked[-1] == server.asked[1]


@pytest.mark.parametrize("passing", [PAGE, (200, {}, '{"scores": [NaN]}'), (503, {"Retry-After": SQUARED}, "busy")])
@pytest.mark.parametrize("batch_size", [5, 10])
def test_of_few_requests_a_passing_trouble_is_tried_again(passing: Answer, batch_size: int) -> None:
    with reward_server(lambda number, document: passing if number == 0 else lengths(number, document)) as server:
        assert scores(rewards("http", server.url, batch_size=batch_size)) == [float(n) for n in range(10)]
        assert len(server.asked) == 10 // batch_size + 1


def test_of_few_requests_answers_that_stay_wrong_end_the_run_after_their_tries() -> None:
    with reward_server(lambda *_: PAGE) as server:
        with pytest.raises(InputError, match="answered text/html, not JSON: '<html>starting'"):
            scores(rewards("http", server.url, batch_size=5, retries=2))
        assert len(server.asked) == 6


def test_an_answer_without_end_is_read_to_a_limit_and_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is for each answer, and for each of its samples where they are many."""
    monkeypatch.setattr(endpoint, "MIB", 100)
    monkeypatch.setattr(endpoint, "LONGEST_ANSWER_MIB", 4)

    def answer(number: int, document: Any) -> Answer:
        found: dict[str, Any] = lengths(number, document)[2]
        bad = document["samples"][0]["response"] == "xxxxx"
        return 200, {}, {**found, "note": "x" * (500 if bad else 100 * len(found["scores"]) - 100)}

    with reward_server(answer) as server:
        assert scores(rewards("http", server.url, batch_size=10, retries=0)) == [float(n) for n in range(10)]
        found = rewards("http", server.url, batch_size=1, retries=0).score(SAMPLES)
    assert [parts.scores["http"] for parts in found] == [0.0, 1.0, 2.0, 3.0, 4.0, None, 6.0, 7.0, 8.0, 9.0]
    assert "answered with more than 4 MiB, '{" in (found[5].error() or "")


def test_a_status_counts_also_with_an_answer_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "LONGEST_ANSWER_MIB", 0)
    monkeypatch.setattr(endpoint, "MIB", 1)
    with (
        reward_server(lambda *_: (404, {}, "no such page" * 1000)) as server,
        pytest.raises(InputError, match="404 Not"),
    ):
        rewards("http", server.url).score(SAMPLES)


@pytest.mark.parametrize("charset", ["nonsense", "hex", "latin-1"])
def test_an_answer_is_read_in_any_encoding_that_it_names(charset: str) -> None:
    kind = {"Content-Type": f"application/json; charset={charset}"}
    with reward_server(lambda number, document: (200, kind, lengths(number, document)[2])) as server:
        assert scores(rewards("http", server.url)) == [float(n) for n in range(10)]
