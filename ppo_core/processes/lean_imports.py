"""How a process imports large libraries in less time."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Iterator[None]:
    """Import inside: modules stay, and to look for garbage among the objects that they make, again and again, takes a
    fifth of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def leave_out_unused() -> None:
    """Have transformers import neither scikit-learn (assisted generation) nor SciPy (losses of object detection).

    Where both are installed, as vLLM and MLflow need them, they and pandas cost 1.2 s of processor time each time that
    transformers' automatic classes are imported; only what is imported after this call is spared them.
    """
    from transformers import utils

    utils.is_sklearn_available = utils.is_scipy_available = _not_wanted


def _not_wanted() -> bool:
    return False
