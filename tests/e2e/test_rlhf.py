"""The whole way of the helpful example on real engines: killed in two of its parts, it ends with the same bytes."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests.e2e.launch import (
    ROOT,
    artifact,
    command,
    digests,
    environment,
    one_server,
    ppoflow,
    record_files,
    records,
    wait_for,
)

pytestmark = pytest.mark.thorough
SPEC = ROOT / "examples" / "helpful" / "rlhf.yaml"
RUN = "way"
SMALL = {
    "reward_model.fit.num_steps": 40,
    "run.sft.num_steps": 40,
    "run.model.critic": "<reward_model>",
    "run.iterations": 2,
    "run.rollout.prompts_per_iteration": 16,
    "run.update.num_minibatches": 2,
    "run.evaluation.every": 1,
    "run.evaluation.num_prompts": 16,
}
ASKED = (str(SPEC), "--run", RUN, *(part for key, value in SMALL.items() for part in ("--set", f"{key}={value}")))


def killed_once(home: Path, happened: Callable[[], bool], what: str) -> None:
    """The command, whose process is killed when that has happened."""
    process = subprocess.Popen(
        command("rlhf", *ASKED),
        cwd=ROOT,
        env=environment(home),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    wait_for(happened, what, run=process)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


def made(home: Path) -> tuple[bytes, list[dict[str, str]]]:
    weights = home / "runs" / RUN / "reward-model" / "model.safetensors"
    return weights.read_bytes(), [digests(record) for record in records(home, RUN)]


def heads(home: Path) -> list[list[list[float]]]:
    """That of the reward model, and that of the critic of checkpoint 0."""
    start = artifact(records(home, RUN)[0], "checkpoint")["uri"].rpartition("/")[2]
    critic = load_file(home / "store" / "checkpoint" / start / "critic" / "value_head.safetensors")
    reward_model = load_file(home / "runs" / RUN / "reward-model" / "model.safetensors")
    return [reward_model["score.weight"].tolist(), critic["weight"].tolist()]


def flow_states(home: Path) -> Counter[tuple[str, str]]:
    """How many flow runs of each flow are in which state."""
    with sqlite3.connect(home / "prefect" / "prefect.db") as database:
        rows = database.execute("select flow.name, state_name from flow_run join flow on flow.id = flow_run.flow_id")
        return Counter((str(flow), str(state)) for flow, state in rows)


def test_killed_in_two_parts_it_goes_on_by_the_same_command_to_the_same_bytes(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    done = ppoflow(whole, "rlhf", *ASKED)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "models:/helpful-reward-model/1, held-out accuracy" in done.stdout
    assert "\n  promoted " in done.stdout
    reward_model, critic = heads(whole)
    assert critic == reward_model
    with one_server(broken):
        killed_once(broken, lambda: any((broken / "store" / "preferences").glob("*/manifest.json")), "preferences")
        killed_once(broken, lambda: len(record_files(broken, RUN)) == 2, "the first iteration")
        again = ppoflow(broken, "rlhf", *ASKED)
    assert again.returncode == 0, again.stdout + again.stderr
    assert made(broken) == made(whole)
    assert flow_states(whole) == dict.fromkeys(
        ((flow, "Completed") for flow in ("rlhf", "reward-model", "ppo-training", "evaluation", "promotion")), 1
    )
    states = flow_states(broken)
    assert states["rlhf", "Crashed"] == 2
    assert states["reward-model", "Crashed"] == states["ppo-training", "Crashed"] == 1
    assert not [state for _, state in states if state not in ("Completed", "Crashed")]
