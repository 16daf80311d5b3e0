"""Tensors that make room: their bytes come back, or are dropped, and share the memory in which they wait."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor

from ppo_core.processes import aside
from ppo_core.processes.aside import Aside, emptied

SIZES = (3, 70, 64, 0, 129, 1)
"""Numbers of four bytes, with pieces of 256."""


@pytest.fixture
def tensors(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Of several sizes, smaller and larger than a piece."""
    monkeypatch.setattr(aside, "PIECE", 256)
    return [torch.arange(size, dtype=torch.float32) + size for size in SIZES]


def pieces() -> list[int]:
    """The sizes of all storages of bytes that there are."""
    tensors = [item for item in gc.get_objects() if isinstance(item, Tensor) and item.dtype == torch.uint8]
    found = [tensor.untyped_storage() for tensor in tensors]
    return sorted(storage.nbytes() for storage in {one._cdata: one for one in found}.values() if storage.nbytes())


def test_all_that_shares_a_storage_goes_and_comes_back(tensors: list[Tensor]) -> None:
    tensors.append(tensors[1][5:9])
    before, held = [tensor.clone() for tensor in tensors], Aside()
    assert held.move(tensors) == 4 * sum(SIZES)
    assert not any(tensor.untyped_storage().nbytes() for tensor in tensors)
    assert held.move(tensors) == 0
    held.bring_back()
    assert all(torch.equal(tensor, value) for tensor, value in zip(tensors, before, strict=True))
    assert tensors[-1].data_ptr() == tensors[1][5:].data_ptr()


def test_what_waits_shares_pieces_of_one_size(tensors: list[Tensor]) -> None:
    """Rounded up to a power of two each, it would take 16 + 512 + 256 + 1024 + 4 bytes."""
    others, held = pieces(), Aside()
    held.move(tensors)
    assert pieces() == sorted([*others, *[256] * 5])
    held.bring_back()
    assert pieces() == others


def test_what_is_dropped_stays_empty(tensors: list[Tensor]) -> None:
    others, held = pieces(), Aside()
    held.move(tensors)
    held.drop()
    assert pieces() == others
    held.bring_back()
    assert not any(tensor.untyped_storage().nbytes() for tensor in tensors)


def test_an_emptied_tensor_says_what_it_freed_once(tensors: list[Tensor]) -> None:
    assert [emptied(tensor) for tensor in tensors] == [4 * size for size in SIZES]
    assert [emptied(tensor) for tensor in tensors] == [0] * len(SIZES)
