"""DPO on the helpful example, from its spec to everybody who reads its policy; killed on the way, and without."""

from __future__ import annotations

import json
import re
import signal
import sqlite3
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from infra.artifacts.export import check_export
from infra.artifacts.local_store import LocalStore
from infra.process_identity import this_process
from tests.e2e.launch import ROOT, command, environment, one_server, ppoflow, wait_for

pytestmark = pytest.mark.thorough
HELPFUL = ROOT / "examples" / "helpful"
RUN, STEPS = "preferred", 120
# One run of pytest pays for two of these: so the start learns less, and fewer prompts are answered.
OPTIONS = [f"--set={change}" for change in ("sft.num_steps=150", f"dpo.num_steps={STEPS}", "evaluation.num_prompts=32")]
ARGUMENTS = ["dpo", str(HELPFUL / "dpo.yaml"), "--run", RUN, *OPTIONS]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the policy was trained by the command, killed as it began to learn; then twice to the end."""
    home = tmp_path_factory.mktemp("dpo")
    with (home / "killed").open("w") as log:
        first = subprocess.Popen(
            command(*ARGUMENTS), cwd=ROOT, env=environment(home), stdout=log, stderr=log, text=True
        )
        wait_for(lambda: (home / "store" / "evaluation").is_dir(), "the start was evaluated", run=first)
        first.send_signal(signal.SIGKILL)
        first.wait()
    # What is half written at any other moment, too: nobody has to collect it.
    LocalStore(home / "store", writer=this_process().model_copy(update={"started": 1})).scratch()
    with one_server(home):
        for number in (1, 2):
            done = ppoflow(home, *ARGUMENTS)
            assert done.returncode == 0, done.stdout + done.stderr
            (home / f"said-{number}").write_text(done.stdout)
    return home


def stats(home: Path) -> dict[str, Any]:
    (made,) = (home / "store" / "dpo_policy").iterdir()
    return json.loads((made / "stats.json").read_text())


def evaluations(home: Path) -> list[float]:
    """The held-out scores of the start and of the policy, by when they were stored."""
    made = sorted((home / "store" / "evaluation").iterdir(), key=lambda path: path.stat().st_mtime)
    return [json.loads((path / "metrics.json").read_text())["evaluation/score"] for path in made]


def test_it_learns_what_is_preferred_and_its_answers_are_more_helpful(home: Path) -> None:
    metrics = stats(home)["metrics"]
    assert metrics["evaluation/rewards/accuracies"] > 0.85
    assert metrics["evaluation/loss"] < 0.55
    before, after = evaluations(home)
    assert after > before + 0.8
    assert re.search(rf"^  evaluation/score +{after:.4f}$", (home / "said-1").read_text(), re.MULTILINE)


def test_what_was_killed_ends_with_the_bytes_of_what_was_not(home: Path, tmp_path: Path) -> None:
    done = ppoflow(tmp_path, *ARGUMENTS)
    assert done.returncode == 0, done.stdout + done.stderr
    for place in (home, tmp_path):
        assert check_export(folder(place)) is not None
    assert weights(home) == weights(tmp_path)
    assert stats(home) == stats(tmp_path)


def folder(home: Path) -> Path:
    return home / "runs" / RUN / "dpo-policy"


def weights(home: Path) -> bytes:
    return (folder(home) / "model.safetensors").read_bytes()


def test_it_is_made_once_and_nobody_collects_it(home: Path) -> None:
    first, second = ((home / f"said-{number}").read_text() for number in (1, 2))
    assert first.partition("policy of run")[2] == second.partition("policy of run")[2]
    with sqlite3.connect(home / "prefect" / "prefect.db") as database:
        states = Counter(database.execute("select name, state_name from task_run").fetchall())
    assert states["train_dpo-1", "Cached"] == states["train_dpo-1", "Completed"] == 1
    collected = ppoflow(home, "gc", "--yes")
    assert "nothing to remove" in collected.stdout, collected.stdout


def test_mlflow_has_each_point_once(home: Path) -> None:
    with sqlite3.connect(home / "mlflow" / "mlflow.db") as database:
        points = database.execute("select key, step, count(*) from metrics group by key, step").fetchall()
        runs = database.execute("select status from runs").fetchall()
    counts = Counter(key for key, _, _ in points)
    assert ({count for _, _, count in points}, runs) == ({1}, [("FINISHED",)])
    assert {counts[name] for name in ("loss", "rewards/chosen", "rewards/margins", "rewards/accuracies")} == {STEPS}
    assert (counts["evaluation/score"], counts["evaluation/rewards/accuracies"]) == (2, 1)
    assert list((home / "mlflow").rglob("dpo.png"))
    assert list((home / "mlflow").rglob("preferences/report.md"))


def test_the_registered_policy_answers_and_ppo_starts_from_its_folder(home: Path) -> None:
    question = "how do I fix the old bike ?"
    said = ppoflow(home, "sample", "models:/helpful-dpo@candidate", question, "--max-tokens", "32")
    assert said.returncode == 0, said.stdout + said.stderr
    assert "it" in said.stdout.split()
    changes = (f"model={{path: {folder(home)}}}", "sft=null", "reward={function: generate.py:gold}")
    checked = ppoflow(home, "check", str(HELPFUL / "ppo.yaml"), *(f"--set={change}" for change in changes))
    assert checked.returncode == 0, checked.stdout + checked.stderr
