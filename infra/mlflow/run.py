"""Which MLflow run is that of a training run, and the page that shows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import quote

from infra.mlflow.circuit_breaker import CircuitBreaker
from infra.mlflow.client import import_mlflow, is_server, open_client, without_password

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

RUN_TAG = "ppoflow.run"
ID_TAG = "ppoflow.run_id"
"""What tells runs of one name apart, which lie in different stores."""
EXPERIMENT_TAGS = {"mlflow.experimentKind": "custom_model_development"}
"""What MLflow's pages call the training of models, as opposed to the GenAI kinds; some versions open by it."""
VIEW = "workflowType=machine_learning"
"""MLflow 3.17 opens on its GenAI view, where training runs are hidden, unless the address says this."""
LOCAL_PAGE = "http://127.0.0.1:5000"
"""Where `mlflow ui` listens."""
FIND_TIMEOUT_S = 6.0
STARTED, MANY = "attributes.start_time", 1000


@dataclass(frozen=True)
class OpenRun:
    """A run of MLflow's, and the client that reaches it."""

    client: MlflowClient
    experiment_id: str
    run_id: str


class ExperimentDeletedError(RuntimeError):
    """The experiment's name belongs to a deleted experiment."""


def find_or_create(
    uri: str, experiment: str, run_name: str, artifact_root: Path, run_key: str | None = None
) -> OpenRun:
    """The run of this name and key, found by its tags or made, and set to RUNNING.

    One of this name without any key gets this one. Without a key, the name alone tells.
    """
    client = open_client(uri)
    experiment_id = _experiment_id(client, uri, experiment, artifact_root)
    key = {} if run_key is None else {ID_TAG: run_key}
    run = _found(client, [experiment_id], {RUN_TAG: run_name, **key}, "ASC")
    if run is None and key and (run := _without_key(client, experiment_id, run_name)) is not None:
        client.set_tag(run.info.run_id, ID_TAG, run_key)
    if run is None:
        client.create_run(experiment_id, tags={RUN_TAG: run_name, **key}, run_name=run_name)
        # Not the one just created: a request repeated after a timeout may have made two, and all must agree on one.
        run = _found(client, [experiment_id], {RUN_TAG: run_name, **key}, "ASC")
    if run is None:
        raise RuntimeError(f"MLflow does not list the run {run_name!r} that it has just created")
    if run.info.status != "RUNNING":
        client.update_run(run.info.run_id, status="RUNNING")
    return OpenRun(client, experiment_id, run.info.run_id)


def find_page(uri: str, run_name: str, run_key: str | None = None, *, timeout_s: float = FIND_TIMEOUT_S) -> str | None:
    """The page of a training run's MLflow run; None where there is none, or MLflow does not answer in seconds."""
    import_mlflow()  # takes seconds, which are not the server's

    def find() -> str | None:
        client = open_client(uri)
        experiments = [experiment.experiment_id for experiment in client.search_experiments()]
        key = {} if run_key is None else {ID_TAG: run_key}
        run = _found(client, experiments, {RUN_TAG: run_name, **key}, "DESC")
        return None if run is None else run_page(uri, run.info.experiment_id, run.info.run_id)

    return CircuitBreaker(0.0, is_outage).call(find, timeout_s)


def run_page(uri: str, experiment_id: str, run_id: str) -> str:
    """Where a browser shows a run; for a database, where `mlflow ui` shows it."""
    return f"{_root(uri)}/#/experiments/{experiment_id}/runs/{run_id}?{VIEW}"


def front_page(uri: str) -> str:
    """Where a browser shows all experiments."""
    return f"{_root(uri)}/#/experiments?{VIEW}"


def is_deleted(run: OpenRun) -> bool:
    """Whether somebody has deleted it; it can be brought back, and takes nothing until then."""
    return bool(run.client.get_run(run.run_id).info.lifecycle_stage == "deleted")


def is_outage(error: Exception) -> bool:
    """Whether waiting may help: not where MLflow answered and said no."""
    from mlflow.exceptions import MlflowException

    if isinstance(error, MlflowException):
        return bool(error.get_http_status_code() >= 500)
    return not isinstance(error, ExperimentDeletedError | PermissionError | ValueError | TypeError | LookupError)


def _root(uri: str) -> str:
    """The server's address, or that of `mlflow ui`."""
    return without_password(uri).rstrip("/") if is_server(uri) else LOCAL_PAGE


def _found(
    client: MlflowClient, experiment_ids: list[str], tags: Mapping[str, str], direction: Literal["ASC", "DESC"]
) -> Run | None:
    """The first, or the last, that has these tags."""
    runs = client.search_runs(experiment_ids, _with(tags), max_results=1, order_by=[f"{STARTED} {direction}"])
    return runs[0] if runs else None


def _without_key(client: MlflowClient, experiment_id: str, run_name: str) -> Run | None:
    """The first of this name that was made before runs had keys."""
    runs = client.search_runs(
        [experiment_id], _with({RUN_TAG: run_name}), max_results=MANY, order_by=[f"{STARTED} ASC"]
    )
    return next((run for run in runs if ID_TAG not in run.data.tags), None)


def _with(tags: Mapping[str, str]) -> str:
    return " and ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items())


def _experiment_id(client: MlflowClient, uri: str, name: str, artifact_root: Path) -> str:
    existing = client.get_experiment_by_name(name)
    if existing is None:
        location = None  # a server keeps the artifacts where it likes; without one they are ours to place
        if not is_server(uri):
            location = (artifact_root.absolute() / quote(name, safe="")).as_uri()
        return client.create_experiment(name, artifact_location=location, tags=EXPERIMENT_TAGS)
    if existing.lifecycle_stage == "deleted":
        raise ExperimentDeletedError(
            f"the MLflow experiment {name!r} (id {existing.experiment_id}) is deleted: bring it back "
            f"with `MLFLOW_TRACKING_URI={without_password(uri)} mlflow experiments restore "
            f"--experiment-id {existing.experiment_id}`, or name another experiment"
        )
    return existing.experiment_id
