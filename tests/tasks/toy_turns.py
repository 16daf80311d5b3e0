"""Toy engines that take turns on a GPU, and count what they hold of it."""

from __future__ import annotations

from collections.abc import Callable

from infra.engines.protocol import EngineJob, EngineProgress, EngineReply
from ppo_core.records import MAKE_ROOM
from tasks.stages.engines import LocalHandle, Turns
from tests.tasks.toy_engines import ToyEngine, ToyEngines


class CountingEngines(ToyEngines):
    """Each rollout engine `holds` 2 GiB and the training engine 3 from its job on until it makes room; the scoring
    engine 1, where its rewards are on a GPU.

    `held` has the names of those that held some after each job, `together` whether they are asked to make room.
    """

    def __init__(self, *, together: bool, rollout_engines: int = 1, rewards_on_gpu: bool = False) -> None:
        super().__init__(rollout_engines=rollout_engines)
        self.holds: dict[str, int] = {}
        self.held: list[tuple[str, ...]] = []
        self.jobs[MAKE_ROOM] = lambda engines, job: {}
        rollout = {name: CountingEngine(name, self) for name in self.rollout_names}
        sides = {"training": {"training": CountingEngine("training", self)}, "rollout": rollout}
        sides |= {"scoring": {"scoring": CountingEngine("scoring", self)}} if rewards_on_gpu else {}
        self.handles |= {name: LocalHandle(engine) for side in sides.values() for name, engine in side.items()}
        self.turns = Turns(sides if together else {})


class CountingEngine(ToyEngine):
    """One of them."""

    def __init__(self, name: str, engines: CountingEngines) -> None:
        super().__init__(name, engines)
        self._card = engines

    def run(
        self, job: EngineJob, *, timeout_s: float, on_progress: Callable[[EngineProgress], None] | None = None
    ) -> EngineReply:
        """As any toy engine does it; then this one holds memory, or none."""
        reply = super().run(job, timeout_s=timeout_s, on_progress=on_progress)
        if job.name == MAKE_ROOM:
            return EngineReply({"freed_gib": float(self._card.holds.pop(self.name))}, 0.0)
        self._card.holds[self.name] = {"training": 3, "scoring": 1}.get(self.name, 2)
        self._card.held.append(tuple(sorted(self._card.holds)))
        return reply
