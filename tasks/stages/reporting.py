"""What a process has reported of a run so far, and reports beside the training."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from contextvars import copy_context
from dataclasses import dataclass, field
from uuid import UUID

from infra.mlflow.system_metrics import SystemMetrics

ASIDE_END_S = 10.0


@dataclass
class Reporting:
    """`metrics` are those of the iterations by number, `pointed` those iterations whose points MLflow has, `live` says
    whether the run is shown while it is trained, `introduced` whether MLflow knows what it is, `linked` what it is made
    of, `shown_in` is the id of the MLflow run that knows it, `data` are the files that describe its data, `table` is
    the table of iterations on Prefect's pages, and the curves were last drawn at `drawn_at`."""

    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    pointed: set[int] = field(default_factory=set)
    live: bool = False
    introduced: bool = False
    linked: bool = False
    shown_in: str | None = None
    data: dict[str, str] = field(default_factory=dict)
    table: UUID | None = None
    drawn_at: float = field(default_factory=time.monotonic)
    monitor: SystemMetrics | None = None
    thread: threading.Thread | None = None

    def forget(self, iterations: Iterable[int]) -> None:
        """These are not in the run any more."""
        for iteration in iterations:
            self.metrics.pop(iteration, None)
            self.pointed.discard(iteration)

    def aside(self, work: Callable[[], object]) -> None:
        """Do it on a thread of its own; not at all while something else is under way there. It may fail, in the log."""
        if self.thread is not None and self.thread.is_alive():
            return
        context = copy_context()  # Prefect's loggers and settings
        self.thread = threading.Thread(target=context.run, args=(_forgiving, work), daemon=True, name="report")
        self.thread.start()

    def settle(self) -> None:
        """Wait until nothing is under way aside; not for ever."""
        if self.thread is not None:
            self.thread.join(ASIDE_END_S)

    def close(self) -> None:
        """End what goes on aside: Python aborts a process that ends while a thread of it draws."""
        if self.monitor is not None:
            self.monitor.close()
        self.settle()


def _forgiving(work: Callable[[], object]) -> None:
    try:
        work()
    except Exception:
        _logger().warning("a report made aside is not complete", exc_info=True)


def _logger() -> logging.Logger | logging.LoggerAdapter[logging.Logger]:
    """That of the flow run, for its page; outside of one a plain one."""
    from prefect.exceptions import MissingContextError  # every command imports this module, and few need prefect
    from prefect.logging import get_logger, get_run_logger

    try:
        return get_run_logger()
    except MissingContextError:
        return get_logger("report")
