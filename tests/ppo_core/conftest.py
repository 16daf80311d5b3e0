"""Runs the training program once for all tests that look at what it wrote."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
ALONE = "resume,spread,move,updates,supervised,accumulate,agree"
TIMEOUT_S = 240


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tensors this small gain nothing from a second thread, and lose much where another process wants the core."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which two ranks and then one have left their weights and facts."""
    folder = tmp_path_factory.mktemp("trained")
    run_program("spread", folder, world_size=2)
    run_program(ALONE, folder, world_size=1)
    return folder


@pytest.fixture(scope="session")
def replayed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the training engine's handlers have left full and thin checkpoints and facts."""
    folder = tmp_path_factory.mktemp("replayed")
    run_program("stages,paths,factor,advantages,refusals,damaged", folder, world_size=1, program="replay_program")
    return folder


def run_program(scenarios: str, folder: Path, *, world_size: int, program: str = "deepspeed_program") -> None:
    command = [sys.executable, "-m", f"tests.ppo_core.{program}", scenarios, str(folder)]
    port, logs, ranks = free_port(), [], []
    for rank in range(world_size):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        logs.append(folder / f"{world_size}-{rank}.log")
        with logs[-1].open("w") as log:
            ranks.append(
                subprocess.Popen(
                    command, cwd=ROOT, env={**os.environ, **place, **address}, stdout=log, stderr=subprocess.STDOUT
                )
            )
    try:
        codes = [process.wait(TIMEOUT_S) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert not any(codes), "\n".join(log.read_text()[-3000:] for log in logs)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
