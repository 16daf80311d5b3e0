"""One MLflow run per training run: a projection of the run's records that may lag behind and never stops training.

Every public method of RunTracker answers False (or None) when MLflow refuses, hangs or is away, and leaves the reason
in `last_error`. The caller keeps the records and logs again later; a point that is there already makes no second row.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from infra.mlflow.circuit_breaker import CircuitBreaker
from infra.mlflow.client import in_short, is_server, without_password
from infra.mlflow.entries import (
    InputData,
    cell,
    send_datasets,
    send_file,
    send_parameters,
    send_points,
    send_table,
    send_tags,
)
from infra.mlflow.learning_curves import png
from infra.mlflow.names import entry_name, marked_cut
from infra.mlflow.points import Point, batches_of_whole_steps
from infra.mlflow.run import OpenRun, find_or_create, is_deleted, is_outage, run_page

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["InputData", "Point", "RunTracker", "batches_of_whole_steps"]

MAX_PARAMETER_LENGTH = 6000
MAX_TAG_LENGTH = 8000
MAX_POINTS_PER_CALL = 1000
OPEN_TIMEOUT_S = 60.0
SERVER_TIMEOUT_S = 6.0
# In this process: a busy machine takes its time, and SQLite itself waits 20 s for a lock.
DATABASE_TIMEOUT_S = 25.0

T = TypeVar("T")


class RunTracker:
    def __init__(
        self,
        uri: str,
        experiment: str,
        run_name: str,
        artifact_root: str | Path,
        run_key: str | None = None,
        *,
        timeout_s: float | None = None,
        back_off_s: float = 30.0,
    ) -> None:
        self.uri = uri
        self.experiment = experiment
        self.run_name = run_name
        self.run_key = run_key
        self.artifact_root = Path(artifact_root)
        self.nan_skipped = 0
        self._timeout_s = timeout_s or (SERVER_TIMEOUT_S if is_server(uri) else DATABASE_TIMEOUT_S)
        self._breaker = CircuitBreaker(back_off_s, is_outage)
        self._open_run: OpenRun | None = None

    @property
    def last_error(self) -> str | None:
        """Why the last call that failed did; of an outage in a line that names the address."""
        error = self._breaker.last_error
        if error is None or not self._breaker.outage:
            return error
        return f"{without_password(self.uri)} {in_short(error)}"

    @property
    def run_id(self) -> str | None:
        return self._open_run.run_id if self._open_run else None

    def available(self) -> bool:
        """False while calls are skipped after an outage, or while a call that took too long is still under way."""
        return self._breaker.available()

    def open(self) -> bool:
        """Find the run by its tag, or create it, and set it to RUNNING; at once, also while other calls are skipped.

        Every other method opens by itself where this has failed or was never called.
        """
        self._breaker.reset()
        return self._breaker.call(self._reopen, OPEN_TIMEOUT_S) is not None

    def log_parameters(self, parameters: Mapping[str, object]) -> bool:
        """Parameters are immutable in MLflow: a value that has changed since goes into the tag `ppoflow.changed.NAME`.

        Values over 6,000 characters are cut with a marker that says so.
        """
        wanted = {entry_name(key): marked_cut(str(value), MAX_PARAMETER_LENGTH) for key, value in parameters.items()}
        return self._tell(lambda run: send_parameters(run, wanted))

    def set_tags(self, tags: Mapping[str, str]) -> bool:
        named = {entry_name(key): marked_cut(value, MAX_TAG_LENGTH) for key, value in tags.items()}
        return self._tell(lambda run: send_tags(run, named))

    def log_points(self, points: Sequence[Point]) -> bool:
        """Each point once, however often it is logged. nan is left out and counted; ±inf is stored as ±1.8e308.

        A call to MLflow stores all its points or none; points of one step go in one call (up to 1,000 points).
        """
        usable = [point for point in points if not math.isnan(point.value)]
        for batch in batches_of_whole_steps(usable, MAX_POINTS_PER_CALL):
            if not self._tell(partial(send_points, points=batch)):
                return False
        self.nan_skipped += len(points) - len(usable)
        return True

    def seen_points(self, key: str) -> set[tuple[int, int]] | None:
        """Step and timestamp (ms) of each point of `key` that is there already; None when MLflow does not answer."""
        name = entry_name(key)
        return self._call(
            lambda run: {(point.step, point.timestamp) for point in run.client.get_metric_history(run.run_id, name)}
        )

    def log_text(self, name: str, text: str) -> bool:
        return self._tell(lambda run: run.client.log_text(run.run_id, text, name))

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> bool:
        """The whole table as NAME.json, as MLflow's page and `load_table` read it; it replaces an older one."""
        file = f"{name}.json"
        text = json.dumps({"columns": list(columns), "data": [[cell(value) for value in row] for row in rows]})
        return self._tell(lambda run: send_table(run, file, text))

    def log_datasets(self, datasets: Sequence[InputData]) -> bool:
        """What the run reads; the same again says nothing new."""
        return self._tell(lambda run: send_datasets(run, datasets))

    def log_figure(self, name: str, figure: Figure) -> bool:
        """As NAME.png. How long this machine draws does not count as MLflow's time."""
        picture = png(figure)
        return self._tell(lambda run: send_file(run, f"{name}.png", picture))

    def finish(self, status: Literal["FINISHED", "FAILED", "KILLED"] = "FINISHED") -> bool:
        return self._tell(lambda run: run.client.set_terminated(run.run_id, status))

    @property
    def page(self) -> str | None:
        """Where a browser shows the run; None as long as it is not open."""
        return run_page(self.uri, self._open_run.experiment_id, self._open_run.run_id) if self._open_run else None

    def link(self) -> str:
        """Where the run is: an address, or the command that opens the pages of a database."""
        place = f"/#/experiments/{self._open_run.experiment_id}/runs/{self._open_run.run_id}" if self._open_run else ""
        uri = without_password(self.uri)
        return f"{uri.rstrip('/')}{place}" if is_server(self.uri) else f"mlflow ui --backend-store-uri {uri}"

    def _tell(self, action: Callable[[OpenRun], object], timeout_s: float | None = None) -> bool:
        def tell(run: OpenRun) -> bool:
            action(run)
            return True

        return self._call(tell, timeout_s) is not None

    def _call(self, action: Callable[[OpenRun], T], timeout_s: float | None = None) -> T | None:
        return self._breaker.call(lambda: self._with_run(action), timeout_s or self._timeout_s)

    def _reopen(self) -> OpenRun:
        self._open_run = find_or_create(self.uri, self.experiment, self.run_name, self.artifact_root, self.run_key)
        return self._open_run

    def _with_run(self, action: Callable[[OpenRun], T]) -> T:
        run = self._open_run or self._reopen()
        from mlflow.exceptions import MlflowException

        try:
            return action(run)
        except MlflowException as error:
            # A server that came back with an empty database; or somebody has deleted the run.
            gone = error.error_code == "RESOURCE_DOES_NOT_EXIST"
            if gone or (error.error_code == "INVALID_PARAMETER_VALUE" and is_deleted(run)):
                self._open_run = None
            raise
