"""While a run is checked: other shells are told so, Ctrl-C is answered, and nothing stays."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from tasks.runs.progress import doing_now
from tests.e2e.launch import DEADLINE_S, command, environment
from tests.waiting import until


def test_a_check_is_told_to_other_shells_and_can_be_interrupted(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = project / "state"
    monkeypatch.setenv("PPOFLOW_HOME", str(home))
    monkeypatch.delenv("PPOFLOW_STORE", raising=False)
    (project / "rewards.py").write_text("import time\n\ntime.sleep(3600)\n")
    with subprocess.Popen(
        command("train", "spec.yaml"),
        cwd=project,
        env=environment(home),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as run:
        until(lambda: any("checking the spec" in line for line in doing_now("mine")), "checking")
        run.send_signal(signal.SIGINT)
        output, _ = run.communicate(timeout=DEADLINE_S)
    assert output.splitlines()[-1] == "interrupted; nothing was started"
    assert run.returncode == 130
    assert not home.exists()
