"""How ragged token sequences lie in what a model computes on: padded rows, or packed into one row without padding.

Only here is the prompt's offset and the shift by one: the output at sequence position p + t - 1 predicts response token
t of a prompt of p tokens, and the critic's output there is the value of the state before that token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ppo_core.models.packing import NO_MASK, Packing, to_device
from ppo_core.records import TokenSequence

Sequences = Sequence[TokenSequence | tuple[list[int], list[int]]]


@dataclass(frozen=True)
class Layout:
    """A batch of B sequences with N response tokens, the longest response R tokens.

    `inputs` are the keyword arguments of a model; flattened to one row of tokens, its output predicts response token n,
    `targets[n]`, at `index[n]`, and `last` `[B]` are the places of the last tokens. Response tokens are in row order;
    `places[n]` is that of each in a flattened `[B, R]`, which is found on the CPU: a GPU would have to be waited for.
    """

    inputs: dict[str, Any]
    shape: tuple[int, int]
    places: Tensor
    index: Tensor
    targets: Tensor
    last: Tensor

    @property
    def row_of_each(self) -> Tensor:
        """The row `[N]` that each response token is of."""
        return self.places // max(self.shape[1], 1)

    def at_responses(self, output: Tensor) -> Tensor:
        """`[N, ...]` at the positions that predict response tokens, of a model's output `[rows, columns, ...]`."""
        return output.flatten(0, 1)[self.index]

    def to_batch(self, flat: Tensor) -> Tensor:
        """Spread N per-token numbers over `[B, R]`, zeros elsewhere."""
        batch, width = self.shape
        return flat.new_zeros(batch * width).index_copy(0, self.places, flat).view(batch, width)


def padded_layout(sequences: Sequences, device: torch.device | str = "cpu") -> Layout:
    """A row each, padded on the right. A causal model never looks to the right, so no attention mask is needed, and no
    token id is special: pad may equal EOS.

    >>> layout = padded_layout([([5, 6], [7, 8, 2]), ([5], [9])])
    >>> layout.inputs["input_ids"].tolist(), layout.places.tolist()
    ([[5, 6, 7, 8, 2], [5, 9, 0, 0, 0]], [0, 1, 2, 3])
    >>> layout.index.tolist(), layout.targets.tolist(), layout.last.tolist()
    ([1, 2, 3, 5], [7, 8, 2, 9], [4, 6])

    Raises ValueError for an empty prompt: nothing would predict its first response token.
    """
    width = max((len(p) + len(r) for p, r in sequences), default=0)
    input_ids = torch.zeros((len(sequences), width), dtype=torch.long)
    for row, (prompt, response) in enumerate(sequences):
        input_ids[row, : len(prompt) + len(response)] = torch.tensor([*prompt, *response], dtype=torch.long)
    return _layout(sequences, {"input_ids": input_ids}, [row * width for row in range(len(sequences))], device)


def packed_layout(sequences: Sequences, device: torch.device | str = "cpu") -> Layout:
    """One row of real tokens, the shortest sequence first, for models that `enable_packing` has prepared.

    >>> layout = packed_layout([([5, 6], [7, 8, 2]), ([5], [9])])
    >>> layout.inputs["input_ids"].tolist(), layout.inputs["position_ids"].tolist()
    ([[5, 9, 5, 6, 7, 8, 2]], [[0, 1, 0, 1, 2, 3, 4]])
    >>> layout.index.tolist(), layout.targets.tolist(), layout.last.tolist()
    ([3, 4, 5, 0], [7, 8, 2, 9], [6, 1])

    Raises ValueError for an empty prompt.
    """
    lengths = [len(prompt) + len(response) for prompt, response in sequences]
    order = sorted(range(len(sequences)), key=lambda row: (lengths[row], row))
    starts, end = [0] * len(sequences), 0
    for row in order:
        starts[row], end = end, end + lengths[row]
    tokens = [token for row in order for part in sequences[row] for token in part]
    positions = [position for row in order for position in range(lengths[row])]
    inputs = {
        "input_ids": torch.tensor([tokens], dtype=torch.long),
        "position_ids": torch.tensor([positions], dtype=torch.long),
        "attention_mask": NO_MASK,
        "packing": Packing.of([lengths[row] for row in order], device),
    }
    return _layout(sequences, inputs, starts, device)


def _layout(sequences: Sequences, inputs: dict[str, Any], starts: list[int], device: torch.device | str) -> Layout:
    """`starts`: where each sequence begins in the flattened input."""
    for row, (prompt, _) in enumerate(sequences):
        if not len(prompt):
            raise ValueError(f"sequence {row} has an empty prompt: its first response token has nothing to follow")
    width = max((len(response) for _, response in sequences), default=0)
    places, index, targets, last = list[int](), list[int](), list[int](), list[int]()
    for row, (start, (prompt, response)) in enumerate(zip(starts, sequences, strict=True)):
        places += range(row * width, row * width + len(response))
        last.append(start + len(prompt) + len(response) - 1)
        index += range(start + len(prompt) - 1, last[-1])
        targets += response
    found = [to_device(torch.tensor(numbers, dtype=torch.long), device) for numbers in (places, index, targets, last)]
    moved = {
        name: to_device(part, device) if isinstance(part, Tensor) and part is not NO_MASK else part
        for name, part in inputs.items()
    }
    return Layout(moved, (len(sequences), width), *found)
