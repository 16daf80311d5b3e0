"""Runs the training program once for all tests that look at what it wrote; see tests/conftest.py for how they share."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from ppo_core.processes.ranks import open_meeting

ROOT = Path(__file__).parents[2]
TOGETHER = (
    *("trained/spread", "skipped/skip", "adapted/sharded", "reward_model/fits", "dpo/fits", "vapo/updates"),
    *("scored/score", "device/where", "device/moved"),
)
ALONE = (
    *(
        f"trained/{name}"
        for name in ("resume", "spread", "move", "updates", "supervised", "accumulate", "agree", "one_by_one")
    ),
    *(f"replayed/{name}" for name in ("stages", "paths", "factor", "advantages", "refusals", "damaged")),
    *(f"skipped/{name}" for name in ("skip", "give_up", "mutants")),
    *(f"rloo/{name}" for name in ("runs", "updates", "refusals")),
    *(f"adapted/{name}" for name in ("runs", "updates", "refusals")),
    "averaged/runs",
    "carried/runs",
    "held/states",
    "held/freed",
    "shared/runs",
    "shared/updates",
    "vapo/runs",
    "vapo/updates",
    *(f"reward_model/{name}" for name in ("fits", "learns", "weighed")),
    *(f"dpo/{name}" for name in ("fits", "learns", "weighed")),
    *(f"threaded/{name}" for name in ("trained", "shared", "adapted", "reward_model", "dpo")),
    *(f"device/{name}" for name in ("passes", "resumed", "twice")),
)
TIMEOUT_S = 2400
# A busy machine is slow to draw examples too.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tensors this small gain nothing from a second thread, and lose much where another process wants the core."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which two ranks and then one have left their weights and facts: to import torch takes longer."""
    folder = tmp_path_factory.mktemp("programs")
    run_program(TOGETHER, folder, world_size=2)
    run_program(ALONE, folder, world_size=1)
    return folder


@pytest.fixture(scope="session")
def trained(programs: Path) -> Path:
    """What the learner has left: checkpoints, weights and facts."""
    return programs / "trained"


@pytest.fixture(scope="session")
def replayed(programs: Path) -> Path:
    """What the training engine's handlers have left: full and policy-only checkpoints, and facts."""
    return programs / "replayed"


@pytest.fixture(scope="session")
def skipped(programs: Path) -> Path:
    """What updates with steps that are not finite have left."""
    return programs / "skipped"


@pytest.fixture(scope="session")
def rloo(programs: Path) -> Path:
    """What an algorithm without a critic has left."""
    return programs / "rloo"


@pytest.fixture(scope="session")
def adapted(programs: Path) -> Path:
    """What the training of adapters alone has left."""
    return programs / "adapted"


@pytest.fixture(scope="session")
def averaged(programs: Path) -> Path:
    """What updates with averages and references that move have left."""
    return programs / "averaged"


@pytest.fixture(scope="session")
def carried(programs: Path) -> Path:
    """What the training engine's handlers say to the iteration after."""
    return programs / "carried"


@pytest.fixture(scope="session")
def shared(programs: Path) -> Path:
    """What a policy with a value head has left."""
    return programs / "shared"


@pytest.fixture(scope="session")
def scored(programs: Path) -> Path:
    """What two ranks that share a reward model have left."""
    return programs / "scored"


@pytest.fixture(scope="session")
def vapo(programs: Path) -> Path:
    """What a policy that imitates its correct responses has left."""
    return programs / "vapo"


def run_program(scenarios: Sequence[str], folder: Path, *, world_size: int, device: str = "cpu") -> None:
    """The scenarios of training_program, by so many ranks: on the CPU, also where there is a GPU, or on `cuda`."""
    seen = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    command = [
        sys.executable,
        "-m",
        "tests.ppo_core.training.programs.training_program",
        ",".join(scenarios),
        str(folder),
    ]
    meetings = [open_meeting()] if world_size > 1 else []
    command += [str(meeting) for meeting in meetings]
    logs, ranks = [], []
    for rank in range(world_size):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size), "GLOO_SOCKET_IFNAME": "lo"}
        logs.append(folder / f"{world_size}-{rank}.log")
        with logs[-1].open("w") as log:
            ranks.append(
                subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env={**os.environ, **seen, **place},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=meetings,
                )
            )
    try:
        codes = [process.wait(TIMEOUT_S) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
        for meeting in meetings:
            os.close(meeting)
    assert not any(codes), "\n".join(log.read_text()[-3000:] for log in logs)
