from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from infra.engines.guarded_process import KILL_TIMEOUT_S
from infra.engines.process import (
    Engine,
    EngineClosed,
    EngineDied,
    EngineInput,
    EngineJob,
    EngineJobError,
    EngineProcess,
    EngineReply,
    EngineTimeout,
)
from infra.engines.protocol import ProtocolViolation, decode_reply
from tests.processes import outlived
from tests.waiting import FOR_EVER_S, LONG_S

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = "tests.infra.engines.echo_engine"


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineProcess]:
    monkeypatch.chdir(ROOT)
    engine = EngineProcess("echo", PROGRAM, log=tmp_path / "logs" / "echo.log")
    yield engine
    engine.close()


def job(name: str, **spec: Any) -> EngineJob:
    return EngineJob(name=name, inputs={}, output=None, spec=spec)


def run(engine: Engine, name: str, *, timeout_s: float = LONG_S, **spec: Any) -> EngineReply:
    return engine.run(job(name, **spec), timeout_s=timeout_s)


ASLEEP = job("sleep", seconds=FOR_EVER_S)


def pid_of(engine: Engine) -> int:
    return int(run(engine, "echo").result["pid"])


def test_a_job_goes_there_and_its_reply_comes_back(engine, tmp_path):
    inputs = {"experience": EngineInput(path=Path("here"), digest="9f")}
    sent = EngineJob(name="echo", inputs=inputs, output=tmp_path, spec={"text": "å\n", "rows": [1.5, None]})
    began = time.monotonic()
    reply = engine.run(sent, timeout_s=LONG_S)
    assert reply.result["inputs"] == {"experience": {"path": str(ROOT / "here"), "digest": "9f"}}
    assert reply.result["output"] == str(tmp_path)
    assert reply.result["spec"] == sent.spec
    assert 0 <= reply.seconds < time.monotonic() - began


def test_documents_larger_than_a_pipe_pass(engine):
    text = "x" * 1_000_000
    assert run(engine, "echo", text=text).result["spec"]["text"] == text


def test_the_process_stays_between_jobs(engine):
    assert pid_of(engine) == pid_of(engine)


def test_prints_land_in_the_log(engine, tmp_path):
    run(engine, "talk", text='{"event": "result"}')
    log = (tmp_path / "logs" / "echo.log").read_text()
    assert log == '{"event": "result"}\nfrom a shell: {event: result}\n'


@pytest.mark.parametrize("retryable", [True, False])
def test_a_refused_job_says_whether_to_try_again_and_keeps_the_process(engine, retryable):
    pid = pid_of(engine)
    with pytest.raises(EngineJobError, match="engine 'echo', job 'refuse': InputError: no such column") as raised:
        run(engine, "refuse", retryable=retryable)
    assert (raised.value.retryable, raised.value.error_type) == (retryable, "InputError")
    assert (copy.copy(raised.value).retryable, str(copy.copy(raised.value))) == (retryable, str(raised.value))
    assert pid_of(engine) == pid


@pytest.mark.parametrize(
    ("spec", "ending"),
    [
        ({"code": 7}, "ended with exit code 7"),
        ({"code": 255}, "ended with exit code 255"),
        ({"signal": signal.SIGKILL}, "was killed by SIGKILL (often: the machine ran out of memory)"),
        ({"signal": signal.SIGSEGV}, "was killed by SIGSEGV"),
    ],
)
def test_a_death_shows_its_cause_and_the_last_words_and_the_next_job_starts_anew(engine, spec, ending):
    pid = pid_of(engine)
    with pytest.raises(EngineDied) as raised:
        run(engine, "crash", **spec)
    assert ending in str(raised.value)
    assert "the last words" in str(raised.value)
    assert raised.value.retryable
    assert pid_of(engine) != pid


def test_a_death_before_the_first_job_is_told_by_that_job(tmp_path):
    program = [sys.executable, str(Path(__file__).with_name("echo_engine.py")), "die"]
    engine = EngineProcess("echo", PROGRAM, log=tmp_path / "log", command=program)
    engine.start()
    with pytest.raises(EngineDied, match=r"exit code 1\.(?s:.)*No module named 'vllm'"):
        run(engine, "echo")


def test_the_tail_is_of_this_process_and_30_lines_long(engine, tmp_path):
    run(engine, "talk", text="of the first process")
    with pytest.raises(EngineDied, match="of the first process"):
        run(engine, "crash", code=1)
    run(engine, "talk", text="\n".join(f"line {number}." for number in range(50)))
    with pytest.raises(EngineDied) as raised:
        run(engine, "crash", code=1)
    assert "of the first process" not in str(raised.value)
    assert len(str(raised.value).splitlines()) == 31


@pytest.mark.parametrize(
    "line",
    [
        "Loading weights: 100%",
        "[1]",
        '{"event": "result", "id": 99, "seconds": 1, "result": {}}',
        '{"event": "progress"}',
    ],
)
def test_what_is_no_reply_ends_the_process_with_a_clear_message(engine, line):
    with pytest.raises(EngineDied, match="its replies held") as raised:
        run(engine, "garbage", line=line)
    assert raised.value.retryable
    pid_of(engine)


@pytest.mark.parametrize(
    "line",
    [
        b"\xff",
        b"null",
        b'{"id": 1, "event": "end"}',
        b'{"id": 1, "event": "result", "result": 3, "seconds": 1}',
        b'{"id": 1, "event": "error", "error": "no"}',
        b'{"id": 1, "event": "progress", "done": 1, "total": 2, "rows": [3]}',
    ],
)
def test_malformed_replies_are_found(line):
    with pytest.raises(ProtocolViolation):
        decode_reply(line, 1, engine="e", job="j")


def test_a_hang_ends_in_time_and_nothing_below_survives(engine):
    pids = run(engine, "spawn").result["pids"]
    began = time.monotonic()
    with pytest.raises(EngineTimeout, match=r"no message for timeout_s=0\.8") as raised:
        run(engine, "hang", timeout_s=0.8)
    assert time.monotonic() - began < KILL_TIMEOUT_S
    assert raised.value.retryable
    assert outlived(pids, within_s=0) == []
    pid_of(engine)


def test_progress_arrives_and_resets_the_clock(engine):
    pid_of(engine)
    seen = []
    engine.run(job("progress", total=12, seconds=0.5), timeout_s=5, on_progress=seen.append)  # 6 s in all
    assert [(one.engine, one.job, one.done, one.total, one.note) for one in seen] == [
        ("echo", "progress", done, 12, f"epoch {done}") for done in range(1, 13)
    ]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_of_the_callback_ends_the_process_and_leaves_the_engine_usable(engine, error):
    pids = run(engine, "spawn").result["pids"]

    def fail(progress: object) -> None:
        raise error

    with pytest.raises(error):
        engine.run(job("progress", total=2, seconds=0), timeout_s=LONG_S, on_progress=fail)
    assert outlived(pids, within_s=0) == []
    pid_of(engine)


def test_ctrl_c_while_waiting_leaves_no_orphans_and_a_usable_engine(engine):
    """The worst case: the signal arrives in another thread, so it does not end the main thread's system call."""
    pids = run(engine, "spawn").result["pids"]
    interrupt = threading.Timer(0.3, signal.raise_signal, [signal.SIGINT])
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        engine.run(ASLEEP, timeout_s=LONG_S, on_progress=lambda _: interrupt.start())
    assert time.monotonic() - began < LONG_S
    interrupt.join()
    assert outlived(pids, within_s=0) == []
    pid_of(engine)


def test_an_idle_engine_closes_at_once_with_all_below(engine, monkeypatch):
    pids = run(engine, "spawn").result["pids"]
    monkeypatch.setattr("infra.engines.process.CLOSE_GRACE_S", LONG_S)
    began = time.monotonic()
    engine.close()
    assert time.monotonic() - began < LONG_S
    assert outlived(pids, within_s=0) == []
    engine.close()


def test_a_closed_engine_refuses_jobs_until_it_is_started(engine):
    engine.close()
    with pytest.raises(EngineClosed, match=r"call start\(\)") as raised:
        run(engine, "echo")
    assert not raised.value.retryable
    engine.start()
    pid_of(engine)


def test_closing_during_a_job_ends_both(engine):
    pid = pid_of(engine)
    with ThreadPoolExecutor(1) as pool:
        asleep = threading.Event()
        running = pool.submit(engine.run, ASLEEP, timeout_s=LONG_S, on_progress=lambda _: asleep.set())
        assert asleep.wait(LONG_S)
        engine.close()
        with pytest.raises(EngineClosed):
            running.result(timeout=LONG_S)
    assert outlived([pid], within_s=0) == []


def test_two_threads_take_turns(engine):
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: run(engine, "sleep", seconds=0.2).result, range(2))
    earlier, later = sorted((first, second), key=lambda result: result["began"])
    assert earlier["ended"] <= later["began"]


def test_an_engine_outlives_the_thread_that_started_it(engine):
    pids = []
    thread = threading.Thread(target=lambda: pids.append(pid_of(engine)))
    thread.start()
    thread.join()
    assert outlived(pids, within_s=0.2) == pids
    assert pid_of(engine) == pids[0]


def test_a_killed_guardian_takes_engine_and_descendants_along(engine):
    pids = run(engine, "spawn").result["pids"]  # of engine, guardian, child, orphan
    os.kill(pids[1], signal.SIGKILL)
    assert outlived(pids[:2]) == []
    with pytest.raises(EngineDied, match="lost its guardian to SIGKILL"):
        run(engine, "echo")
    assert outlived(pids) == []  # they are killed; a busy kernel takes a moment to end them
    pid_of(engine)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_a_killed_owner(tmp_path, number):
    owner = f"""
from pathlib import Path
from infra.engines.process import EngineJob, EngineProcess
engine = EngineProcess("echo", {PROGRAM!r}, log=Path({str(tmp_path / "log")!r}))
print(engine.run(EngineJob("spawn", {{}}, None, {{}}), timeout_s=300).result["pids"], flush=True)
engine.run(EngineJob("sleep", {{}}, None, {{"seconds": 3600}}), timeout_s=3600)
"""
    process = subprocess.Popen([sys.executable, "-c", owner], stdout=subprocess.PIPE, cwd=ROOT)
    assert process.stdout is not None
    with process.stdout as output:
        pids = json.loads(output.readline())
    assert outlived(pids, within_s=0) == pids
    process.send_signal(number)
    process.wait(LONG_S)
    assert outlived(pids) == []


def test_the_keyboard_does_not_reach_the_engine(engine):
    pid = pid_of(engine)
    assert os.getsid(pid) == pid
    assert os.getsid(int(run(engine, "spawn").result["pids"][1])) not in (pid, os.getsid(0))


def test_an_engine_that_ends_with_its_refusal_is_replaced_at_once(engine):
    before = pid_of(engine)
    with pytest.raises(EngineJobError, match="no such column"):
        run(engine, "refuse", retryable=True, ending=True)
    assert pid_of(engine) != before
