"""Addresses of databases in folders with names of any kind."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy

from infra.addresses import sqlite_file, sqlite_url
from infra.mlflow.tracking import RunTracker
from infra.settings import Settings
from tests.waiting import LONG_S


@pytest.mark.parametrize("name", ["plain", "feature%2Fx", "what?", "100%", "a b", "ü#1", "%3F?"])
def test_the_address_of_a_database_leads_to_its_file(name: str, tmp_path: Path) -> None:
    file = tmp_path / name / "mlflow.db"
    url = sqlite_url(file)
    assert sqlite_file(url) == file
    file.parent.mkdir()
    sqlalchemy.create_engine(url).connect().close()
    assert file.is_file()


def test_the_addresses_of_servers_and_those_with_options_are_of_no_file() -> None:
    assert sqlite_file("http://127.0.0.1:5000") is None
    assert sqlite_file("sqlite:////a/b.db?timeout=3") is None
    assert sqlite_file("sqlite:///:memory:") is sqlite_file("sqlite:///") is None


def test_mlflows_database_lies_in_a_home_whose_name_has_percent_and_question_marks(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path / "feature%2Fx?")
    tracker = RunTracker(settings.tracking_uri, "e", "r", settings.mlflow_folder / "artifacts", timeout_s=LONG_S)
    assert tracker.open(), tracker.last_error
    assert (settings.mlflow_folder / "mlflow.db").is_file()
    assert tracker.log_text("a.txt", "hello")
    assert list(settings.mlflow_folder.rglob("a.txt"))
