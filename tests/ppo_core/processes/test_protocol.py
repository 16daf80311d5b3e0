"""The engine's side of the protocol, spoken to a process over its pipes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


def talk_to_engine(*jobs: dict[str, Any]) -> tuple[list[dict[str, Any]], subprocess.CompletedProcess[str]]:
    """All replies to the jobs, and how the process ended."""
    blank = {"inputs": {}, "output": None, "spec": {}}
    lines = "".join(json.dumps({"id": number, **blank, **job}) + "\n" for number, job in enumerate(jobs, 1))
    done = subprocess.run(
        [sys.executable, "-m", "tests.ppo_core.processes.protocol_program"],
        input=lines, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    return [json.loads(line) for line in done.stdout.splitlines()], done


def test_jobs_are_answered_in_order_until_the_input_ends() -> None:
    given = {"data": {"path": "/data", "digest": "abc"}}
    job = {"name": "echo", "inputs": given, "output": "/out", "spec": {"text": "ä\n{}"}}
    replies, done = talk_to_engine(job, {"name": "echo"})
    assert [(reply["event"], reply["id"]) for reply in replies] == [("result", 1), ("result", 2)]
    first, second = (reply["result"] for reply in replies)
    assert first["pid"] == second["pid"]
    assert (first["inputs"], first["output"], first["spec"]) == ({"data": ["/data", "abc"]}, "/out", {"text": "ä\n{}"})
    assert all(reply["seconds"] >= 0 for reply in replies)
    assert (done.returncode, done.stderr) == (0, "")


def test_prints_go_to_the_log_and_break_no_reply() -> None:
    replies, done = talk_to_engine({"name": "talk"}, {"name": "echo"})
    assert [(reply["event"], reply["id"]) for reply in replies] == [("progress", 1), ("result", 1), ("result", 2)]
    assert replies[0] == {"event": "progress", "id": 1, "done": 1, "total": 2, "note": "half – way"}
    assert sorted(done.stderr.splitlines()) == ["from a child", "from os.write", "from print"]


def test_rows_come_before_the_end_to_who_asks_for_them() -> None:
    replies, _ = talk_to_engine({"name": "hand_on"}, {"name": "hand_on", "reports_rows": True})
    assert [(reply["event"], reply["id"]) for reply in replies] == [("result", 1), ("progress", 2), ("result", 2)]
    assert [reply["result"] for reply in replies[::2]] == [{"wanted": False}, {"wanted": True}]
    assert replies[1] == {
        "event": "progress", "id": 2, "done": 1, "total": 2, "note": "rows", "rows": [{"text": "ä"}, {"text": "\n"}]
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "kind", "message", "retryable"),
    [
        ("refuse", "InputError", "no such column: add it", False),
        ("fail", "LookupError", "no server", True),
        ("unspeakable", "TypeError", "Object of type object is not JSON serializable", True),
        ("no_such_job", "KeyError", "no_such_job", True),
    ],
)
def test_errors_are_replies_and_the_engine_goes_on(name: str, kind: str, message: str, retryable: bool) -> None:
    replies, done = talk_to_engine({"name": name}, {"name": "echo"})
    assert [reply["event"] for reply in replies] == ["error", "result"]
    error = replies[0]["error"]
    assert (error["type"], error["retryable"]) == (kind, retryable)
    assert message in error["message"]
    assert "Traceback" in done.stderr
    assert done.returncode == 0


@pytest.mark.parametrize(("name", "retryable"), [("break_down", True), ("break_down_for_good", False)])
def test_a_defect_is_reported_and_ends_the_process(name: str, retryable: bool) -> None:
    replies, done = talk_to_engine({"name": name}, {"name": "echo"})
    assert [reply["event"] for reply in replies] == ["error"]
    assert (replies[0]["error"]["retryable"], replies[0]["error"]["ending"]) == (retryable, True)
    assert "half the weights moved" in replies[0]["error"]["message"]
    assert done.returncode == 1
