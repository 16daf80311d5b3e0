"""Rows of one engine as jobs of another, in the time that no stage wants."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from infra.engines.process import EngineDied, EngineJob, EngineProcess, EngineProgress
from infra.engines.relay import USELESS, Relay, Row, SpareTime
from tests.infra.engines.ray_jobs import ECHO
from tests.waiting import FOR_EVER_S, LONG_S, until


@dataclass
class Jobs:
    """Takes rows; each job ends when it is let go on."""

    sent: list[list[Row]] = field(default_factory=list)
    ended: int = 0
    go_on: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    fails: Exception | None = None
    useful: bool = True

    def send(self, rows: Sequence[Row]) -> bool:
        self.sent.append(list(rows))
        assert self.go_on.acquire(timeout=LONG_S)
        self.ended += 1
        if self.fails is not None:
            raise self.fails
        return self.useful


def row(number: int) -> Row:
    return {"number": number}


def progress(*numbers: int) -> EngineProgress:
    return EngineProgress("rollout", "generate_rollouts", 1, 9, "responses", tuple(map(row, numbers)))


def relay_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "relay"]


@pytest.fixture(autouse=True)
def no_thread_stays() -> object:
    """Whatever a test does."""
    assert relay_threads() == []
    yield
    until(lambda: relay_threads() == [], "the relay's thread ends")


def heard(relay: Relay) -> tuple[Callable[[EngineProgress], None], list[EngineProgress]]:
    seen: list[EngineProgress] = []
    return relay.hear(seen.append), seen


def test_each_job_has_all_rows_that_came_during_the_one_before() -> None:
    jobs = Jobs()
    relay = Relay(jobs.send, SpareTime())
    hear, seen = heard(relay)
    hear(progress(1))
    until(lambda: len(jobs.sent) == 1)
    hear(progress(2, 3))
    hear(progress())
    hear(progress(4))
    assert jobs.sent == [[row(1)]]
    jobs.go_on.release()
    until(lambda: len(jobs.sent) == 2)
    assert jobs.sent[1] == [row(2), row(3), row(4)]
    assert seen == [progress()] * 4
    relay.close()
    jobs.go_on.release()


def test_without_rows_nothing_runs() -> None:
    relay = Relay(Jobs().send, SpareTime())
    hear, _ = heard(relay)
    hear(progress())
    assert relay_threads() == []
    relay.close()
    hear(progress(1))
    assert relay_threads() == []


def test_a_stage_waits_for_the_job_under_way_and_then_comes_first() -> None:
    jobs, spare, held, leave = Jobs(), SpareTime(), threading.Event(), threading.Event()

    def stage() -> None:
        with spare.claimed():
            held.set()
            assert leave.wait(LONG_S)

    relay = Relay(jobs.send, spare)
    hear, _ = heard(relay)
    hear(progress(1))
    until(lambda: len(jobs.sent) == 1)
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(stage)
        until(lambda: spare.wanted)
        hear(progress(2))
        assert not held.is_set()
        jobs.go_on.release()
        assert held.wait(LONG_S)
        assert (jobs.ended, len(jobs.sent)) == (1, 1)
        leave.set()
        done.result(LONG_S)
        until(lambda: len(jobs.sent) == 2)
    assert not spare.wanted
    relay.close()
    jobs.go_on.release()


def test_after_some_jobs_that_were_of_no_use_nothing_more_is_sent() -> None:
    jobs, spare = Jobs(useful=False), SpareTime()
    relay = Relay(jobs.send, spare)
    hear, _ = heard(relay)
    for number in range(USELESS):
        assert not relay.ended
        hear(progress(number))
        until(lambda number=number: len(jobs.sent) == number + 1)
        jobs.go_on.release()
        until(lambda number=number: jobs.ended == number + 1)
    until(lambda: relay_threads() == [])
    assert relay.ended


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_after_a_failure_or_the_end_nothing_more_is_sent_and_the_engine_is_free() -> None:
    for fails in (EngineDied("killed"), OSError("no room"), None):
        jobs, spare = Jobs(fails=fails), SpareTime()
        relay = Relay(jobs.send, spare)
        hear, seen = heard(relay)
        hear(progress(1))
        until(lambda jobs=jobs: len(jobs.sent) == 1)
        hear(progress(2))
        if fails is None:
            relay.close()
        jobs.go_on.release()
        until(lambda: relay_threads() == [])
        hear(progress(3))
        with spare.claimed():
            assert len(jobs.sent) == 1
        assert len(seen) == 3


def test_with_its_engine_closed_as_by_ctrl_c_the_relay_ends_and_who_waits_goes_on(tmp_path: Path) -> None:
    engine = EngineProcess("echo", "", log=tmp_path / "echo.log", command=[sys.executable, str(ECHO)])
    asleep, spare = threading.Event(), SpareTime()

    def send(rows: Sequence[Row]) -> bool:
        job = EngineJob("sleep", {}, None, {"seconds": FOR_EVER_S})
        engine.run(job, timeout_s=FOR_EVER_S, on_progress=lambda _: asleep.set())
        return True

    relay = Relay(send, spare)
    hear, _ = heard(relay)
    hear(progress(1))
    assert asleep.wait(LONG_S)
    with pytest.raises(KeyboardInterrupt):
        interrupted_after(relay, engine)
    with spare.claimed():
        until(lambda: relay_threads() == [])


def interrupted_after(relay: Relay, engine: EngineProcess) -> None:
    """What a run does on its way out: the sampling ends, then all engines."""
    try:
        raise KeyboardInterrupt
    finally:
        relay.close()
        engine.close()
