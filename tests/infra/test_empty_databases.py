"""Databases of new homes: copies of what installation made, where it made any, and never over or beside another's."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from importlib.metadata import version
from pathlib import Path

import pytest

from infra import empty_databases
from infra.empty_databases import PACKAGES, begin, main
from infra.mlflow.client import open_client
from infra.prefect_server import PrefectServer


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make install` makes, among copies for other versions."""
    folder = tmp_path_factory.mktemp("share")
    (folder / "prefect-3.0.0.db").write_bytes(b"old")
    main(folder)
    return folder


def query(database: Path, sql: str) -> list[tuple]:
    with closing(sqlite3.connect(database)) as connection:
        return connection.execute(sql).fetchall()


@pytest.mark.thorough
def test_one_is_made_for_each_package_and_old_ones_go(made):
    assert sorted(file.name for file in made.iterdir()) == sorted(f"{name}-{version(name)}.db" for name in PACKAGES)
    before = [file.stat().st_mtime_ns for file in sorted(made.iterdir())]
    main(made)
    assert [file.stat().st_mtime_ns for file in sorted(made.iterdir())] == before


def test_they_hold_nothing_of_the_place_they_were_made_in(made):
    for package in PACKAGES:
        database = made / f"{package}-{version(package)}.db"
        tables = [name for (name,) in query(database, "SELECT name FROM sqlite_master WHERE type = 'table'")]
        rows = {name for name in tables if query(database, f'SELECT 1 FROM "{name}" LIMIT 1')}
        assert "alembic_version" in rows
        assert rows <= {"alembic_version", "workspaces"}
        assert str(made).encode() not in database.read_bytes()


@pytest.mark.thorough
def test_the_prefect_server_of_a_new_home_begins_with_a_copy(made, tmp_path, monkeypatch):
    monkeypatch.setattr(empty_databases, "FOLDER", made)
    server = PrefectServer(tmp_path / "home", port=0)
    server.start()
    try:
        database = tmp_path / "home" / "prefect.db"
        (head,) = query(made / f"prefect-{version('prefect')}.db", "SELECT version_num FROM alembic_version")
        assert query(database, "SELECT version_num FROM alembic_version") == [head]  # at once
        server.wait_until_healthy(300)
    finally:
        server.close()
    assert query(database, "SELECT version_num FROM alembic_version") == [head]  # nothing was left to migrate


def test_mlflow_in_a_new_home_begins_with_a_copy(made, tmp_path, monkeypatch):
    monkeypatch.setattr(empty_databases, "FOLDER", made)
    monkeypatch.setattr("mlflow.store.db.utils._initialize_tables", None)
    database = tmp_path / "home" / "mlflow" / "mlflow.db"
    client = open_client(f"sqlite:///{database}")
    experiment = client.create_experiment("arithmetic", artifact_location=str(tmp_path / "artifacts"))
    assert {found.name for found in client.search_experiments()} == {"Default", "arithmetic"}
    assert client.get_experiment(experiment).artifact_location == str(tmp_path / "artifacts")
    assert list(database.parent.glob(".*")) == []


@pytest.mark.parametrize("end", ["", "-wal", "-shm", "-journal"])
def test_no_copy_comes_where_files_of_a_database_are(made, tmp_path, end):
    """SQLite would apply the log of a removed database to the copy."""
    (tmp_path / f"prefect.db{end}").write_bytes(b"another's")
    assert not begin("prefect", tmp_path / "prefect.db", made)
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [b"another's"]


def test_without_a_copy_of_this_version_nothing_is_begun(tmp_path):
    (tmp_path / "mlflow-1.0.db").write_bytes(b"old")
    assert not begin("mlflow", tmp_path / "home" / "mlflow.db", tmp_path)
    assert not begin("no such package", tmp_path / "home" / "none.db", tmp_path)
    assert not (tmp_path / "home").exists()


def test_of_two_that_begin_the_first_one_stays(made, tmp_path, monkeypatch):
    def another_first(file: int) -> None:
        (tmp_path / "mlflow.db").write_bytes(b"another's")

    monkeypatch.setattr("os.fsync", another_first)
    assert not begin("mlflow", tmp_path / "mlflow.db", made)
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [b"another's"]


def test_a_folder_that_cannot_be_written_to_is_left_to_the_package(made, tmp_path):
    (tmp_path / "home").write_text("a file")
    assert not begin("prefect", tmp_path / "home" / "prefect.db", made)
