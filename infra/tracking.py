"""One MLflow run per training run: a projection of the run's records that may lag behind and never stops training.

Every public method of RunTracker answers False (or None) when MLflow refuses, hangs or is away, and leaves the reason
in `last_error`. The caller keeps the records and logs again later; a point that is there already makes no second row.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar
from urllib.parse import quote

from infra.mlflow_client import open_client, without_password
from infra.mlflow_names import entry_name, marked_cut
from infra.patience import Patience

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from mlflow import MlflowClient
    from mlflow.entities import Run

RUN_TAG = "ppoflow.run"
CHANGED_PREFIX = "ppoflow.changed."
MAX_PARAMETER_LENGTH = 6000
MAX_TAG_LENGTH = 8000
MAX_POINTS_PER_CALL = 1000
MAX_ENTRIES_PER_CALL = 100
OPEN_PATIENCE_S = 60.0

T = TypeVar("T")


@dataclass(frozen=True)
class Point:
    """One value of one curve. The timestamp comes from the record, so that logging it again says the same."""

    key: str
    value: float
    step: int
    timestamp_ms: int


@dataclass(frozen=True)
class OpenRun:
    client: MlflowClient
    experiment_id: str
    run_id: str


class ExperimentDeletedError(RuntimeError):
    """The experiment's name belongs to a deleted experiment."""


class RunTracker:
    def __init__(
        self,
        uri: str,
        experiment: str,
        run_name: str,
        artifact_root: str | Path,
        *,
        patience_s: float = 6.0,
        back_off_s: float = 30.0,
    ) -> None:
        self.uri = uri
        self.experiment = experiment
        self.run_name = run_name
        self.artifact_root = Path(artifact_root)
        self.nan_skipped = 0
        self._patience_s = patience_s
        self._patience = Patience(back_off_s, _is_outage)
        self._open_run: OpenRun | None = None

    @property
    def last_error(self) -> str | None:
        return self._patience.last_error

    @property
    def run_id(self) -> str | None:
        return self._open_run.run_id if self._open_run else None

    def available(self) -> bool:
        """False while calls are skipped after an outage, or while a call that took too long is still under way."""
        return self._patience.available()

    def open(self) -> bool:
        """Find the run by its tag, or create it, and set it to RUNNING; at once, also while other calls are skipped.

        Every other method opens by itself where this has failed or was never called.
        """
        self._patience.forgive()
        return self._patience.call(self._reopen, OPEN_PATIENCE_S) is not None

    def log_parameters(self, parameters: Mapping[str, object]) -> bool:
        """Parameters are immutable in MLflow: a value that has changed since goes into the tag `ppoflow.changed.NAME`.

        Values over 6,000 characters are cut with a marker that says so.
        """
        wanted = {entry_name(key): marked_cut(str(value), MAX_PARAMETER_LENGTH) for key, value in parameters.items()}
        return self._tell(lambda run: _send_parameters(run, wanted))

    def set_tags(self, tags: Mapping[str, str]) -> bool:
        named = {entry_name(key): marked_cut(value, MAX_TAG_LENGTH) for key, value in tags.items()}
        return self._tell(lambda run: _send_tags(run, named))

    def log_points(self, points: Sequence[Point]) -> bool:
        """Each point once, however often it is logged. nan is left out and counted; ±inf is stored as ±1.8e308.

        A call to MLflow stores all its points or none; points of one step go in one call (up to 1,000 points).
        """
        usable = [point for point in points if not math.isnan(point.value)]
        for batch in batches_of_whole_steps(usable, MAX_POINTS_PER_CALL):
            if not self._tell(partial(_send_points, points=batch)):
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
        text = json.dumps({"columns": list(columns), "data": [[_cell(cell) for cell in row] for row in rows]})
        return self._tell(lambda run: _send_table(run, file, text))

    def log_figure(self, name: str, figure: Figure) -> bool:
        return self._tell(lambda run: run.client.log_figure(run.run_id, figure, f"{name}.png"))

    def finish(self, status: Literal["FINISHED", "FAILED", "KILLED"] = "FINISHED") -> bool:
        return self._tell(lambda run: run.client.set_terminated(run.run_id, status))

    def link(self) -> str:
        """Where to look: a page, or the command that opens one."""
        place = f"/#/experiments/{self._open_run.experiment_id}/runs/{self._open_run.run_id}" if self._open_run else ""
        uri = without_password(self.uri)
        if self.uri.startswith(("http://", "https://")):
            return f"{uri.rstrip('/')}{place}"
        return f"mlflow ui --backend-store-uri {uri}"

    def _tell(self, action: Callable[[OpenRun], object], patience_s: float | None = None) -> bool:
        def tell(run: OpenRun) -> bool:
            action(run)
            return True

        return self._call(tell, patience_s) is not None

    def _call(self, action: Callable[[OpenRun], T], patience_s: float | None = None) -> T | None:
        return self._patience.call(lambda: self._with_run(action), patience_s or self._patience_s)

    def _reopen(self) -> OpenRun:
        self._open_run = self._find_or_create()
        return self._open_run

    def _with_run(self, action: Callable[[OpenRun], T]) -> T:
        run = self._open_run or self._reopen()
        from mlflow.exceptions import MlflowException

        try:
            return action(run)
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":  # a server that came back with an empty database
                self._open_run = None
            raise

    def _find_or_create(self) -> OpenRun:
        client = open_client(self.uri)
        experiment_id = self._experiment_id(client)
        run = self._found(client, experiment_id)
        if run is None:
            client.create_run(experiment_id, tags={RUN_TAG: self.run_name}, run_name=self.run_name)
            # Not the one just created: a request repeated after a timeout may have made two, and all must agree on one.
            run = self._found(client, experiment_id)
        if run is None:
            raise RuntimeError(f"MLflow does not list the run {self.run_name!r} that it has just created")
        if run.info.status != "RUNNING":
            client.update_run(run.info.run_id, status="RUNNING")
        return OpenRun(client, experiment_id, run.info.run_id)

    def _found(self, client: MlflowClient, experiment_id: str) -> Run | None:
        query = f"tags.`{RUN_TAG}` = '{self.run_name}'"
        runs = client.search_runs([experiment_id], query, max_results=1, order_by=["attributes.start_time ASC"])
        return runs[0] if runs else None

    def _experiment_id(self, client: MlflowClient) -> str:
        existing = client.get_experiment_by_name(self.experiment)
        if existing is None:
            location = None  # a server keeps the artifacts where it likes; without one they are ours to place
            if not self.uri.startswith(("http://", "https://")):
                location = (self.artifact_root.absolute() / quote(self.experiment, safe="")).as_uri()
            return client.create_experiment(self.experiment, artifact_location=location)
        if existing.lifecycle_stage == "deleted":
            raise ExperimentDeletedError(
                f"the MLflow experiment {self.experiment!r} (id {existing.experiment_id}) is deleted: bring it back "
                f"with `MLFLOW_TRACKING_URI={without_password(self.uri)} mlflow experiments restore "
                f"--experiment-id {existing.experiment_id}`, or name another experiment"
            )
        return existing.experiment_id


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


def _is_outage(error: Exception) -> bool:
    """Whether waiting may help: not where MLflow answered and said no."""
    from mlflow.exceptions import MlflowException

    if isinstance(error, MlflowException):
        return bool(error.get_http_status_code() >= 500)
    return not isinstance(error, ExperimentDeletedError | ValueError | TypeError | LookupError)


def _send_parameters(run: OpenRun, wanted: Mapping[str, str]) -> None:
    from mlflow.entities import Param

    known = run.client.get_run(run.run_id).data
    fresh = iter([Param(key, value) for key, value in wanted.items() if key not in known.params])
    while batch := list(islice(fresh, MAX_ENTRIES_PER_CALL)):
        run.client.log_batch(run.run_id, params=batch)
    changed = {
        tag: value
        for key, value in wanted.items()
        if key in known.params
        and ((tag := entry_name(CHANGED_PREFIX + key)) in known.tags or known.params[key] != value)
    }
    _send_tags(run, changed)


def _send_tags(run: OpenRun, tags: Mapping[str, str]) -> None:
    from mlflow.entities import RunTag

    remaining = iter([RunTag(key, value) for key, value in tags.items()])
    while batch := list(islice(remaining, MAX_ENTRIES_PER_CALL)):
        run.client.log_batch(run.run_id, tags=batch)


def _send_points(run: OpenRun, points: Sequence[Point]) -> None:
    from mlflow.entities import Metric

    limit = sys.float_info.max
    metrics = [Metric(entry_name(p.key), max(-limit, min(limit, p.value)), p.timestamp_ms, p.step) for p in points]
    run.client.log_batch(run.run_id, metrics=metrics)


def _send_table(run: OpenRun, file: str, text: str) -> None:
    tag = "mlflow.loggedArtifacts"
    run.client.log_text(run.run_id, text, file)
    tables = json.loads(run.client.get_run(run.run_id).data.tags.get(tag, "[]"))
    entry = {"path": file, "type": "table"}
    if entry not in tables:
        run.client.set_tag(run.run_id, tag, json.dumps([*tables, entry]))


def _cell(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no nan, and the page would show no table at all
    return value if isinstance(value, str | int | float | bool | None) else str(value)
