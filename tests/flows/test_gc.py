"""What `ppoflow gc` and its flow remove, and what they leave where they were only asked to look."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli import app
from flows.gc import collect_garbage
from infra.artifacts.local_store import LocalStore
from tests.tasks.toy_runs import ToyRun, snapshot

pytestmark = pytest.mark.usefixtures("prefect_server")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalStore:
    """That of a finished run, with an artifact that no record needs."""
    run = ToyRun(tmp_path / "home", ("iterations=1", "dataset.evaluation=null"))
    run.train()
    monkeypatch.setenv("PPOFLOW_HOME", str(run.home))
    monkeypatch.delenv("PPOFLOW_STORE", raising=False)
    store = LocalStore(run.home / "store")
    folder = store.scratch()
    (folder / "a").write_text("nobody needs it")
    store.put(folder, "scores", "nobodys")
    return store


@pytest.mark.parametrize(("options", "answer"), [(["--dry-run"], ""), (["--dry-run", "--yes"], ""), ([], "n\n")])
def test_what_is_only_listed_or_declined_stays(store: LocalStore, options: list[str], answer: str) -> None:
    before = snapshot(Path(store.root))
    told = CliRunner().invoke(app, ["gc", *options], input=answer)
    assert told.exit_code == 0, told.output
    assert "nobodys" in told.output
    assert "nothing was removed" in told.output
    assert snapshot(Path(store.root)) == before


@pytest.mark.parametrize(("options", "answer"), [(["--yes"], ""), ([], "y\n")])
def test_what_nobody_needs_goes_and_nothing_else(store: LocalStore, options: list[str], answer: str) -> None:
    before = snapshot(Path(store.root))
    told = CliRunner().invoke(app, ["gc", *options], input=answer)
    assert told.exit_code == 0, told.output
    assert_only_that_is_gone(store, before)


def test_the_flow_removes_only_where_it_is_told_to(store: LocalStore) -> None:
    before = snapshot(Path(store.root))
    looked = collect_garbage(False, False)
    assert (looked.things, looked.removed_bytes) == (1, 0)
    assert snapshot(Path(store.root)) == before
    removed = collect_garbage(True, False)
    assert removed.removed_bytes == removed.found_bytes == looked.found_bytes > 0
    assert_only_that_is_gone(store, before)


def assert_only_that_is_gone(store: LocalStore, before: dict[str, bytes]) -> None:
    after = snapshot(Path(store.root))
    assert after == {name: content for name, content in before.items() if "nobodys" not in name}
    assert len(after) < len(before)
