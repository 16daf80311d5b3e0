"""The example without a language model: it learns, and its cart moves as mechanics says."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "continuous" / "balance.py"


@pytest.fixture(scope="module")
def balance() -> ModuleType:
    found = importlib.util.spec_from_file_location("balance", EXAMPLE)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.fixture
def one_thread() -> Iterator[None]:
    """More would wait for each other: the networks are tiny."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_the_policy_learns_to_keep_the_pole_up(balance: ModuleType, one_thread: None) -> None:
    lengths = list(balance.train(12))
    assert lengths[0] < 0.25 * balance.STEPS
    assert max(lengths[-3:]) > 0.8 * balance.STEPS


def test_the_cart_moves_as_mechanics_says(balance: ModuleType) -> None:
    """Upright and at rest the equations are linear: push = F / M, turn = -push / (l (4/3 - m / M))."""
    after = balance.step(torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.1, 0.0]]), torch.tensor([0.5, 0.0]))
    push = 0.5 * 10 / 1.1
    turn = -push / (0.5 * (4 / 3 - 0.1 / 1.1))
    assert after[0].tolist() == pytest.approx([0, 0.02 * (push - 0.05 * turn / 1.1), 0, 0.02 * turn], abs=1e-6)
    falling = 9.8 * math.sin(0.1) / (0.5 * (4 / 3 - 0.1 * math.cos(0.1) ** 2 / 1.1))
    assert after[1, 3].item() == pytest.approx(0.02 * falling, rel=1e-5)


def test_an_episode_counts_until_the_pole_falls(balance: ModuleType) -> None:
    torch.manual_seed(0)
    states, _, _, mask = balance.play(balance.GaussianPolicy())
    for row in range(balance.EPISODES):
        length = int(mask[row].sum())
        assert mask[row].tolist() == [True] * length + [False] * (balance.STEPS - length)
        up = (states[row, :, 0].abs() < balance.EDGE) & (states[row, :, 2].abs() < balance.FALLEN)
        assert up[:length].all()
        assert length == balance.STEPS or not up[length]
