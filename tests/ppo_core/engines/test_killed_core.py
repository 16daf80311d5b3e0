"""vLLM's core in a process of its own, as on GPUs: killed while it samples, it takes the engine along at once."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from infra.engines.process import EngineDied, EngineProcess, EngineProgress
from infra.settings import Settings
from tasks.stages.engine_programs import PROGRAMS, rollout_environment
from tests.ppo_core.engines.engine_jobs import ROOT, Client, generate_spec, write_dataset
from tests.ppo_core.tiny_policies import make_policy
from tests.processes import command_line
from tests.waiting import LONG_S

PROMPTS = [[number % 7 + 3, number % 5 + 3, number % 11 + 3] for number in range(4000)]
"""More than the core can answer before it is killed, also where this process waits for its turn."""


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    switches = rollout_environment(Settings(home=tmp_path))
    engine = EngineProcess(
        "rollout",
        PROGRAMS["rollout"],
        log=tmp_path / "rollout.log",
        environment={**switches, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "PYTHONPATH": str(ROOT)},
    )
    client = Client(engine, tmp_path, itertools.count())
    yield client
    engine.close()


def core() -> list[psutil.Process]:
    return [
        child for child in psutil.Process().children(recursive=True) if "EngineCore" in " ".join(command_line(child))
    ]


@pytest.mark.thorough
def test_a_core_killed_while_it_samples_ends_the_engine(client: Client, tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path / "dataset", PROMPTS)
    inputs = {"checkpoint": make_policy(tmp_path / "checkpoint" / "policy").parent, "dataset": dataset}
    spec, output = generate_spec(num_prompts=len(PROMPTS), max_response_tokens=64), client.output()
    below: list[psutil.Process] = []

    def kill(_: EngineProgress) -> None:
        if not below:
            (killed,) = core()
            below.extend([killed, *killed.parents()[:1]])
            os.kill(killed.pid, signal.SIGKILL)

    with pytest.raises(EngineDied, match="EngineCore"):
        client.run("generate_rollouts", inputs, spec, output, on_progress=kill)
    assert len(below) == 2  # vLLM's core, and the engine
    assert psutil.wait_procs(below, timeout=LONG_S)[1] == []
