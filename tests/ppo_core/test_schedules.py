"""Learning rates at hand-computed points."""

from __future__ import annotations

import doctest
import math
import subprocess
import sys
from pathlib import Path

import pytest

from ppo_core import schedules
from ppo_core.schedules import cosine_learning_rate, learning_rate

LINEAR = {"warmup_iterations": 4, "decay_iterations": 14, "final_fraction": 0.1}
COSINE = {"warmup_steps": 4, "total_steps": 14, "final_fraction": 0.1}


def test_docstring_examples() -> None:
    assert doctest.testmod(schedules) == (0, 3)


@pytest.mark.parametrize(
    ("iteration", "expected"),
    [(0, 0.25), (1, 0.5), (3, 1.0), (4, 1.0), (5, 0.91), (9, 0.55), (13, 0.19), (14, 0.1), (15, 0.1), (1000, 0.1)],
)
def test_linear_schedule(iteration: int, expected: float) -> None:
    assert learning_rate(1e-6, iteration=iteration, **LINEAR) == pytest.approx(expected * 1e-6, rel=1e-12)


@pytest.mark.parametrize(
    ("step", "expected"),
    # Ten steps of decay: step 5 stands at cos 18 degrees = 0.9510565163, step 9, halfway, at cos 90 degrees = 0.
    [(0, 0.25), (3, 1.0), (4, 1.0), (5, 0.1 + 0.45 * (1 + 0.9510565163)), (9, 0.55), (14, 0.1), (1000, 0.1)],
)
def test_cosine_schedule(step: int, expected: float) -> None:
    assert cosine_learning_rate(1e-5, step=step, **COSINE) == pytest.approx(expected * 1e-5, rel=1e-9)


def test_without_warm_up_the_first_rate_is_the_base() -> None:
    assert learning_rate(1.0, iteration=0, warmup_iterations=0, decay_iterations=10, final_fraction=0.0) == 1.0
    assert cosine_learning_rate(1.0, step=0, warmup_steps=0, total_steps=10, final_fraction=0.0) == 1.0


def test_a_final_fraction_of_one_keeps_the_rate() -> None:
    rates = [
        learning_rate(0.3, iteration=i, warmup_iterations=0, decay_iterations=5, final_fraction=1.0) for i in range(9)
    ]
    assert rates == [0.3] * 9


def test_a_run_that_only_warms_up_ends_at_the_final_rate() -> None:
    rates = [
        learning_rate(1.0, iteration=i, warmup_iterations=2, decay_iterations=2, final_fraction=0.5) for i in range(4)
    ]
    assert rates == [0.5, 1.0, 0.5, 0.5]


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        (-1.0, {}, r"base=-1\.0"),
        (math.nan, {}, "base=nan"),
        (1.0, {"iteration": -1}, "iteration=-1"),
        (1.0, {"warmup_iterations": -1}, "warmup_iterations=-1"),
        (1.0, {"warmup_iterations": 15}, "warmup_iterations=15.*decay_iterations=14.*shorten"),
        (1.0, {"final_fraction": 1.5}, r"final_fraction=1\.5"),
        (1.0, {"final_fraction": -0.5}, r"final_fraction=-0\.5"),
    ],
)
def test_impossible_schedules_are_refused(base: float, change: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        learning_rate(base, **{"iteration": 0, **LINEAR, **change})


def test_the_cosine_schedule_names_its_own_settings() -> None:
    with pytest.raises(ValueError, match=r"warmup_steps=15.*total_steps=14"):
        cosine_learning_rate(1.0, step=0, warmup_steps=15, total_steps=14, final_fraction=0.1)
    with pytest.raises(ValueError, match="step=-1"):
        cosine_learning_rate(1.0, step=-1, **COSINE)


def test_schedules_need_no_torch() -> None:
    program = "import sys, ppo_core.schedules; sys.exit('torch' in sys.modules)"
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", program], cwd=root, check=False).returncode == 0
