"""Where an iteration's seconds go: inside engines, and outside of them (Prefect, storage, tracking, process hops); what
engines that take turns freed, and how many responses were scored while others were sampled."""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class StageTime:
    """Seconds of one stage: on the wall, and inside its engine."""

    wall: float = 0.0
    engine: float = 0.0
    cached: bool = False


@dataclass
class Timings:
    """Collects the stages of one iteration; `restart` begins the next one. `iteration` is the one under way.

    `scored_ahead` names responses; None where none is scored before all are sampled.
    """

    iteration: int = 0
    started: float = field(default_factory=time.perf_counter)
    stages: dict[str, StageTime] = field(default_factory=dict)
    parts: dict[str, float] = field(default_factory=dict)
    freed_gib: dict[str, float] = field(default_factory=dict)
    scored_ahead: set[Hashable] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def outside(self, part: str) -> Iterator[None]:
        """Measure seconds that no engine works: `store`, `hops` (to the engines and back) or `tracking`."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add_outside(part, time.perf_counter() - started)

    def add_outside(self, part: str, seconds: float) -> None:
        """Add seconds to a part of the time outside the engines."""
        with self.lock:
            self.parts[part] = self.parts.get(part, 0.0) + seconds

    def add(self, stage: str, *, wall: float = 0.0, engine: float = 0.0, cached: bool | None = None) -> None:
        """Add seconds to a stage, and note whether its result came from the store."""
        with self.lock:
            entry = self.stages.setdefault(stage, StageTime())
            entry.wall += wall
            entry.engine += engine
            entry.cached = entry.cached if cached is None else cached

    def freed(self, gib: Mapping[str, float]) -> None:
        """Keep the most that the engines of each role freed at once."""
        with self.lock:
            for role, freed in gib.items():
                self.freed_gib[role] = max(freed, self.freed_gib.get(role, freed))

    def begin_ahead(self) -> set[Hashable]:
        """Where to name responses that are scored before all are sampled; the same for all batches of an iteration."""
        with self.lock:
            if self.scored_ahead is None:
                self.scored_ahead = set()
            return self.scored_ahead

    def measured(self) -> dict[str, float]:
        """Metrics of the iteration so far."""
        with self.lock:
            now = time.perf_counter()
            metrics = {f"seconds/{name}": entry.wall for name, entry in self.stages.items()}
            inside = sum(entry.engine for entry in self.stages.values())
            metrics["seconds/iteration"] = now - self.started
            metrics["seconds/engines"] = inside
            outside = metrics["seconds/outside_engines"] = now - self.started - inside
            metrics |= {f"seconds/outside_{part}": seconds for part, seconds in self.parts.items()}
            metrics["seconds/outside_prefect_and_rest"] = outside - sum(self.parts.values())
            if self.scored_ahead is not None:
                metrics["score/ahead"] = float(len(self.scored_ahead))
            return metrics | {f"memory/{role}_freed_gib": gib for role, gib in self.freed_gib.items()}

    def restart(self) -> None:
        """Begin the next iteration."""
        with self.lock:
            self.started, self.stages, self.parts, self.freed_gib = time.perf_counter(), {}, {}, {}
            self.scored_ahead = None

    def worked(self, stage: str) -> bool:
        """Whether a stage was done in this iteration, and not found in the store or given."""
        with self.lock:
            entry = self.stages.get(stage)
            return entry is not None and entry.wall > 0 and not entry.cached

    def cached_stages(self) -> list[str]:
        """Stages whose result came from the store."""
        with self.lock:
            return sorted(name for name, entry in self.stages.items() if entry.cached)
