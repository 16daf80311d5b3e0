"""Learning rates and coefficients as pure functions of the position in a run: a resumed run needs no other state."""

from __future__ import annotations

import math

from ppo_core.spec.section import CoefficientSchedule


def learning_rate(
    base: float, *, iteration: int, warmup_iterations: int, decay_iterations: int, final_fraction: float
) -> float:
    """Learning rate of the 0-based `iteration`: linear warm-up, linear decay, then flat.

    base * (iteration + 1) / warmup_iterations during the first `warmup_iterations`; from `base` at iteration
    warmup_iterations linearly to final_fraction * base at iteration decay_iterations; that value ever after. No
    warm-up: warmup_iterations=0; no decay: final_fraction=1.
    Raises ValueError for a negative base or iteration, unless 0 <= warmup_iterations <= decay_iterations, and for a
    final_fraction outside [0, 1].

    >>> [learning_rate(8.0, iteration=i, warmup_iterations=2, decay_iterations=6, final_fraction=0.5) for i in range(8)]
    [4.0, 8.0, 8.0, 7.0, 6.0, 5.0, 4.0, 4.0]
    """
    _check(base, final_fraction, "iteration", iteration)
    progress = _progress(iteration, "warmup_iterations", warmup_iterations, "decay_iterations", decay_iterations)
    if iteration < warmup_iterations:
        return base * (iteration + 1) / warmup_iterations
    return base * (1 - (1 - final_fraction) * progress)


def cosine_learning_rate(
    base: float, *, step: int, warmup_steps: int, total_steps: int, final_fraction: float
) -> float:
    """Learning rate of the 0-based optimizer `step`: linear warm-up, half a cosine, then flat.

    base * (step + 1) / warmup_steps during the first `warmup_steps`; from `base` at step warmup_steps along half a
    cosine to final_fraction * base at step total_steps; that value ever after.
    Raises ValueError for a negative base or step, unless 0 <= warmup_steps <= total_steps, and for a final_fraction
    outside [0, 1].
    Source: Loshchilov and Hutter 2017 (arXiv:1608.03983), equation 5, one period, without restarts.

    >>> [cosine_learning_rate(8.0, step=s, warmup_steps=2, total_steps=4, final_fraction=0.5) for s in range(6)]
    [4.0, 8.0, 8.0, 6.0, 4.0, 4.0]
    """
    _check(base, final_fraction, "step", step)
    progress = _progress(step, "warmup_steps", warmup_steps, "total_steps", total_steps)
    if step < warmup_steps:
        return base * (step + 1) / warmup_steps
    remaining = (1 + math.cos(math.pi * progress)) / 2
    return base * (final_fraction + (1 - final_fraction) * remaining)


def coefficient(
    base: float, *, iteration: int, decay_iterations: int, schedule: CoefficientSchedule, final_fraction: float
) -> float:
    """A coefficient at the 0-based `iteration`: `base` itself, or along the decay of the rates above, without warm-up.

    >>> [coefficient(8.0, iteration=i, decay_iterations=2, schedule="linear", final_fraction=0.5) for i in range(4)]
    [8.0, 6.0, 4.0, 4.0]
    """
    if schedule == "constant":
        return base
    if schedule == "cosine":
        return cosine_learning_rate(
            base, step=iteration, warmup_steps=0, total_steps=decay_iterations, final_fraction=final_fraction
        )
    return learning_rate(
        base, iteration=iteration, warmup_iterations=0, decay_iterations=decay_iterations, final_fraction=final_fraction
    )


def _progress(position: int, start_name: str, start: int, end_name: str, end: int) -> float:
    if not 0 <= start <= end:
        raise ValueError(
            f"{start_name}={start} must lie in 0..{end_name}={end}: shorten the warm-up or raise {end_name}"
        )
    return 1.0 if position >= end else (position - start) / max(end - start, 1)


def _check(base: float, final_fraction: float, position_name: str, position: int) -> None:
    if not 0 <= base < math.inf:
        raise ValueError(f"base={base} must be finite and not below 0: give a learning rate such as 1e-6")
    if position < 0:
        raise ValueError(f"{position_name}={position} must not be below 0: count from 0")
    if not 0 <= final_fraction <= 1:
        raise ValueError(f"final_fraction={final_fraction} lies outside [0, 1]: 1 keeps the rate, 0 lets it vanish")
