"""Tensors that make room on their device for another engine, and come back as they were.

A tensor's storage is copied to the CPU and shrunk to nothing, and later grown and filled again. So everything that
shares it (a parameter, its part of DeepSpeed's flat buffers, a twin of the module) moves with it and needs no change.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

PIECE = 1 << 26
"""Bytes of memory that storages share on the CPU: torch rounds pinned memory up to a power of two, which for each of
them may double it."""


class Aside:
    """Copies of storages, on the CPU, while their tensors are empty."""

    def __init__(self) -> None:
        self._kept: list[tuple[list[Tensor], torch.UntypedStorage, torch.device]] = []
        self._room = torch.empty(0)  # what is left of the last piece

    def move(self, tensors: Iterable[Tensor]) -> int:
        """Empty the tensors' storages; returns their bytes. Nothing may use them before `bring_back`.

        A storage that cannot change its size (one of a file that is mapped into memory) stays as it is.
        """
        moved = 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.resizable() and storage.nbytes():
                self._kept.append((self._copied(_bytes_of(storage, tensor.device)), storage, tensor.device))
                moved += emptied(tensor)
        return moved

    def bring_back(self) -> None:
        """Fill the storages again, with the same bytes."""
        for parts, storage, device in self._kept:
            sizes = [part.numel() for part in parts]
            storage.resize_(sum(sizes))
            for target, part in zip(_bytes_of(storage, device).split(sizes), parts, strict=True):
                target.copy_(part)
        self.drop()

    def drop(self) -> None:
        """Forget the copies: the tensors are no longer needed, and stay empty."""
        self._kept.clear()
        self._room = torch.empty(0)

    def _copied(self, whole: Tensor) -> list[Tensor]:
        """Its parts, in memory that a GPU reads fast."""
        parts = list[Tensor]()
        while whole.numel():
            if not self._room.numel():
                self._room = torch.empty(PIECE, dtype=torch.uint8, pin_memory=whole.is_cuda)
            size = min(whole.numel(), self._room.numel())
            parts.append(self._room[:size].copy_(whole[:size]))
            self._room, whole = self._room[size:], whole[size:]
        return parts


def emptied(tensor: Tensor) -> int:
    """Free its memory, whoever refers to it; returns the bytes: none of a file that is mapped into memory."""
    storage = tensor.untyped_storage()
    freed = storage.nbytes() if storage.resizable() else 0
    if freed:
        storage.resize_(0)
    return freed


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


def _bytes_of(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
