"""Which of its optional libraries transformers shall not import, because nothing here uses what they are for."""

from __future__ import annotations


def leave_out_unused() -> None:
    """Have transformers import neither scikit-learn (assisted generation) nor SciPy (losses of object detection).

    Where both are installed, as vLLM and MLflow need them, they and pandas cost 1.2 s of processor time each time that
    transformers' automatic classes are imported; only what is imported after this call is spared them.
    """
    from transformers import utils

    utils.is_sklearn_available = utils.is_scipy_available = _not_wanted


def _not_wanted() -> bool:
    return False
