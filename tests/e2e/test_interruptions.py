"""A stopped run: what is kept, and what is said."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.e2e.launch import DEADLINE_S, ppoflow, processes_of, record_files, start, wait_for

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
