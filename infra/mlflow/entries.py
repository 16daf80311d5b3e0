"""What one call to MLflow writes into a run: parameters, tags, points, tables, data sets."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from infra.mlflow.names import entry_name
from infra.mlflow.points import Point

if TYPE_CHECKING:
    from infra.mlflow.run import OpenRun

CHANGED_PREFIX = "ppoflow.changed."
MAX_ENTRIES_PER_CALL = 100
MAX_DIGEST_LENGTH = 36


@dataclass(frozen=True)
class InputData:
    """Data that a run reads: what it is called, what for (`training`, `evaluation` …), and how many rows it has."""

    name: str
    context: str
    digest: str
    source: str
    rows: int


def send_parameters(run: OpenRun, wanted: Mapping[str, str]) -> None:
    """Those that are there already keep their value; a new value goes into a tag."""
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
    send_tags(run, changed)


def send_tags(run: OpenRun, tags: Mapping[str, str]) -> None:
    """In calls that MLflow takes."""
    from mlflow.entities import RunTag

    remaining = iter([RunTag(key, value) for key, value in tags.items()])
    while batch := list(islice(remaining, MAX_ENTRIES_PER_CALL)):
        run.client.log_batch(run.run_id, tags=batch)


def send_points(run: OpenRun, points: Sequence[Point]) -> None:
    """In one call."""
    from mlflow.entities import Metric

    limit = sys.float_info.max
    metrics = [Metric(entry_name(p.key), max(-limit, min(limit, p.value)), p.timestamp_ms, p.step) for p in points]
    run.client.log_batch(run.run_id, metrics=metrics)


def send_file(run: OpenRun, name: str, content: bytes) -> None:
    """Among the artifacts."""
    with TemporaryDirectory() as folder:
        file = Path(folder, name)
        file.write_bytes(content)
        run.client.log_artifact(run.run_id, str(file))


def send_table(run: OpenRun, file: str, text: str) -> None:
    """The file, and the tag by which MLflow's page finds it."""
    tag = "mlflow.loggedArtifacts"
    run.client.log_text(run.run_id, text, file)
    tables = json.loads(run.client.get_run(run.run_id).data.tags.get(tag, "[]"))
    entry = {"path": file, "type": "table"}
    if entry not in tables:
        run.client.set_tag(run.run_id, tag, json.dumps([*tables, entry]))


def cell(value: object) -> object:
    """A table's cell as JSON can have it."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no nan, and the page would show no table at all
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def send_datasets(run: OpenRun, datasets: Sequence[InputData]) -> None:
    """As inputs of the run."""
    from mlflow.entities import Dataset, DatasetInput, InputTag
    from mlflow.exceptions import MlflowException
    from mlflow.utils.mlflow_tags import MLFLOW_DATASET_CONTEXT

    inputs = [
        DatasetInput(
            Dataset(
                name=data.name,
                digest=data.digest[:MAX_DIGEST_LENGTH],
                source_type="ppoflow",
                source=json.dumps({"uri": data.source}),
                profile=json.dumps({"num_rows": data.rows}),
            ),
            tags=[InputTag(MLFLOW_DATASET_CONTEXT, data.context)],
        )
        for data in datasets
    ]
    try:
        run.client.log_inputs(run.run_id, datasets=inputs)
    except MlflowException as error:
        if "UNIQUE constraint" not in str(error) and "duplicate key" not in str(error):
            raise
        run.client.log_inputs(run.run_id, datasets=inputs)  # another run has just written down the same data
