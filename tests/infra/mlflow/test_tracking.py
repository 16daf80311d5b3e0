"""The tracker against real MLflow: its sqlite store."""

from __future__ import annotations

import json
import math
import re
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from infra.mlflow.circuit_breaker import CircuitBreaker
from infra.mlflow.client import open_client, without_password
from infra.mlflow.learning_curves import Panel, learning_curves, png
from infra.mlflow.names import entry_name, marked_cut
from infra.mlflow.tracking import Point, RunTracker, batches_of_whole_steps
from tests.infra.mlflow.mlflow_points import NOW, points_of, rows
from tests.waiting import FOR_EVER_S, LONG_S, until


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mlflow")


@pytest.fixture
def tracker(store: Path, request: pytest.FixtureRequest) -> RunTracker:
    name = re.sub(r"\W", "-", request.node.name)
    tracker = RunTracker(f"sqlite:///{store}/mlflow.db", "arithmetic", name, store / "artifacts", timeout_s=LONG_S)
    assert tracker.open(), tracker.last_error
    return tracker


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("train/policy_loss", "train/policy_loss"),
        ("eval/pass@4", "eval/pass_4"),
        ("p(x, y) %", "p_x_ y_ _"),
        ("a//b", "a/b"),
        ("/a/", "a"),
        ("../a", "__/a"),
        ("a/./b", "a/_/b"),
        ("a..b", "a__b"),
        ("Genauigkeit für größer", "Genauigkeit für größer"),
        ("", "_"),
    ],
)
def test_names_become_what_mlflow_accepts(key: str, name: str) -> None:
    from mlflow.utils.validation import _validate_metric_name

    assert entry_name(key) == name
    _validate_metric_name(name)


def test_a_name_too_long_keeps_apart_from_its_neighbours() -> None:
    one, two = entry_name("x" * 300 + "1"), entry_name("x" * 300 + "2")
    assert len(one) == len(two) == 250
    assert one != two


def test_a_value_too_long_says_that_it_was_cut() -> None:
    cut = marked_cut("v" * 9000, 6000)
    assert len(cut) == 6000
    assert cut.endswith("v … [cut: 9000 characters in all]")
    assert marked_cut("v" * 6000, 6000) == "v" * 6000


def test_a_password_is_not_shown() -> None:
    assert without_password("postgresql://me:secret@host:5432/db") == "postgresql://me:***@host:5432/db"
    assert without_password("sqlite:////a:b/mlflow.db") == "sqlite:////a:b/mlflow.db"
    link = RunTracker("http://me:secret@127.0.0.1:5000", "e", "r", Path("unused")).link()
    assert link == "http://me:***@127.0.0.1:5000"


def test_batches_keep_a_step_together() -> None:
    points = [point for step in range(3) for point in points_of(step, keys=4)]
    assert [len(batch) for batch in batches_of_whole_steps(points, 9)] == [8, 4]
    assert [len(batch) for batch in batches_of_whole_steps(points, 3)] == [3, 1, 3, 1, 3, 1]
    assert [point for batch in batches_of_whole_steps(points, 5) for point in batch] == points


def test_the_run_is_found_again_by_its_name_and_runs_again(tracker: RunTracker, store: Path) -> None:
    assert tracker.finish("FAILED")
    again = RunTracker(tracker.uri, tracker.experiment, tracker.run_name, store / "artifacts")
    assert again.open()
    assert again.run_id == tracker.run_id
    run = open_client(tracker.uri).get_run(str(again.run_id))
    assert run.info.status == "RUNNING"
    assert run.info.artifact_uri.startswith((store / "artifacts").as_uri())
    assert again.finish()
    assert again.open()
    assert open_client(tracker.uri).get_run(str(again.run_id)).info.status == "RUNNING"
    assert again.finish()
    assert open_client(tracker.uri).get_run(str(again.run_id)).info.status == "FINISHED"
    assert again.link() == f"mlflow ui --backend-store-uri {tracker.uri}"


def test_each_point_once_also_when_logged_again(tracker: RunTracker, store: Path) -> None:
    points = [point for step in range(60) for point in points_of(step)]
    assert tracker.log_points(points)
    assert tracker.log_points(points[:30])
    assert tracker.log_points([*points[20:], *points_of(60)])
    expected = sorted((p.key, p.step, p.value, p.timestamp_ms) for p in [*points, *points_of(60)])
    assert rows(store, tracker.run_id) == expected
    assert tracker.seen_points("train/m3") == {(p.step, p.timestamp_ms) for step in range(61) for p in points_of(step)}
    assert tracker.seen_points("train/unknown") == set()


def test_nan_is_counted_and_infinity_is_stored_as_the_largest_number(tracker: RunTracker, store: Path) -> None:
    values = [1.5, math.nan, math.inf, -math.inf]
    points = [Point("pass@1", value, step, NOW) for step, value in enumerate(values)]
    assert tracker.log_points(points)
    assert tracker.log_points(points[2:])
    assert tracker.nan_skipped == 1
    largest = sys.float_info.max
    assert rows(store, tracker.run_id) == [
        ("pass_1", 0, 1.5, NOW),
        ("pass_1", 2, largest, NOW),
        ("pass_1", 3, -largest, NOW),
    ]


def test_a_parameter_that_changed_becomes_a_tag(tracker: RunTracker) -> None:
    many = {f"section.key{number}": number for number in range(150)}
    assert tracker.log_parameters({**many, "iterations": 30, "prompt": "x" * 9000, "empty": ""})
    assert tracker.log_parameters({**many, "iterations": 60, "new": True})
    data = open_client(tracker.uri).get_run(str(tracker.run_id)).data
    assert (data.params["iterations"], data.tags["ppoflow.changed.iterations"]) == ("30", "60")
    assert (data.params["new"], data.params["empty"], data.params["section.key149"]) == ("True", "", "149")
    assert data.params["prompt"].endswith("[cut: 9000 characters in all]")
    assert tracker.log_parameters({"iterations": 30})
    assert open_client(tracker.uri).get_run(str(tracker.run_id)).data.tags["ppoflow.changed.iterations"] == "30"


def test_table_text_figure_and_tags(tracker: RunTracker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tracker.uri)  # load_table alone asks the environment
    figure = learning_curves(
        "run", [Panel("score", {"train": [(0, 0.1), (1, math.nan)], "held out": [(0, 0.2)]}, limits=(0, 1))]
    )
    assert png(figure).startswith(b"\x89PNG")
    for _ in range(2):
        assert tracker.log_table("samples/last", ["prompt", "score"], [["1+1=", 1.0], ["2+2=", math.nan]])
        assert tracker.log_figure("curves", figure)
    assert tracker.log_text("spec.json", "{}")
    assert tracker.set_tags({"lineage": "sha256:1"})
    client = open_client(tracker.uri)
    run = client.get_run(str(tracker.run_id))
    table = client.load_table(run.info.experiment_id, "samples/last.json", [run.info.run_id])
    assert table["prompt"].tolist() == ["1+1=", "2+2="]
    assert json.loads(run.data.tags["mlflow.loggedArtifacts"]) == [{"path": "samples/last.json", "type": "table"}]
    assert run.data.tags["lineage"] == "sha256:1"
    assert {file.path for file in client.list_artifacts(run.info.run_id)} == {"samples", "curves.png", "spec.json"}


def test_a_figure_needs_a_panel() -> None:
    with pytest.raises(ValueError, match="at least one"):
        learning_curves("empty", [])


def test_a_deleted_experiment_says_how_to_bring_it_back(tracker: RunTracker, store: Path) -> None:
    client = open_client(tracker.uri)
    number = client.create_experiment("gone")
    client.delete_experiment(number)
    other = RunTracker(tracker.uri, "gone", "r", store)
    assert not other.open()
    assert f"mlflow experiments restore --experiment-id {number}" in str(other.last_error)


def test_a_refusal_does_not_silence_the_calls_after_it(tracker: RunTracker) -> None:
    assert not tracker.log_points([Point("k", 1.0, 0, -5)])
    assert "nonnegative" in str(tracker.last_error)
    assert tracker.available()
    assert tracker.log_points(points_of(0))


def test_a_locked_database_costs_no_more_than_the_timeout(tracker: RunTracker, store: Path) -> None:
    timeout_s = 5.0
    hurried = RunTracker(
        tracker.uri, tracker.experiment, tracker.run_name, store, timeout_s=timeout_s, back_off_s=FOR_EVER_S
    )
    assert hurried.open()
    with sqlite3.connect(store / "mlflow.db") as database:
        database.execute("begin exclusive")
        started = time.monotonic()
        assert not hurried.log_points(points_of(1))
        assert not hurried.log_points(points_of(1))
        assert hurried.seen_points("train/m0") is None
        assert time.monotonic() - started < 2 * timeout_s
        assert not hurried.available()
        database.rollback()
    # sqlite itself waits 20 s for its lock, unseen.
    until(lambda: hurried.open() and hurried.log_points(points_of(1)), "the points arrive")
    assert len(rows(store, tracker.run_id)) == len(points_of(1))


def test_a_breaker_skips_calls_after_an_outage_until_the_pause_is_over() -> None:
    made: list[int] = []

    def fail() -> int:
        made.append(1)
        raise OSError("away")

    pause_s = 3.0
    breaker = CircuitBreaker(pause_s, lambda error: True)
    assert breaker.call(fail, LONG_S) is None
    assert breaker.call(fail, LONG_S) is None
    assert len(made) == 1
    assert breaker.last_error == "OSError: away"
    time.sleep(pause_s)
    assert breaker.call(lambda: 7, LONG_S) == 7


LATE = """
import time
from infra.mlflow.circuit_breaker import CircuitBreaker

def late():
    time.sleep(2)
    print("done", flush=True)

print(CircuitBreaker(0, lambda error: True).call(late, 0.1), flush=True)
"""


def test_the_process_ends_after_what_a_late_call_does() -> None:
    """In the middle of a picture it would abort: what is C++ cannot be ended there."""
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "None\ndone\n", "")
