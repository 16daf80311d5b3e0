"""Tensors that make room on their device for another engine, and come back as they were.

A tensor's storage is copied to the CPU and shrunk to nothing, and later grown and filled again. So everything that
shares it (a parameter, its part of DeepSpeed's flat buffers, a twin of the module) moves with it and needs no change.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

PIECE = 1 << 28
"""Bytes that are copied at once: torch rounds pinned memory up to a power of two, which for a whole may double it."""


class Aside:
    """Copies of storages, on the CPU, while their tensors are empty."""

    def __init__(self) -> None:
        self._kept: list[tuple[list[Tensor], torch.UntypedStorage, torch.device]] = []

    def move(self, tensors: Iterable[Tensor]) -> int:
        """Empty the tensors' storages; returns their bytes. Nothing may use them before `bring_back`.

        A storage that cannot change its size (one of a file that is mapped into memory) stays as it is.
        """
        moved = 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if not storage.nbytes() or not storage.resizable():
                continue
            pieces = [_on_cpu(piece) for piece in _bytes_of(storage, tensor.device).split(PIECE)]
            moved += storage.nbytes()
            storage.resize_(0)
            self._kept.append((pieces, storage, tensor.device))
        return moved

    def bring_back(self) -> None:
        """Fill the storages again, with the same bytes."""
        for pieces, storage, device in self._kept:
            storage.resize_(sum(piece.numel() for piece in pieces))
            for target, piece in zip(_bytes_of(storage, device).split(PIECE), pieces, strict=True):
                target.copy_(piece)
        self._kept.clear()


def tensors_in(holder: Any) -> Iterator[Tensor]:
    """The tensors that lists, tuples and mappings of them hold, at any depth."""
    if isinstance(holder, Tensor):
        yield holder
    elif isinstance(holder, Mapping):
        for value in holder.values():
            yield from tensors_in(value)
    elif isinstance(holder, list | tuple):
        for value in holder:
            yield from tensors_in(value)


def _on_cpu(piece: Tensor) -> Tensor:
    """A copy, in memory that a GPU reads fast."""
    return torch.empty(piece.shape, dtype=torch.uint8, pin_memory=piece.is_cuda).copy_(piece)


def _bytes_of(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
