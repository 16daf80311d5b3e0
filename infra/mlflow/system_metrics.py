"""How busy this machine is, as points of MLflow's system metrics; measured and sent by a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Protocol

import psutil

from infra.engines.hardware import nvidia_smi
from infra.mlflow.points import Point

PREFIX = "system/"
FIRST = f"{PREFIX}cpu_utilization_percentage"
EVERY_S = 10.0
KEPT = 1000
"""So many points wait while MLflow is away; older ones go."""
GPU_QUERY = "index,utilization.gpu,memory.used,memory.total"


class Tracker(Protocol):
    """What takes the points."""

    def log_points(self, points: list[Point]) -> bool: ...
    def seen_points(self, key: str) -> set[tuple[int, int]] | None: ...


class SystemMetrics:
    """Measures every ten seconds until it is closed. MLflow's own monitor would lose what it cannot send at once."""

    def __init__(self, tracker: Tracker, *, every_s: float = EVERY_S) -> None:
        self._tracker = tracker
        self._every_s = every_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._measure, daemon=True, name="system-metrics")

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """End; without waiting for MLflow."""
        self._ended.set()

    def _measure(self) -> None:
        psutil.cpu_percent()  # the next call says how busy the machine was since
        waiting: list[Point] = []
        step: int | None = None
        while not self._ended.wait(self._every_s):
            if step is None:
                seen = self._tracker.seen_points(FIRST)
                step = None if seen is None else max((step for step, _ in seen), default=-1)
            if step is None:  # a step that is there already must not be used again
                continue
            step, now = step + 1, int(time.time() * 1000)
            with suppress(OSError, psutil.Error):  # a container may hide what there is to measure
                load = list(machine_load())
                waiting = [*waiting, *(Point(PREFIX + key, value, step, now) for key, value in load)][-KEPT:]
            if self._tracker.log_points(waiting):
                waiting = []


def machine_load() -> Iterator[tuple[str, float]]:
    """By MLflow's own names: CPU since the last call, memory, and each NVIDIA GPU."""
    memory = psutil.virtual_memory()
    yield "cpu_utilization_percentage", psutil.cpu_percent()
    yield "system_memory_usage_megabytes", round(memory.used / 1e6, 1)
    yield "system_memory_usage_percentage", memory.percent
    yield from gpu_load(nvidia_smi(GPU_QUERY))


def gpu_load(table: str) -> Iterator[tuple[str, float]]:
    """Of the lines that nvidia-smi prints; what a GPU does not tell (`[N/A]`) is left out.

    >>> list(gpu_load("0, 87, 1024, 4096"))[0]
    ('gpu_0_utilization_percentage', 87.0)
    """
    for line in filter(None, table.splitlines()):
        index, *texts = (part.strip() for part in line.split(","))
        busy, used, total = (float(text) if text.replace(".", "", 1).isdigit() else None for text in texts)
        if busy is not None:
            yield f"gpu_{index}_utilization_percentage", busy
        if used is not None:
            yield f"gpu_{index}_memory_usage_megabytes", used
        if used is not None and total:
            yield f"gpu_{index}_memory_usage_percentage", round(100 * used / total, 1)
