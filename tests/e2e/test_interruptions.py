"""Stopped runs, and runs that cannot start: what is kept, and what is said."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.e2e.launch import DEADLINE_S, ppoflow, processes_of, record_files, start, train, wait_for

pytestmark = pytest.mark.thorough


def test_a_run_shows_what_it_does_and_ends_cleanly_on_sigterm_saying_how_to_go_on(tmp_path: Path) -> None:
    run = start(tmp_path, "stopped", "--set", "sft.num_steps=150", "--set", "iterations=20")
    progress = tmp_path / "runs" / "stopped" / "progress.json"
    wait_for(lambda: progress.exists() and "finetune_policy" in progress.read_text(), "the supervised start", run=run)
    run.send_signal(signal.SIGSTOP)  # however busy the machine is, the answer is of this moment
    try:
        told = ppoflow(tmp_path, "status", "stopped").stdout
    finally:
        run.send_signal(signal.SIGCONT)
    assert told.startswith("run stopped: no iteration is committed yet\n")
    assert "  doing now          finetune_policy" in told
    assert f"process {run.pid} on " in told
    wait_for(lambda: len(record_files(tmp_path, "stopped")) >= 1, "the start", run=run)
    run.send_signal(signal.SIGTERM)
    output, _ = run.communicate(timeout=DEADLINE_S)
    assert run.returncode == 130, output
    first, second, *_ = output.splitlines()
    assert first.startswith("starting: run stopped from ")
    assert second.endswith(" s  checking the spec, its data, rewards and model")
    assert not progress.exists()
    assert "continue" in output
    assert "ppoflow train" in output
    assert "vllm serve" in output
    assert (tmp_path / "runs" / "stopped" / "best-policy" / "config.json").is_file()
    assert not list(processes_of(tmp_path))


def test_a_prefect_server_that_is_not_there_is_named_in_a_line(tmp_path: Path) -> None:
    done = train(tmp_path, "alone", PREFECT_API_URL="http://127.0.0.1:9/api")
    assert done.returncode == 2
    assert "no Prefect server answers at http://127.0.0.1:9/api" in done.stderr
    assert "unset PREFECT_API_URL" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "store").exists()
