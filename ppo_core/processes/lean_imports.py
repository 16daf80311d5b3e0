"""How a process imports large libraries in less time."""

from __future__ import annotations

import gc
import sys
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


@contextmanager
def seldom_collecting() -> Iterator[None]:
    """For what is short, imports much and makes little garbage: Python looks for it less often than usual."""
    before = gc.get_threshold()
    gc.set_threshold(50_000, 20, 50)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextmanager
def absent(*libraries: str) -> Iterator[None]:
    """Import inside what can do without these libraries: as if they were missing, unless they are imported already.

    Afterwards whoever needs one imports it.
    """
    hidden = [name for name in libraries if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None: Python's word for a module not to import
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


def leave_out_unused() -> None:
    """Have transformers import neither scikit-learn (assisted generation) nor SciPy (losses of object detection).

    Where both are installed, as vLLM and MLflow need them, they and pandas cost 1.2 s of processor time each time that
    transformers' automatic classes are imported; only what is imported after this call is spared them.
    """
    from transformers import utils

    utils.is_sklearn_available = utils.is_scipy_available = _not_wanted


def _not_wanted() -> bool:
    return False
