"""Where MLflow shows a run, what it is told of the run's data, and an outage in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from infra.mlflow.client import in_short, open_client
from infra.mlflow.run import find_page, front_page, run_page
from infra.mlflow.tracking import InputData, RunTracker
from tests.waiting import LONG_S


@pytest.fixture(scope="module")
def tracker(tmp_path_factory: pytest.TempPathFactory) -> RunTracker:
    folder = tmp_path_factory.mktemp("mlflow")
    tracker = RunTracker(f"sqlite:///{folder}/mlflow.db", "pages", "run-1", folder / "artifacts", timeout_s=LONG_S)
    assert tracker.page is None
    assert tracker.open(), tracker.last_error
    return tracker


def test_a_page_opens_where_training_runs_are_shown() -> None:
    view = "?workflowType=machine_learning"
    assert (
        run_page("http://me:secret@host:5000/", "3", "ab") == f"http://me:***@host:5000/#/experiments/3/runs/ab{view}"
    )
    assert run_page("sqlite:////a/mlflow.db", "3", "ab") == f"http://127.0.0.1:5000/#/experiments/3/runs/ab{view}"
    assert front_page("https://host") == f"https://host/#/experiments{view}"


def test_a_runs_page_is_found_by_its_name(tracker: RunTracker) -> None:
    assert find_page(tracker.uri, "run-1", timeout_s=LONG_S) == tracker.page
    assert str(tracker.run_id) in str(tracker.page)
    assert find_page(tracker.uri, "another", timeout_s=LONG_S) is None


def test_runs_of_one_name_with_keys_of_their_own_are_two_runs(tracker: RunTracker, tmp_path: Path) -> None:
    def opened(key: str | None) -> RunTracker:
        made = RunTracker(tracker.uri, "keys", "demo", tmp_path, key, timeout_s=LONG_S)
        assert made.open(), made.last_error
        return made

    one, other = opened("a" * 32), opened("b" * 32)
    assert one.run_id != other.run_id
    assert opened("a" * 32).run_id == one.run_id
    assert opened("b" * 32).run_id == other.run_id
    assert find_page(tracker.uri, "demo", "a" * 32, timeout_s=LONG_S) == one.page
    assert find_page(tracker.uri, "demo", "b" * 32, timeout_s=LONG_S) == other.page


def test_a_run_from_before_there_were_keys_gets_that_of_the_first_that_goes_on_with_it(
    tracker: RunTracker, tmp_path: Path
) -> None:
    def opened(key: str | None) -> str | None:
        made = RunTracker(tracker.uri, "before", "demo", tmp_path, key, timeout_s=LONG_S)
        assert made.open(), made.last_error
        return made.run_id

    before = opened(None)
    assert opened("a" * 32) == before
    assert opened("b" * 32) != before
    assert opened("a" * 32) == before


def test_a_database_that_cannot_be_opened_has_no_page(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_bytes(b"no database")
    assert find_page(f"sqlite:///{tmp_path}/mlflow.db", "run-1", timeout_s=LONG_S) is None


def test_an_experiment_says_that_it_trains_models(tracker: RunTracker) -> None:
    experiment = open_client(tracker.uri).get_experiment_by_name("pages")
    assert experiment.tags["mlflow.experimentKind"] == "custom_model_development"


def test_data_are_inputs_of_the_run_once(tracker: RunTracker) -> None:
    data = [InputData(f"{use} data", use, "d" * 64, "file:///store/d", rows) for use, rows in USES.items()]
    assert tracker.log_datasets(data), tracker.last_error
    assert tracker.log_datasets(data), tracker.last_error
    inputs = open_client(tracker.uri).get_run(str(tracker.run_id)).inputs.dataset_inputs
    told = {one.tags[0].value: (one.dataset.name, one.dataset.digest, one.dataset.profile) for one in inputs}
    assert len(inputs) == len(USES)
    assert told == {use: (f"{use} data", "d" * 36, json.dumps({"num_rows": rows})) for use, rows in USES.items()}


def test_data_that_another_run_has_just_noted_are_noted_at_the_second_try(
    tracker: RunTracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = [InputData("rows (training)", "training", "e" * 64, "file:///store/e", 3)]
    log, tries = MlflowClient.log_inputs, list[str]()

    def raced(*arguments: Any, **named: Any) -> None:
        tries.append("try")
        if len(tries) == 1:
            raise MlflowException("(sqlite3.IntegrityError) UNIQUE constraint failed: datasets.name [SQL: INSERT]")
        log(*arguments, **named)

    monkeypatch.setattr(MlflowClient, "log_inputs", raced)
    assert tracker.log_datasets(data), tracker.last_error
    assert len(tries) == 2


def test_an_outage_is_one_line_that_names_the_address(tmp_path: Path) -> None:
    away = RunTracker("http://me:secret@127.0.0.1:9", "e", "r", tmp_path)
    assert not away.open()
    assert away.last_error == "http://me:***@127.0.0.1:9 does not answer"


def test_what_mlflow_says_is_cut_to_a_line() -> None:
    assert in_short("TimeoutError: no answer within 6 s") == "does not answer"
    assert in_short("MlflowException: no\nsuch\nthing") == "MlflowException: no"
    assert len(in_short("x" * 999)) < 300


USES = {"training": 100, "evaluation": 10}
