"""Points to log, and what a sqlite store really holds of them."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from infra.mlflow.tracking import Point

NOW = 1_700_000_000_000


def points_of(step: int, keys: int = 20) -> list[Point]:
    return [Point(f"train/m{key}", step + key / 7, step, NOW + step) for key in range(keys)]


def rows(store: Path, run_id: str | None) -> list[tuple[str, int, float, int]]:
    with sqlite3.connect(store / "mlflow.db") as database:
        found = database.execute("select key, step, value, timestamp from metrics where run_uuid = ?", (run_id,))
        return sorted(found.fetchall())
