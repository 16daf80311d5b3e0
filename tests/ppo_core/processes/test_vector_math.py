"""The first cosines of a process are those of every other: without prepare_vector_math one process in thirty fails."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROCESSES = 200


@pytest.mark.thorough
def test_the_first_cosines_of_a_process_are_as_precise_as_the_next() -> None:
    program = [sys.executable, "-m", "tests.ppo_core.processes.vector_math_program", str(PROCESSES)]
    assert subprocess.run(program, check=True, capture_output=True, text=True).stdout.strip() == "0"
