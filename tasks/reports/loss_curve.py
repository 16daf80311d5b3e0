"""The curve of supervised fine-tuning in MLflow, by optimizer step: live while it trains, and whole from the record.

Both send the same points with the same times, and MLflow keeps once what it gets twice.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from datetime import datetime

from infra.artifacts import ArtifactError
from infra.engines.protocol import EngineProgress
from infra.mlflow.points import Point
from ppo_core.records import noted_loss
from tasks.runs.iteration_record import IterationRecord
from tasks.stages.context import RunContext
from tasks.stages.references import ModelRef, StageRef

LOSS_CURVE = "sft/loss_curve"
EVERY_S = 5.0


def curve_points(context: RunContext, record: IterationRecord) -> list[Point]:
    """Of the first record: the losses that it has."""
    model = record.made("model")
    if not isinstance(model, ModelRef):
        return []
    return points(dict(enumerate(model.losses, start=1)), prepared_at_ms(context, record.dataset))


def points(losses: Mapping[int, float], prepared_ms: int, name: str = LOSS_CURVE) -> list[Point]:
    """Times are counted from when the data was ready, which a start that is repeated finds as it was."""
    return [Point(name, loss, step, prepared_ms + step) for step, loss in losses.items()]


def prepared_at_ms(context: RunContext, dataset: StageRef) -> int:
    """When the dataset was stored; 0 where it is there no more."""
    try:
        created = context.store.manifest(dataset.bare()).created_at
    except ArtifactError:
        return 0
    return int(datetime.fromisoformat(created).timestamp() * 1000)


class LiveCurve:
    """Takes an engine's progress and, every few seconds, sends the losses in it from a thread of its own."""

    def __init__(
        self, context: RunContext, dataset: StageRef, name: str = LOSS_CURVE, *, every_s: float = EVERY_S
    ) -> None:
        self._context = context
        self._name = name
        self._prepared_ms = prepared_at_ms(context, dataset) if context.reporting.live else 0
        self._waiting: dict[int, float] = {}
        self._sender: threading.Thread | None = None
        self._every_s = every_s
        self._next_at = time.monotonic() + every_s

    def on_progress(self, progress: EngineProgress) -> None:
        """In place of the run's own `on_progress`, which is called too."""
        self._context.on_progress(progress)
        loss = noted_loss(progress.note)
        if loss is None or not self._context.reporting.live:
            return
        self._waiting[progress.done] = loss
        due = time.monotonic() >= self._next_at
        if due and (self._sender is None or not self._sender.is_alive()):
            sent, self._waiting = self._waiting, {}
            self._next_at = time.monotonic() + self._every_s
            self._sender = threading.Thread(target=self._send, args=(sent.items(),), daemon=True, name="loss-curve")
            self._sender.start()

    def _send(self, losses: Iterable[tuple[int, float]]) -> None:
        self._context.tracker.log_points(points(dict(losses), self._prepared_ms, self._name))
