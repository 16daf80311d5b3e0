"""The reward `judge` against a real server: its rubric, the line that counts, and answers that are none."""

from __future__ import annotations

from typing import Any

import pytest

from ppo_core.records import InputError, PromptRow
from ppo_core.scoring.reward import Sample
from tests.ppo_core.scoring.reward_server import ROWS, SAMPLES, Answer, reward_server, rewards, scores


def says(*texts: str) -> Any:
    """A chat model that says these in turn."""
    return lambda number, _: (200, {}, {"choices": [{"message": {"content": texts[number % len(texts)]}}]})


def test_a_judge_reads_the_rubric_and_its_last_line_counts() -> None:
    with reward_server(says("Well done.\n\nScore: 7.5")) as server:
        found = rewards("judge", f"{server.url}/v1/", temperature=0.5, max_tokens=9)
        found.check_rows(ROWS)
        assert scores(found, SAMPLES[:1]) == [7.5]
    content = "Rate  to prompt 0; right is 0. {} End with a line `Score: NUMBER`."
    assert server.asked == [
        {"model": "m", "messages": [{"role": "user", "content": content}], "temperature": 0.5, "max_tokens": 9}
    ]
    chat = PromptRow("c", [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "5+5="}], [1], 1, {})
    with reward_server(says("**Score: `3`**/10")) as server:
        assert scores(rewards("judge", server.url), [Sample(chat, "10")]) == [3.0]
    assert "to system: Be brief.\n\nuser: 5+5=; right" in server.asked[0]["messages"][0]["content"]


def test_of_messages_that_only_call_tools_a_judge_reads_an_empty_text() -> None:
    calls = [{"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}]
    said = {"role": "tool", "content": "10", "tool_call_id": "1"}
    for message in ({"role": "assistant"}, {"role": "assistant", "content": None}):
        chat = PromptRow("c", [{**message, "tool_calls": calls}, said], [1], 1, {})
        with reward_server(says("Score: 3")) as server:
            assert scores(rewards("judge", server.url), [Sample(chat, "10")]) == [3.0]
        assert "to assistant: \n\ntool: 10; right" in server.asked[0]["messages"][0]["content"]


@pytest.mark.parametrize(
    "text", ["I like it.", "Score: 11", "Score: 4/5", "Score: 7\nOr perhaps 8.", "Score: seven", ""]
)
def test_prose_is_asked_for_again_and_is_never_a_zero(text: str) -> None:
    with reward_server(says(text, "Score: 4")) as server:
        assert scores(rewards("judge", server.url), SAMPLES[:1]) == [4.0]
    with reward_server(says(text)) as server:
        (parts,) = rewards("judge", server.url, retries=2).score(SAMPLES[:1])
    assert len(server.asked) == 3
    assert parts.scores == {"judge": None}
    assert "not scored by judge: the judge" in str(parts.error())


def test_a_judge_that_answers_all_in_prose_ends_the_run() -> None:
    with reward_server(says("I like it.")) as server:
        found = rewards("judge", server.url, retries=1)
        message = "gave none of 10 samples an answer .* the last one .*like it.*2 tries.* the reward's `rubric`"
        with pytest.raises(InputError, match=message):
            found.score(SAMPLES)
        assert len(server.asked) == 20

    def one_is_too_long(at: int, document: Any) -> Answer:
        return (413, {}, "too long") if at == 4 else says("I like it.")(at, document)

    with reward_server(one_is_too_long) as server, pytest.raises(InputError, match=message):
        rewards("judge", server.url, retries=1).score(SAMPLES)
    with reward_server(says("I like it.")) as server:
        found = rewards("judge", server.url, retries=1)
        assert scores(found, SAMPLES[:2]) == [None, None]  # two tell nothing, as in a trial


@pytest.mark.parametrize("before", [0, 2, 9])
def test_samples_that_a_judge_answers_in_prose_have_no_score_where_another_has_one(before: int) -> None:
    def answer(_: int, document: Any) -> Answer:
        read = "Rate " + "x" * before + " to" in document["messages"][0]["content"]
        return says("Score: 4" if read else "Hm.")(0, document)

    with reward_server(answer) as server:
        found = scores(rewards("judge", server.url, retries=4, concurrency=1))
    assert found == [4.0 if number == before else None for number in range(10)]


def test_an_answer_that_was_cut_is_no_score() -> None:
    cut = {"choices": [{"message": {"content": "Score: 1"}, "finish_reason": "length"}]}
    with reward_server(lambda *_: (200, {}, cut)) as server:
        (parts,) = rewards("judge", server.url, retries=0).score(SAMPLES[:1])
    assert parts.error() == "not scored by judge: the judge's answer was cut at max_tokens=512 (after 1 try)"


@pytest.mark.parametrize("document", [{"error": "no such model"}, {"choices": [{"message": {"content": ["x"]}}]}, []])
def test_a_judge_that_is_no_chat_model_is_told_at_once(document: Any) -> None:
    with reward_server(lambda *_: (200, {}, document)) as server:  # noqa: SIM117
        with pytest.raises(InputError, match="not a chat completion: give the base address of an OpenAI-compatible"):
            rewards("judge", server.url).score(SAMPLES)
    with pytest.raises(InputError, match="the reward judge compares with the column 'answer', which row 1 "):
        rewards("judge", server.url).check_rows([PromptRow("a", "p", [1], None, {})])
