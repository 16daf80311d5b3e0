"""The rows of a microbatch shared among a CPU's cores: each thread runs the networks on its own.

Inside an operation, cores wait for each other at the end of every loop. In a small network the loops are short, so that
waiting costs a good part of the second core; and where another process has one of the cores for a moment, every loop
waits for it. Here they wait once per optimizer step. Each thread has modules of its own around the same weights
(`twin_of`), since a pass changes what hangs on a module; gradients are added in the order of the threads, so the same
job on as many threads gives the same bits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import chain
from typing import TypeVar

import torch
from torch import nn

Share = TypeVar("Share")
Result = TypeVar("Result")

MOST = 4  # a thread runs Python too, and only one of them can at a time


class Threads:
    """`count` threads that together use as many cores as torch would."""

    def __init__(self, count: int = 1) -> None:
        self.count = count
        if count > 1:
            cores = max(torch.get_num_threads() // count, 1)
            self._pool = ThreadPoolExecutor(count, "rows", initializer=torch.set_num_threads, initargs=(cores,))

    @classmethod
    def of_machine(cls) -> Threads:
        """As many as this process has cores, up to `MOST`; one where a GPU computes."""
        return cls(1 if torch.cuda.is_available() else min(torch.get_num_threads(), MOST))

    def usable(self, *counts: int) -> int:
        """How many can run networks that have `counts` modules each."""
        return min(self.count, *counts)

    def map(self, function: Callable[[int, Share], Result], shares: Sequence[Share]) -> list[Result]:
        """`function(number, share)` of each share, side by side; at most `count`, and gradients as where it is called.

        Raises the first error once all have ended.
        """
        if len(shares) == 1:
            return [function(0, shares[0])]
        with_gradients = torch.is_grad_enabled()

        def work(number: int) -> Result:
            with torch.set_grad_enabled(with_gradients):
                return function(number, shares[number])

        futures = [self._pool.submit(work, number) for number in range(len(shares))]
        wait(futures)
        return [future.result() for future in futures]

    def each(self, function: Callable[[int, Share], Result], shares: Sequence[Sequence[Share]]) -> list[Result]:
        """`function(number, part)` of every part of each share; the results share by share. See `map`."""
        found = self.map(lambda number, parts: [function(number, part) for part in parts], shares)
        return list(chain.from_iterable(found))


def twin_of(module: nn.Module) -> nn.Module:
    """Another module of the same structure around the very same parameters and buffers."""
    shared = {id(tensor): tensor for tensor in chain(module.parameters(), module.buffers())}
    return copy.deepcopy(module, shared)
