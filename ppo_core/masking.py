"""Statistics over the slots of a tensor that count.

A mask is a bool tensor whose True means that the slot counts. What stands in the other slots, nan and inf included,
never reaches a result or a gradient. Every function promotes half precision and integers to float32 and keeps float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

VARIANCE_EPSILON = 1e-8


def check_mask(mask_name: str, mask: Tensor, **tensors: Tensor) -> None:
    """Raise ValueError unless `mask` is bool and every tensor, called by its keyword, has the mask's shape."""
    if mask.dtype != torch.bool:
        raise ValueError(
            f"{mask_name} has dtype {mask.dtype}, but only torch.bool says which slots count: pass {mask_name} != 0"
        )
    for name, tensor in tensors.items():
        if tensor.shape != mask.shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, but {mask_name} has shape {tuple(mask.shape)}: "
                f"align {name} with {mask_name}, slot by slot (broadcasting is refused)"
            )


def check_rows(mask_name: str, mask: Tensor, **tensors: Tensor) -> None:
    """Raise ValueError unless `mask` is [B, R] and every tensor, called by its keyword, is [B]: one number per row."""
    if mask.dim() != 2:
        raise ValueError(f"{mask_name} has shape {tuple(mask.shape)}, but must be [B, R]: one row per response")
    for name, tensor in tensors.items():
        if tensor.shape != mask.shape[:1]:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, but {mask_name} has {mask.shape[0]} rows: "
                f"pass one number per row, shape ({mask.shape[0]},)"
            )


def zero_masked(x: Tensor, mask: Tensor) -> Tensor:
    """`x` as float32 (float64 stays) with exact zeros where `mask` is False; no gradient flows into those slots."""
    return torch.where(mask, x.to(torch.promote_types(x.dtype, torch.float32)), 0.0)


def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of `x` over the True slots of `mask`, over everything or along `dim`; 0 where no slot counts.

    Shapes: x and mask alike, any; the result is a scalar, or has `dim` removed.
    Raises ValueError for a mask that is not bool or not of x's shape.

    >>> masked_mean(torch.tensor([[1.0, 3.0, 9.0], [5.0, 9.0, 9.0]]),
    ...             torch.tensor([[True, True, False], [False, False, False]]), dim=1).tolist()
    [2.0, 0.0]
    """
    check_mask("mask", mask, x=x)
    kept = zero_masked(x, mask)
    if dim is None:
        return kept.sum() / mask.sum().clamp(min=1)
    return kept.sum(dim) / mask.sum(dim).clamp(min=1)


def masked_var(x: Tensor, mask: Tensor) -> Tensor:
    """Unbiased variance (n - 1 in the denominator) of `x` over the True slots of `mask`: a scalar.

    With one True slot, where the unbiased form would divide by zero, and with none, the variance is 0.
    Shapes: x and mask alike, any. Raises ValueError for a mask that is not bool or not of x's shape.

    >>> masked_var(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([True, True, False])).item()
    2.0
    """
    mean = masked_mean(x, mask)
    deviations = zero_masked(zero_masked(x, mask) - mean, mask)
    return deviations.square().sum() / (mask.sum() - 1).clamp(min=1)


def scale(x: Tensor, mask: Tensor) -> Tensor:
    """The True slots of `x` over their root mean square, sqrt(mean(x**2) + 1e-8): no sign changes, and 0 stays 0.

    The mean is over all True slots of the tensor; masked slots are exactly 0. Shapes and errors as of `whiten`.

    >>> [round(x, 4) for x in scale(torch.tensor([7.0, -1.0, 9.0]), torch.tensor([True, True, False])).tolist()]
    [1.4, -0.2, 0.0]
    """
    kept = zero_masked(x, mask)
    return kept * torch.rsqrt(masked_mean(kept.square(), mask) + VARIANCE_EPSILON)


def whiten(x: Tensor, mask: Tensor, *, shift_mean: bool = True) -> Tensor:
    """Scale the True slots of `x` to unit variance, and to mean 0 unless `shift_mean` is False, which keeps the mean.

    (x - mean) / sqrt(var + 1e-8), statistics over all True slots of the tensor, variance unbiased; masked slots are
    exactly 0. One True slot becomes 0 (its mean if `shift_mean` is False).
    Shapes: x, mask and the result alike, usually [B, R]. Raises ValueError for a mask that is not bool or not of x's
    shape.
    Source: Ziegler et al. 2019 (arXiv:1909.08593), released code, `whiten`.

    >>> [round(x, 4) for x in whiten(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([True, True, False])).tolist()]
    [-0.7071, 0.7071, 0.0]
    """
    mean = masked_mean(x, mask)
    scaled = (zero_masked(x, mask) - mean) * torch.rsqrt(masked_var(x, mask) + VARIANCE_EPSILON)
    return zero_masked(scaled if shift_mean else scaled + mean, mask)
