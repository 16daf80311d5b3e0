"""The reward model of the helpful example, from its spec to everybody who reads its folder."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from infra.artifacts.export import check_export
from ppo_core.data.preferences import read_preferences
from ppo_core.data.rankings import read_rankings
from ppo_core.processes.plugins import Sources
from ppo_core.records import PromptRow
from ppo_core.scoring.reward import Sample
from ppo_core.scoring.weighted import WeightedRewards
from ppo_core.spec import RewardSpec
from tests.e2e.launch import ROOT, environment, one_server, ppoflow
from tests.experience.project import make_model, write_project

pytestmark = pytest.mark.thorough
HELPFUL = ROOT / "examples" / "helpful"
RUN = "learned"
VLLM = """
import json, sys
from vllm import LLM
model = LLM(sys.argv[1], runner="pooling", enforce_eager=True, dtype="float32", kv_cache_memory_bytes=2**26)
print(json.dumps([found.outputs.probs[0] for found in model.classify(json.loads(sys.argv[2]), use_tqdm=False)]))
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the reward model was trained, by the command, twice; with its Prefect server."""
    home = tmp_path_factory.mktemp("reward-model")
    with one_server(home):
        for number in (1, 2):
            done = train(home)
            assert done.returncode == 0, done.stdout + done.stderr
            (home / f"said-{number}").write_text(done.stdout)
        yield home


def train(home: Path, *options: str, spec: Path = HELPFUL / "reward_model.yaml") -> subprocess.CompletedProcess[str]:
    return ppoflow(home, "reward-model", str(spec), "--run", RUN, *options)


def folder(home: Path) -> Path:
    return home / "runs" / RUN / "reward-model"


def artifact(home: Path, kind: str) -> Path:
    (found,) = (home / "store" / kind).iterdir()
    return found


def held_out() -> tuple[list[Sample], list[str]]:
    """The held-out answers in the order of `scores.parquet`, and their texts."""
    rows = read_preferences("generate.py:held_out_preferences", Sources(HELPFUL))
    samples = [Sample(PromptRow("", row.prompt, [], None, {}), text) for row in rows for text in row.responses.values()]
    return samples, [f"{one.row.prompt}{one.response}" for one in samples]


def measured(home: Path) -> list[float]:
    return pq.read_table(artifact(home, "reward_evaluation") / "scores.parquet")["score"].to_pylist()


def test_it_finds_the_hidden_rule(home: Path) -> None:
    metrics = json.loads((artifact(home, "reward_evaluation") / "evaluation.json").read_text())["metrics"]
    assert metrics["reward_model/accuracy"] > 0.95
    assert metrics["reward_model/log_loss"] < 0.3
    assert metrics["reward_model/calibration_error"] < 0.2
    assert f"accuracy           {metrics['reward_model/accuracy']:.4f}" in (home / "said-1").read_text()


def test_the_reward_kind_model_and_vllm_give_the_measured_scores(home: Path) -> None:
    samples, texts = held_out()
    spec = RewardSpec.model_validate({"sources": [{"kind": "model", "path": str(folder(home))}]})
    given = [parts.scores["model"] for parts in WeightedRewards(spec, Sources(HELPFUL), "answer").score(samples)]
    assert given == pytest.approx(measured(home), abs=1e-5)
    switches = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCH_COMPILE_DISABLE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", VLLM, str(folder(home)), json.dumps(texts[:32])],
        env=environment(home, **switches),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == pytest.approx(measured(home)[:32], abs=1e-4)


def test_mlflow_has_each_point_once_and_a_version_that_scores(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with sqlite3.connect(home / "mlflow" / "mlflow.db") as database:
        points = database.execute("select key, step, count(*) from metrics group by key, step").fetchall()
        runs = database.execute("select status from runs").fetchall()
    assert ({count for _, _, count in points}, set(runs)) == ({1}, {("FINISHED",)})
    assert Counter(key for key, _, _ in points)["reward_model/loss_curve"] == 200
    assert list((home / "mlflow").rglob("reward_model.png"))
    [report] = (home / "mlflow").rglob("preferences/report.json")
    assert json.loads(report.read_text())["held_out_trained"] == 0
    told, stored = json.loads(report.read_text())["splits"], artifact(home, "preferences")
    for split in ("train", "eval"):
        rankings = read_rankings(stored / f"{split}.parquet")
        longest = max(len(text) for row in rankings for text in row.responses)
        assert (told[split]["rows"], told[split]["longest"]) == (len(rankings), longest)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{home}/mlflow/mlflow.db")
    import mlflow

    texts = held_out()[1]
    served: Any = mlflow.pyfunc.load_model("models:/helpful-reward-model@candidate")
    assert served.predict(texts[:8])["score"].tolist() == pytest.approx(measured(home)[:8], abs=1e-5)
    assert "models:/helpful-reward-model/1" in (home / "said-2").read_text()  # the same one, not a second version


def test_it_is_made_once_and_nobody_collects_it(home: Path) -> None:
    first, second = ((home / f"said-{number}").read_text() for number in (1, 2))
    assert first.partition("reward model of run")[2] == second.partition("reward model of run")[2]
    with sqlite3.connect(home / "prefect" / "prefect.db") as database:
        states = Counter(database.execute("select name, state_name from task_run").fetchall())
    assert states["train_reward_model-0", "Cached"] == states["train_reward_model-0", "Completed"] == 1
    assert check_export(folder(home)) is not None
    collected = ppoflow(home, "gc", "--yes")
    assert "nothing to remove" in collected.stdout, collected.stdout


def test_a_malformed_row_is_refused_before_a_server_starts(tmp_path: Path) -> None:
    rows = [{"prompt": "7+5=", "chosen": "7", "rejected": "8"}, {"prompt": "7+5=", "chosen": "7", "rejected": "7"}]
    done = train(tmp_path / "home", spec=write_project(tmp_path, rows, make_model(tmp_path / "model")))
    message = "InputError: pairs.jsonl: row 2 has chosen == rejected ('7')"
    assert (done.returncode, message in done.stderr) == (2, True), done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert "Prefect's server" not in done.stdout
    assert not (tmp_path / "home").exists()
