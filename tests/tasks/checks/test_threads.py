"""A pool's thread is not forgotten when Ctrl-C comes while it starts."""

from __future__ import annotations

import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tasks.checks.threads import submit


def press_ctrl_c() -> None:
    """As the shell does, but in this thread: the kernel may give a process's signal to another one, for later."""
    signal.raise_signal(signal.SIGINT)


@pytest.fixture
def interrupted_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C comes when a thread has started, and before its pool knows it."""
    start = threading.Thread.start

    def begin(thread: threading.Thread) -> None:
        start(thread)
        press_ctrl_c()
        thread.is_alive()  # bytecode, between which a signal is handled

    monkeypatch.setattr(threading.Thread, "start", begin)


@pytest.mark.usefixtures("interrupted_start")
def test_an_interrupt_comes_when_the_pool_knows_its_thread() -> None:
    before, going_on, done = signal.getsignal(signal.SIGINT), threading.Event(), list[str]()

    def work() -> None:
        going_on.wait()
        done.append("whole")

    with ThreadPoolExecutor(1) as pool:
        try:
            with pytest.raises(KeyboardInterrupt):
                submit(pool, work)
        finally:
            going_on.set()
    assert done == ["whole"], "the pool has waited for it"
    assert signal.getsignal(signal.SIGINT) is before


def test_from_another_thread_work_is_handed_over_as_it_is() -> None:
    found = list[int]()
    with ThreadPoolExecutor(1) as pool:
        thread = threading.Thread(target=lambda: found.append(submit(pool, int, "7").result()))
        thread.start()
        thread.join()
    assert found == [7]
