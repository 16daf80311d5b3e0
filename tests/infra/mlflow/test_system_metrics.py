"""How busy the machine is: what is measured, and that an outage delays it only."""

from __future__ import annotations

from infra.mlflow.points import Point
from infra.mlflow.system_metrics import FIRST, SystemMetrics, gpu_load, machine_load
from tests.waiting import until


class Reluctant:
    """Takes points from the third time on."""

    def __init__(self, *seen: tuple[int, int]) -> None:
        self.seen = set(seen)
        self.taken: list[Point] = []
        self.asked = 0

    def log_points(self, points: list[Point]) -> bool:
        """All of them or none."""
        self.asked += 1
        if self.asked < 3:
            return False
        self.taken += points
        return True

    def seen_points(self, key: str) -> set[tuple[int, int]] | None:
        """What was there before."""
        return self.seen


def test_points_wait_until_they_are_taken_and_go_on_after_those_there_are() -> None:
    tracker = Reluctant((4, 1), (3, 1))
    monitor = SystemMetrics(tracker, every_s=0.01)
    monitor.start()
    until(lambda: len([point for point in tracker.taken if point.key == FIRST]) >= 5, "the points are taken")
    monitor.close()
    steps = [point.step for point in tracker.taken if point.key == FIRST]
    assert steps == list(range(5, 5 + len(steps)))


def test_memory_and_cpu_are_measured_in_mlflows_units() -> None:
    load = dict(machine_load())
    assert 0 <= load["cpu_utilization_percentage"] <= 100
    assert 0 < load["system_memory_usage_percentage"] <= 100
    assert load["system_memory_usage_megabytes"] > 100


def test_each_gpu_tells_what_it_can() -> None:
    table = "0, 87, 1024, 4096\n1, [N/A], 8, 81559\n"
    assert dict(gpu_load(table)) == {
        "gpu_0_utilization_percentage": 87.0,
        "gpu_0_memory_usage_megabytes": 1024.0,
        "gpu_0_memory_usage_percentage": 25.0,
        "gpu_1_memory_usage_megabytes": 8.0,
        "gpu_1_memory_usage_percentage": 0.0,
    }
