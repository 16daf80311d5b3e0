"""What runs in a Ray actor: one engine, as the same child process as anywhere, with the store beside it.

Nothing here knows what an engine computes: work comes as a callable.
"""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from infra.artifacts.store import ArtifactStore
from infra.engines.protocol import Engine, EngineError, EngineProgress, OnProgress
from infra.storage.objects import StoreUnavailable
from infra.storage.outage import under_way
from infra.storage.telling import messages_to

Work = Callable[[ArtifactStore, Engine, OnProgress], Any]


@dataclass(frozen=True)
class Blueprint:
    """How to make an engine and its store on a node, as functions that are pickled by name.

    `open_engine` gets the node's name, for messages. `facts` must come out the same on the node as in the flow.
    """

    open_engine: Callable[[str], Engine]
    open_store: Callable[[], ArtifactStore]
    facts: Callable[[], Mapping[str, str]]


@dataclass(frozen=True)
class Outcome:
    """What came of a call: an error travels as a value, so that it arrives as what it was."""

    value: Any = None
    error: Exception | None = None


@dataclass(frozen=True)
class Greeting:
    """Where an actor is, and what its code is like."""

    node: str
    pid: int
    facts: Mapping[str, str]


def that_travels(error: Exception) -> Exception:
    """The error, or what it says where it cannot be made again from its parts, as some of libraries cannot."""
    try:
        copy.copy(error)
    except Exception:
        return EngineError(f"{type(error).__name__}: {error}")
    return error


class EngineHost:
    """The actor. Calls come in two threads at once: one job, and questions about its progress."""

    def __init__(self, blueprint: Blueprint) -> None:
        self._blueprint = blueprint
        self._engine: Engine | None = None
        self._store: ArtifactStore | None = None
        self._seen: list[EngineProgress] = []
        self._lock = threading.Lock()

    def prepare(self) -> Outcome:
        """Start the engine and open the store; the value is a `Greeting`."""
        import ray

        node = ray.util.get_node_ip_address()
        try:
            self._engine = self._blueprint.open_engine(node)
            self._engine.start()
            facts = dict(self._blueprint.facts())
            with suppress(StoreUnavailable):  # the first work waits for it, as any other does
                self._store = self._blueprint.open_store()
        except Exception as error:
            return Outcome(Greeting(node, os.getpid(), {}), that_travels(error))
        return Outcome(Greeting(node, os.getpid(), facts))

    def do(self, work: Work) -> Outcome:
        """Have the work done; the value is its result."""
        if self._engine is None:
            raise RuntimeError("prepare() comes first")
        try:
            with messages_to(self._tell):
                if self._store is None:
                    with under_way():
                        self._store = self._blueprint.open_store()
                return Outcome(work(self._store, self._engine, self._see))
        except Exception as error:
            return Outcome(error=that_travels(error))

    def progress(self) -> list[EngineProgress]:
        """What the engine has reported since the last question."""
        with self._lock:
            seen, self._seen = self._seen, []
            return seen

    def _tell(self, text: str) -> None:
        """Say something of the store, as progress, which is shown where the run is."""
        self._see(EngineProgress("store", text, 0, 0, ""))

    def _see(self, progress: EngineProgress) -> None:
        with self._lock:  # of those that only say how far it is, the last two
            self._seen = [*(seen for seen in self._seen[:-1] if seen.rows), *self._seen[-1:], progress]
