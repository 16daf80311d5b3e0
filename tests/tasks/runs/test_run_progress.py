"""What another shell is told of a run under way: before its first iteration, here or on another machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from infra.backend import acquire_lease, open_leases, open_records
from infra.process_identity import ProcessIdentity, this_process
from infra.runs.holder import holder_of
from ppo_core.records import InputError
from tasks.runs.inspect import read_status
from tasks.runs.progress import EVERY_S, ProgressFile, announced, doing_now, progress_path, read_progress
from tasks.stages.holding import DPO, REWARD_MODEL, RLHF, lease_name
from tests.infra.runs.leases import somebody

RUN = "demo"
OTHER = f"""
import sys
from tasks.runs.progress import ProgressFile
ProgressFile({RUN!r}).write("another's stage")
print("written", flush=True)
sys.stdin.readline()
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty place for state."""
    monkeypatch.setenv("PPOFLOW_HOME", str(tmp_path))
    monkeypatch.delenv("PPOFLOW_STORE", raising=False)
    return tmp_path


def stage_on_file() -> str | None:
    doing = read_progress(progress_path(RUN))
    return None if doing is None else doing.stage


def test_a_run_without_an_iteration_is_told_as_what_its_process_does(home: Path) -> None:
    with pytest.raises(InputError, match="there is no run"):
        read_status(RUN)
    with announced(RUN, "starting"):
        found, lines = read_status(RUN)  # before the run is this process's
        assert found is None
        assert lines[0] == f"run {RUN}: no iteration is committed yet"
        assert lines[1].startswith("  doing now          starting (")
        assert holder_of(open_leases(home / "store", RUN)) is None
        lease = acquire_lease(home / "store", RUN)
        ProgressFile(RUN).write("finetune_policy 3/50, loss 1.2", "0.1 s each, about 5 s of this stage to go")
        stage, how_long, at_work = doing_now(RUN)
        assert stage.startswith("  doing now          finetune_policy 3/50, loss 1.2 (")
        assert how_long == "  how long           0.1 s each, about 5 s of this stage to go"
        assert f"process {os.getpid()} on " in at_work
        assert "since 20" in at_work
        lease.release()
    assert not progress_path(RUN).exists()
    with pytest.raises(InputError, match="there is no run another"):
        read_status("another")


def test_a_run_that_was_ended_before_its_first_iteration_is_told_how_to_go_on(home: Path) -> None:
    def told(name: str) -> list[str]:
        found, lines = read_status(name)
        assert found is None
        return lines

    store, here = home / "store", this_process()
    dead = ProcessIdentity(**{**here.model_dump(), "started": here.started + 1})
    acquire_lease(store, RUN, identity=dead)
    first = f"run {RUN}: no iteration is committed yet"
    assert told(RUN) == [first, f"  continue           ppoflow train SPEC --run {RUN}; finished work is kept"]
    lease = acquire_lease(store, RUN)
    assert [line.split()[:2] for line in told(RUN)[1:]] == [["at", "work"]]
    assert f"process {os.getpid()} on " in told(RUN)[1]
    open_records(store, RUN, lease=lease).create_spec({})
    lease.release()
    assert told(RUN) == [first, f"  continue           ppoflow resume {RUN}; finished work is kept"]
    for flow in (DPO, REWARD_MODEL, RLHF):
        acquire_lease(store, lease_name(flow, flow), identity=dead)
        assert told(flow)[1] == f"  continue           ppoflow {flow} SPEC --run {flow}; finished work is kept"


@pytest.mark.parametrize("lease", [RUN, *(lease_name(flow, RUN) for flow in (DPO, REWARD_MODEL, RLHF))])
def test_of_a_process_on_another_machine_its_name_is_told(home: Path, lease: str) -> None:
    """Also while it trains on preferences, before the run itself has begun."""
    ProgressFile(RUN).write("what the file of this machine says")
    acquire_lease(home / "store", lease, identity=somebody("elsewhere"))
    found, (_, line) = read_status(RUN)
    assert found is None
    assert "on elsewhere (since" in line
    assert f"ppoflow status {RUN} says more there" in line


def test_a_dead_process_does_nothing(home: Path) -> None:
    here = this_process()
    dead = ProcessIdentity(**{**here.model_dump(), "started": here.started + 1})  # its pid is another's now
    acquire_lease(home / "store", RUN, identity=dead)
    ProgressFile(RUN).write("starting")
    document = json.loads(progress_path(RUN).read_text())
    progress_path(RUN).write_text(json.dumps({**document, "process": dead.model_dump()}))
    assert holder_of(open_leases(home / "store", RUN)) is None
    assert doing_now(RUN) == []


def test_the_file_is_written_every_few_seconds_and_at_once_where_asked(home: Path) -> None:
    now = 100.0
    file = ProgressFile(RUN, lambda: now)
    for text, seconds, at_once, expected in (
        ("a", 0.0, False, "a"),
        ("b", EVERY_S - 0.1, False, "a"),
        ("c", 0.2, False, "c"),
        ("d", 0.1, True, "d"),
    ):
        now += seconds
        file.write(text, at_once=at_once)
        assert stage_on_file() == expected
    assert [path.name for path in progress_path(RUN).parent.iterdir()] == ["progress.json"]
    progress_path(RUN).write_text("{")
    assert doing_now(RUN) == []


def test_a_second_process_leaves_the_file_of_the_first_alone() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "written\n"
        with announced(RUN, "mine"):
            assert stage_on_file() == "another's stage"
        assert stage_on_file() == "another's stage"
        other.communicate("\n")
    with announced(RUN, "mine"):
        assert stage_on_file() == "mine"


def test_what_cannot_be_written_ends_nothing(home: Path) -> None:
    (home / "runs").write_text("a file where the folder should be")
    with announced(RUN, "starting"):
        assert doing_now(RUN) == []
