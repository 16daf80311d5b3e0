"""User code named in a spec: `package.module:function` or `path/to/file.py:function`."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from ppo_core.records import InputError


def load_function(name: str, folder: Path) -> Callable[..., Any]:
    """Import the function `name`; file paths start from `folder`. Raises InputError saying what is missing where."""
    module_name, _, function_name = name.rpartition(":")
    module = _load_file(name, folder / module_name) if module_name.endswith(".py") else _load_module(name, folder)
    function = vars(module).get(function_name)
    if not callable(function):
        known = sorted(k for k, v in vars(module).items() if callable(v) and not k.startswith("_"))
        raise InputError(
            f"{name}: {module_name} has no function {function_name!r} (it has: {', '.join(known) or 'none'})"
        )
    return function


def source_digest(function: Callable[..., Any]) -> str:
    """sha256 over the sources of the function's module and of what was loaded from beside it (its own package)."""
    origin = Path(function.__code__.co_filename).resolve()
    beside = {origin}
    for module in list(sys.modules.values()):
        file = vars(module).get("__file__")
        if file and file.endswith(".py") and Path(file).resolve().is_relative_to(origin.parent):
            beside.add(Path(file).resolve())
    digest = hashlib.sha256(function.__qualname__.encode())
    for path in sorted(beside):
        digest.update(path.relative_to(origin.parent).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _load_file(name: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise InputError(f"{name}: there is no file {path}: paths are relative to the spec")
    module_name = path.stem
    loaded = sys.modules.get(module_name)
    if loaded is not None and vars(loaded).get("__file__") == str(path.resolve()):
        return loaded
    if str(path.parent.resolve()) not in sys.path:
        sys.path.insert(0, str(path.parent.resolve()))
    spec = importlib.util.spec_from_file_location(module_name, path.resolve())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise InputError(f"{name}: importing {path} failed with {type(error).__name__}: {error}") from error
    return module


def _load_module(name: str, folder: Path) -> ModuleType:
    if str(folder.resolve()) not in sys.path:
        sys.path.insert(0, str(folder.resolve()))
    module_name = name.rpartition(":")[0]
    try:
        return importlib.import_module(module_name)
    except Exception as error:
        raise InputError(
            f"{name}: importing {module_name} failed with {type(error).__name__}: {error}; "
            "install it here, or write path/to/file.py:function relative to the spec"
        ) from error
