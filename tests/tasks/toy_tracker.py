"""A tracker in this process: what MLflow would show of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from infra.mlflow.tracking import Point


class ToyTracker:
    """Takes everything, each point once; stands where `infra.mlflow.tracking.RunTracker` stands."""

    def __init__(self) -> None:
        self.points: set[Point] = set()
        self.parameters: dict[str, object] = {}
        self.tags: dict[str, str] = {}
        self.run_id: str | None = None
        self.last_error: str | None = None
        self.status = "RUNNING"
        self.figures = 0

    def open(self) -> bool:
        """There is nothing to open."""
        return True

    def log_parameters(self, parameters: Mapping[str, object]) -> bool:
        """Keep them."""
        self.parameters |= parameters
        return True

    def set_tags(self, tags: Mapping[str, str]) -> bool:
        """Keep them."""
        self.tags |= tags
        return True

    def log_points(self, points: Sequence[Point]) -> bool:
        """The same point again says nothing new."""
        self.points |= set(points)
        return True

    def seen_points(self, key: str) -> set[tuple[int, int]] | None:
        """Steps and times of a curve."""
        return {(point.step, point.timestamp_ms) for point in self.points if point.key == key}

    def log_text(self, name: str, text: str) -> bool:
        """Not kept."""
        return True

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> bool:
        """Not kept."""
        return True

    def log_datasets(self, datasets: Sequence[object]) -> bool:
        """Not kept."""
        return True

    def log_figure(self, name: str, figure: object) -> bool:
        """Counted."""
        self.figures += 1
        return True

    def finish(self, status: str = "FINISHED") -> bool:
        """How the run ended."""
        self.status = status
        return True

    def steps(self, key: str) -> list[int]:
        """The steps of a curve, a repeated one as often as it is there."""
        return sorted(point.step for point in self.points if point.key == key)
