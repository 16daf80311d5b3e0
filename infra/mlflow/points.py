"""Values of curves, and how they are sent to MLflow: a call stores all of a step or nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Point:
    """One value of one curve. The timestamp comes from the record, so that logging it again says the same."""

    key: str
    value: float
    step: int
    timestamp_ms: int


def batches_of_whole_steps(points: Iterable[Point], limit: int) -> Iterator[list[Point]]:
    """Batches of at most `limit`; a step is spread over two only if it alone has more than that."""
    steps: dict[int, list[Point]] = {}
    for point in points:
        steps.setdefault(point.step, []).append(point)
    batch: list[Point] = []
    for of_step in steps.values():
        if batch and len(batch) + len(of_step) > limit:
            yield batch
            batch = []
        batch = batch + of_step
        while len(batch) > limit:
            yield batch[:limit]
            batch = batch[limit:]
    if batch:
        yield batch
