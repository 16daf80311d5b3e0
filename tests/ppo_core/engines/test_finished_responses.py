"""Finished responses leave the rollout engine before the job's end, each once, where the job asks for that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from infra.engines.process import EngineInput, EngineJob, EngineProgress
from ppo_core.data.tables import read_rollouts
from ppo_core.engines import finished
from ppo_core.engines.finished import FinishedResponses
from ppo_core.processes.protocol import Job
from ppo_core.records import FinishedResponse, RolloutRow
from tests.ppo_core.engines.engine_jobs import TIMEOUT_S, Client, generate_spec, write_dataset
from tests.ppo_core.tiny_policies import make_policy

pytest_plugins = ["tests.ppo_core.engines.engine_fixtures"]

PROMPTS = [[4 + (13 * n + k) % 60 for k in range(3 + n)] for n in range(4)]
# One token in 66 ends a response: the first end after a few steps, the last after hundreds. So many that to sample them
# takes longer than the half second after which the first are told, on any machine.
LONG = {"samples_per_prompt": 64, "max_response_tokens": 240}
RESPONSES = 64 * len(PROMPTS)
Message = tuple[int, int, list[int]]


def response(number: int, tokens: int = 2) -> RolloutRow:
    return RolloutRow("p", number, [5], [7] * tokens, f"text {number}", [0.0] * tokens, "stop")


def watched(*, wanted: bool) -> tuple[Job, list[Message], list[tuple[int, int]]]:
    """A job, the rows that it hands on, and what it says of its progress."""
    reports: list[Message] = []
    said: list[tuple[int, int]] = []

    def report(done: int, total: int, note: str, rows: Sequence[Mapping[str, Any]]) -> None:
        reports.append((done, total, [row["sample_index"] for row in rows]))

    job = Job("", {}, Path(), {}, lambda done, total, _: said.append((done, total)), report=report if wanted else None)
    return job, reports, said


def test_rows_are_told_once_and_come_back_in_the_order_of_their_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    job, reports, said = watched(wanted=True)
    responses = FinishedResponses(job, 4)
    responses.add(2, response(2))
    responses.tell()  # too soon
    assert (reports, said) == ([], [])
    monkeypatch.setattr(finished, "TELL_EVERY_S", -1.0)
    responses.tell()
    responses.tell()
    for number in (3, 0, 1):
        responses.add(number, response(number))
    assert responses.all() == [response(number) for number in range(4)]
    assert reports == [(1, 4, [2]), (4, 4, [3, 0, 1])]
    assert said == [(1, 4)]


def test_nobody_is_told_rows_who_did_not_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finished, "TELL_EVERY_S", -1.0)
    job, reports, said = watched(wanted=False)
    responses = FinishedResponses(job, 1)
    responses.add(0, response(0))
    responses.tell()
    assert responses.all() == [response(0)]
    assert (reports, said) == ([], [(1, 1)])


def test_no_message_has_more_tokens_than_a_line_can_carry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finished, "MOST_TOKENS", 10)
    job, reports, _ = watched(wanted=True)
    responses = FinishedResponses(job, 5)
    for number, tokens in enumerate((4, 6, 1, 30, 2)):
        responses.add(number, response(number, tokens))
    responses.all()
    assert reports == [(5, 5, [0, 1]), (5, 5, [2]), (5, 5, [3]), (5, 5, [4])]


def test_vllms_responses_come_before_the_last_is_sampled(rollout: Client, tmp_path: Path) -> None:
    checkpoint = make_policy(tmp_path / "A" / "policy").parent
    dataset = write_dataset(tmp_path / "dataset", PROMPTS)
    given = {"checkpoint": EngineInput(checkpoint, "A"), "dataset": EngineInput(dataset, "D")}
    tables: list[bytes] = []
    for reports_rows in (True, False):
        output, seen = rollout.output(), list[EngineProgress]()
        job = EngineJob("generate_rollouts", given, output, generate_spec(**LONG), reports_rows)
        rollout.engine.run(job, timeout_s=TIMEOUT_S, on_progress=seen.append)
        tables.append((output / "rollouts.parquet").read_bytes())
        rows = [FinishedResponse.model_validate(row) for progress in seen for row in progress.rows]
        if not reports_rows:
            assert rows == []
            continue
        expected = [
            FinishedResponse(
                prompt_id=row.prompt_id,
                sample_index=row.sample_index,
                response=row.response,
                response_token_ids=tuple(row.response_token_ids),
            )
            for row in read_rollouts(output / "rollouts.parquet")
        ]
        assert len(rows) == len(expected) == RESPONSES
        assert sorted(rows, key=repr) == sorted(expected, key=repr)
        first = next(progress for progress in seen if progress.rows)
        assert 0 < first.done < first.total == RESPONSES
    assert tables[0] == tables[1]
