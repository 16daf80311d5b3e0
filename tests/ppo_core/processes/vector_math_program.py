"""Many processes whose first cosines are computed on several threads; prints how many did not compute the same twice.

    python -m tests.ppo_core.processes.vector_math_program PROCESSES

Processes are forks of one that has torch imported and has computed nothing.
"""

from __future__ import annotations

import os
import sys

import torch

from ppo_core.processes.vector_math import prepare_vector_math


def computes_the_same_twice() -> bool:
    """What a model's first rotary embedding computes, on threads that are awake."""
    angles = torch.outer(torch.arange(400.0), 1 / 10000 ** (torch.arange(16.0) / 16)).repeat(1, 2)
    torch.zeros(400, 400) @ torch.zeros(400, 400)
    first, second = angles.cos(), angles.cos()
    return torch.equal(first, second)


def main() -> None:
    """See above."""
    imprecise = 0
    for _ in range(int(sys.argv[1])):
        child = os.fork()
        if not child:
            torch.set_num_threads(2)
            prepare_vector_math()
            os._exit(0 if computes_the_same_twice() else 1)
        imprecise += os.waitpid(child, 0)[1] != 0
    print(imprecise)


if __name__ == "__main__":
    main()
