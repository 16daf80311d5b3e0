"""What only the last record of a run says, which no later one names: it must be possible, or it is taken out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infra.runs.records import RecordCorrupted
from tasks.runs.fork import fork_run
from tasks.runs.fsck import check_run
from tasks.runs.inspect import read_run
from tasks.runs.record_chain import made_with
from tasks.runs.repair import repair_records
from tasks.runs.retention import find_garbage
from tasks.runs.run_state import spec_to_go_on
from tests.tasks.toy_runs import ToyRun, digests, finished

pytestmark = pytest.mark.usefixtures("prefect_server")
SHORT = ("iterations=4", "dataset.evaluation=null", "registry.metric=policy/quality")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> ToyRun:
    """A finished run."""
    return finished(tmp_path_factory.mktemp("trained") / "home", SHORT)


@pytest.fixture
def run(trained: ToyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ToyRun:
    """Its copy, where ppoflow keeps its state."""
    return trained.own_copy(tmp_path / "home", monkeypatch)


def changed(**values: Any) -> Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]:
    """Other values of the spec, with the digest that follows; sections are joined to keys by two underscores."""
    other = {name.replace("__", "."): value for name, value in values.items()}
    return lambda record, spec: record | {"changed": other, "spec_digest": made_with(spec, other)}


def retention(keep_last: int) -> Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]:
    """Fewer checkpoints are kept."""
    return lambda record, spec: record | {"retention": record["retention"] | {"keep_last": keep_last}}


FORGED = {
    "another seed": (changed(seed=9), "was made with another seed, with which no run goes on"),
    "two others": (
        changed(seed=9, update__learning_rate=0.5),
        "was made with another seed, update.learning_rate, with which",
    ),
    "no key at all": (changed(nonsense__key=1), "was made with another nonsense.key"),
    "no key of a section": (
        changed(guards__nonsense=1),
        r"was made with a spec that is none \(guards.nonsense: Extra inputs",
    ),
    "no number": (changed(iterations="many"), r"was made with a spec that is none \(iterations: "),
    "retention": (retention(1), "keeps checkpoints by .*keep_last=1.*, and its spec says .*keep_last=None"),
}


@pytest.mark.parametrize("forged", FORGED)
def test_what_it_cannot_say_is_refused_everywhere(run: ToyRun, forged: str) -> None:
    before, (forge, complaint) = digests(run.records()), FORGED[forged]
    spec = run.records()[0].spec
    assert spec is not None
    run.rewrite("iterations/000004.json", lambda record: forge(record, spec))
    told = rf"the record of iteration 4 of run toy {complaint}.*: `ppoflow fsck toy --repair` takes iteration 4 and"
    asked: tuple[Callable[[], object], ...] = (
        lambda: read_run("toy"),
        lambda: spec_to_go_on("toy"),
        lambda: run.train("iterations=5"),
        lambda: fork_run("toy", 4, "new", ["iterations=6"]),
    )
    for ask in asked:
        with pytest.raises(RecordCorrupted, match=told):
            ask()
    garbage = find_garbage()
    assert (garbage.artifacts, [*garbage.unreadable]) == ([], ["run toy"])
    assert [(one.repair, one.iteration) for one in check_run("toy", lambda text: None).damages] == [("records", 4)]
    repair_records("toy")
    assert digests(run.train()) == before
    assert check_run("toy", lambda text: None).damages == []


def test_what_may_change_may_be_said(run: ToyRun) -> None:
    """Also by a fork, of which whole sections may have been others, and whose rule of retention may be another."""
    guarded = ("guards.max_kl=50", "guards.on_divergence=rollback", "guards.rollback_iterations=3")
    run.train("iterations=6", "checkpoint.keep_last=2", "engines.timeout_s=77", *guarded)
    assert run.records()[-1].retention.keep_last == 4
    assert check_run("toy", lambda text: None).damages == []
    fork_run("toy", 5, "new", ["iterations=7", "update.learning_rate=0.5", "checkpoint.keep_last=null"])
    assert check_run("new", lambda text: None).damages == []
    assert find_garbage().unreadable == {}
