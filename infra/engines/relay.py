"""Rows that one engine finishes become jobs of another one, in the time that nobody waits for it.

    rollout:  generate ──rows──► Relay ──job, then job, …──► scoring      a thread; each job has all rows that came
              a stage's own job ───────────────────────────► scoring      meanwhile; a stage's job comes first

What such a job fails at is no error: the stage that needs its work does it, and meets the error again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from infra.engines.protocol import EngineError, EngineProgress, OnProgress

Row = Mapping[str, Any]
USELESS = 3
"""After so many jobs in a row that were of no use no more are sent."""
LOOK_S = 1.0
"""So often a waiting main thread looks for Ctrl-C: a signal that another thread got does not wake it."""


class SpareTime:
    """The time of an engine that no stage wants: who can wait takes it job by job."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._wanted = 0
        self._taken = False

    @property
    def wanted(self) -> bool:
        """Whether a stage has the engine, or waits for it."""
        return self._wanted > 0

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """The engine for a stage: waits for the job under way, after which no other begins before the block's end."""
        with self.changed:
            self._wanted += 1
        try:
            with self.changed:
                while self._taken:
                    self.changed.wait(LOOK_S)
            yield
        finally:
            with self.changed:
                self._wanted -= 1
                self.changed.notify_all()

    def take(self, ready: Callable[[], bool], ended: Callable[[], bool]) -> bool:
        """Wait until the engine is free and `ready` is true, and take it; False where `ended` is true first."""
        with self.changed:
            while not ended():
                if ready() and not self._wanted and not self._taken:
                    self._taken = True
                    return True
                self.changed.wait()
        return False

    def give_back(self) -> None:
        """After `take`."""
        with self.changed:
            self._taken = False
            self.changed.notify_all()


class Relay:
    """Collects rows from progress messages, and has `send` make jobs of them in the spare time of another engine.

    `send` says whether a job was of any use. Nothing runs before the first row comes; it ends with `close`, with a job
    that fails, or after some that were of no use.
    """

    def __init__(self, send: Callable[[Sequence[Row]], bool], spare: SpareTime) -> None:
        self._send = send
        self._spare = spare
        self._waiting: list[Row] = []
        self._thread: threading.Thread | None = None
        self._ended = False

    @property
    def ended(self) -> bool:
        """Whether nothing more is sent."""
        return self._ended

    def hear(self, on_progress: OnProgress) -> OnProgress:
        """An `on_progress` for an engine: collects the rows, and the one given gets the rest. May be called at once."""

        def heard(progress: EngineProgress) -> None:
            if progress.rows:
                self._add(progress.rows)
                progress = replace(progress, rows=())
            on_progress(progress)

        return heard

    def close(self) -> None:
        """Nothing more is sent. Does not wait for the job under way: whoever claims the engine does."""
        with self._spare.changed:
            self._ended = True
            self._spare.changed.notify_all()

    def _add(self, rows: Sequence[Row]) -> None:
        with self._spare.changed:
            if self._ended:
                return
            self._waiting += rows
            if self._thread is None:
                # A daemon: should the engine not end with the run, the process still does.
                self._thread = threading.Thread(target=self._work, daemon=True, name="relay")
                self._thread.start()
            self._spare.changed.notify_all()

    def _work(self) -> None:
        useless = 0
        while self._spare.take(lambda: bool(self._waiting), lambda: self._ended):
            try:
                with self._spare.changed:
                    rows, self._waiting = self._waiting, []
                useless = 0 if self._send(rows) else useless + 1
                if useless == USELESS:
                    self.close()
            except EngineError:
                self.close()
            except BaseException:
                self.close()
                raise
            finally:
                self._spare.give_back()
