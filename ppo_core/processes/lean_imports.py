"""How a process imports large libraries in less time."""

from __future__ import annotations

import gc
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

NAME = re.compile("^Name: *(.*)$", re.MULTILINE)


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import inside.

    Modules stay, and to look for garbage among the objects that they make, again and again, takes a fifth of the time:
    Python does not meanwhile, and never looks at what is there after the first imports of a process.
    transformers asks which distribution each package comes from; Python takes 0.2 s to say it.
    """
    enabled, slow = gc.isenabled(), metadata.packages_distributions
    gc.disable()
    metadata.packages_distributions = distributions_by_package
    try:
        yield
    finally:
        metadata.packages_distributions = slow
        _spare_what_is_there()
        if enabled:
            gc.enable()


@cache
def _spare_what_is_there() -> None:
    """Freeze what the first imports made, so that the garbage collector never visits it; later there may be models.

    Once in a process: `gc.get_freeze_count` walks through all of them, 0.1 s for a million.
    """
    if not gc.get_freeze_count():
        gc.freeze()


def distributions_by_package() -> dict[str, list[str]]:
    """As `importlib.metadata.packages_distributions`, in a tenth of its time: lines are cut, not parsed."""
    found = defaultdict[str, list[str]](list)
    for distribution in metadata.distributions():
        if packages := (distribution.read_text("top_level.txt") or "").split() or _packages_of(distribution):
            named = NAME.search(distribution.read_text("METADATA") or "")
            name = named[1] if named else distribution.metadata["Name"]
            for package in packages:
                found[package].append(name)
    return dict(found)


def _packages_of(distribution: metadata.Distribution) -> set[str]:
    """Folders and modules at the top of what it has installed."""
    record = distribution.read_text("RECORD")
    files = [line.partition(",")[0] for line in record.splitlines()] if record else map(str, distribution.files or [])
    return {file.partition("/")[0].removesuffix(".py") for file in files if file.endswith(".py")}


@contextmanager
def seldom_collecting() -> Iterator[None]:
    """Python looks for garbage less often inside: for what is short, imports much and makes little of it."""
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


def only_for_gpus() -> list[str]:
    """Libraries in which a torch that was built without GPUs finds nothing to use: Triton, as it is published, compiles
    for GPUs alone."""
    return ["triton"] if metadata.version("torch").endswith("+cpu") else []


def leave_out_unused() -> None:
    """Have transformers import neither scikit-learn (assisted generation) nor SciPy (losses of object detection).

    Where both are installed, as vLLM and MLflow need them, they and pandas cost 1.2 s of processor time each time that
    transformers' automatic classes are imported; only what is imported after this call is spared them. It is also
    spared Triton, which torch's compiler looks for, and a second reading of two thousand files.
    """
    from transformers import utils

    if utils.is_scipy_available is _not_wanted:
        return
    utils.is_sklearn_available = utils.is_scipy_available = _not_wanted
    _list_models_once(utils.import_utils)
    if spared := only_for_gpus():  # where there are any, vLLM has to be imported before torch
        with absent(*spared):
            import torch._dynamo  # noqa: F401  # as the automatic classes do; it does not look for Triton again


def _list_models_once(import_utils: Any) -> None:
    """transformers reads the files of all its models when it is imported, and again when `transformers.models` is, for
    it asks first for their folder and then for the `__init__.py` in it. Here one answer serves both: 0.2 s less."""
    listed = import_utils.create_import_structure_from_path

    def listed_once(path: str | Path) -> Any:
        return listed(Path(path).parent if Path(path).name == "__init__.py" else Path(path))

    import_utils.create_import_structure_from_path = listed_once


def _not_wanted() -> bool:
    return False
