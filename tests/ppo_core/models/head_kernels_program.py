"""The GPU's kernels of the output layer by Triton's interpreter, on a CPU; `python -m` it with TRITON_INTERPRET=1.

Prints, for each case, how far each number is from what `ppo_core.models.head` computes on a CPU.
"""

from __future__ import annotations

import json

import torch
from torch import Tensor

from ppo_core.models import head, head_kernels

ROWS = 4
VOCABULARIES = (7, 5000)  # less than a block, and more
TEMPERATURES: dict[str, float | Tensor] = {"one": 0.7, "own": torch.linspace(0.5, 1.5, ROWS)[:, None]}


def logits_of(vocabulary: int, dtype: torch.dtype) -> Tensor:
    """Some of them minus infinity, as of tokens that a sampler may not draw."""
    made = torch.randn((ROWS, vocabulary), generator=torch.Generator().manual_seed(vocabulary)) * 4
    made[1, 3:5] = -torch.inf
    return made.to(dtype)


def differences(vocabulary: int, dtype: torch.dtype, temperature: float | Tensor, entropy: str | None) -> list[float]:
    """Of the logsumexp, of logprob and entropy, and of the gradient."""
    targets, found = torch.tensor([0, 1, 2, vocabulary - 1]), list[list[Tensor]]()
    gradient = torch.randn((ROWS, 2), generator=torch.Generator().manual_seed(1))
    for kernels in (False, True):
        logits, total, output = logits_of(vocabulary, dtype), torch.empty(ROWS), torch.zeros(ROWS, 2)
        given = (logits, temperature, targets, total, output)
        if kernels:
            head_kernels.fill_statistics(*given, entropy=entropy is not None)
            made = [total.clone(), output.clone()]
            head_kernels.turn_into_gradient(*given, gradient, differentiable=entropy == "differentiable")
        else:
            head._reduce(*given, entropy)
            made = [total.clone(), output.clone()]
            head._to_gradient(*given, gradient, differentiable=entropy == "differentiable")
        found.append([*made, logits.float()])
    return [float((ours - theirs).abs().max()) for ours, theirs in zip(*found, strict=True)]


def of_a_nan() -> list[bool]:
    """Which logprobs are finite where the second row has a NaN and the third an infinity."""
    logits, total, output = logits_of(50, torch.float32), torch.empty(ROWS), torch.zeros(ROWS, 2)
    logits[1, 9], logits[2, 9] = torch.nan, torch.inf
    head_kernels.fill_statistics(logits, 1.0, torch.arange(ROWS), total, output, entropy=True)
    return output.isfinite().all(1).tolist()


def main() -> None:
    """All cases, as one line of JSON."""
    cases = [
        {
            "dtype": str(dtype),
            "differences": differences(vocabulary, dtype, temperature, entropy),
        }
        for vocabulary in VOCABULARIES
        for dtype in (torch.float32, torch.bfloat16)
        for temperature in TEMPERATURES.values()
        for entropy in (None, "detached", "differentiable")
    ]
    print(json.dumps({"cases": cases, "finite": of_a_nan()}))


if __name__ == "__main__":
    main()
