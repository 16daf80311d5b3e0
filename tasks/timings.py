"""Where an iteration's seconds go: inside engines, and outside of them (Prefect, storage, tracking, process hops)."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field


@dataclass
class StageTime:
    """Seconds of one stage: on the wall, and inside its engine."""

    wall: float = 0.0
    engine: float = 0.0
    cached: bool = False


@dataclass
class Timings:
    """Collects the stages of one iteration; `take` starts the next one."""

    started: float = field(default_factory=time.perf_counter)
    stages: dict[str, StageTime] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, stage: str, *, wall: float = 0.0, engine: float = 0.0, cached: bool = False) -> None:
        """Add seconds to a stage."""
        with self.lock:
            entry = self.stages.setdefault(stage, StageTime())
            entry.wall += wall
            entry.engine += engine
            entry.cached = cached

    def take(self) -> dict[str, float]:
        """Metrics of the iteration so far, and start anew."""
        with self.lock:
            now = time.perf_counter()
            metrics = {f"seconds/{name}": entry.wall for name, entry in self.stages.items()}
            inside = sum(entry.engine for entry in self.stages.values())
            metrics["seconds/iteration"] = now - self.started
            metrics["seconds/engines"] = inside
            metrics["seconds/outside_engines"] = now - self.started - inside
            self.started, self.stages = now, {}
            return metrics

    def cached_stages(self) -> list[str]:
        """Stages whose result came from the store."""
        with self.lock:
            return sorted(name for name, entry in self.stages.items() if entry.cached)
