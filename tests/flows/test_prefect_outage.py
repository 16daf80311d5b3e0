"""Prefect's server may die under a run: the run goes on, and its page is right once the server is back."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.flows import outage_program

ROOT = Path(__file__).parents[2]
PATIENCE_S = 150.0


@pytest.mark.thorough
def test_a_run_outlives_its_prefect_server(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", outage_program.__name__, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "committed": outage_program.ITERATIONS + 1,
        "state": "Completed",
    }
