"""User code named in a spec: `package.module:function` or `path/to/file.py:function`."""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

from ppo_core.processes.current_source import CurrentSource, import_from
from ppo_core.processes.permissions import OWN_FOLDER
from ppo_core.records import InputError

OURS = Path(__file__).resolve().parents[1]
RAISED = (Exception, SystemExit)
"""What a user's code may raise; sys.exit() in it must not end the engine."""


@dataclass(frozen=True)
class Sources:
    """The folder where a spec's relative paths start, and what its code and models may do (`Permissions`).

    `digest` is of what the spec names there: while it is the same, a model that was read is not read again.
    `downloads` says where what it names of the hub is.
    """

    folder: Path
    allowed: tuple[str, ...] = (OWN_FOLDER,)
    trust_remote_code: bool = False
    digest: str = ""
    run_generated_code: bool = False
    reward_urls: tuple[str, ...] = ()
    downloads: Mapping[str, Path] = field(default_factory=dict)

    def place(self, name: str) -> Path:
        """Where a file or folder lies that the spec names."""
        return self.downloads.get(name) or self.folder / name

    def require_allowed(self, name: str, origin: Path | None) -> None:
        """Raise InputError, before anything is imported, unless `name`, found at `origin`, comes from such a place."""
        module_name = name.rpartition(":")[0]
        folders = [self.folder if place == OWN_FOLDER else Path(place) for place in self.allowed if _is_folder(place)]
        packages = [place for place in self.allowed if not _is_folder(place)]
        if origin is not None and any(origin.resolve().is_relative_to(folder.resolve()) for folder in folders):
            return
        if not module_name.endswith(".py") and any(f"{module_name}.".startswith(f"{place}.") for place in packages):
            return
        raise InputError(
            f"{name}: code from {origin or 'Python itself'} may not run here, only from {', '.join(self.allowed)} "
            f"(. is the spec's folder {self.folder}): the owner of this machine can add its folder or package to "
            "PPOFLOW_PLUGINS"
        )

    def require_server(self, name: str, url: str) -> None:
        """Raise InputError unless the reward `name` may send samples to the server of `url`."""
        if self.reward_urls and _server(url) not in map(_server, self.reward_urls):
            raise InputError(
                f"the reward {name} may not send samples to {url} from here, only to {', '.join(self.reward_urls)}: "
                "the owner of this machine can add the server to PPOFLOW_REWARD_URLS"
            )


def load_function(name: str, sources: Sources) -> Callable[..., Any]:
    """Import the function `name`, if it comes from an allowed place. Raises InputError saying what is missing where."""
    module_name, _, function_name = name.rpartition(":")
    module = _load(name, sources)
    function = vars(module).get(function_name)
    if not callable(function):
        known = sorted(
            found.__name__
            for found in vars(module).values()
            if (inspect.isfunction(found) or inspect.isclass(found))
            and found.__module__ == module.__name__
            and not found.__name__.startswith("_")
        )
        raise InputError(
            f"{name}: {module_name} has no function {function_name!r} (it has: {', '.join(known) or 'none'})"
        )
    return function


def place_of(error: BaseException, sources: Sources) -> str:
    """` (reward.py:12)`: where in the user's files it was raised; empty where none of them was running."""
    folder = sources.folder.resolve()
    frames = [(Path(frame.filename).resolve(), frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    own = [(path, line) for path, line in frames if not path.is_relative_to(OURS) and path.is_file()]
    inside = [f"{path.relative_to(folder)}:{line}" for path, line in own if path.is_relative_to(folder)]
    elsewhere = [f"{path}:{line}" for path, line in own]
    return f" ({(inside or elsewhere)[-1]})" if own else ""


def source_digest(name: str, sources: Sources) -> str:
    """sha256 over the source of the function's module and of what that imports, directly or not, from beside it.

    Beside a file is its folder, beside a module its package. Found by reading, so that nothing else that this process
    has loaded counts. Raises InputError as `load_function` does.
    """
    load_function(name, sources)
    digest = hashlib.sha256(name.encode())
    file = vars(_load(name, sources)).get("__file__")
    if file is None:
        return digest.hexdigest()
    origin = Path(file).resolve()
    module_name = name.rpartition(":")[0]
    depth = 0 if module_name.endswith(".py") else module_name.count(".") + (origin.name == "__init__.py")
    root = origin.parents[depth]
    scope = root.joinpath(*origin.relative_to(root).parts[:1]) if depth else root
    if not depth and not module_name.endswith(".py") and root != sources.folder.resolve():
        scope = origin  # a single module that was installed: beside it lie all other packages
    for path in sorted(_closure(origin, root, scope)):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _server(url: str) -> tuple[str, str | None, int]:
    """Scheme, host and port of an address."""
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}[parts.scheme]


def _is_folder(place: str) -> bool:
    return place == OWN_FOLDER or "/" in place


def _load(name: str, sources: Sources) -> ModuleType:
    module_name = name.rpartition(":")[0]
    if not module_name.endswith(".py"):
        return _load_module(name, sources)
    path = sources.folder / module_name
    if path.is_file():
        sources.require_allowed(name, path)
    return _load_file(name, path, sources)


def _load_file(name: str, path: Path, sources: Sources) -> ModuleType:
    if not path.is_file():
        raise InputError(f"{name}: there is no file {path}: paths are relative to the spec")
    path = path.resolve()
    module_name = path.stem
    if _is_loaded_from_elsewhere(module_name, path):
        module_name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:16]}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    import_from(path.parent)
    loader = CurrentSource(module_name, str(path))
    spec = importlib.util.spec_from_file_location(module_name, path, loader=loader)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickle look a class's module up there
    try:
        spec.loader.exec_module(module)
    except RAISED as error:
        del sys.modules[module_name]
        place = place_of(error, sources)
        remedy = ": install it in the environment of ppoflow" if isinstance(error, ModuleNotFoundError) else ""
        raise InputError(
            f"{name}: importing {path} failed with {type(error).__name__}: {error}{place}{remedy}"
        ) from error
    return module


def _is_loaded_from_elsewhere(module_name: str, path: Path) -> bool:
    loaded = sys.modules.get(module_name)
    return loaded is not None and vars(loaded).get("__file__") != str(path)


def _load_module(name: str, sources: Sources) -> ModuleType:
    import_from(sources.folder.resolve())
    module_name = name.rpartition(":")[0]
    _require_allowed_package(name, sources)
    try:
        return importlib.import_module(module_name)
    except RAISED as error:
        raise InputError(
            f"{name}: importing {module_name} failed with {type(error).__name__}: {error}; "
            "install it here, or write path/to/file.py:function relative to the spec"
        ) from error


def _require_allowed_package(name: str, sources: Sources) -> None:
    """Where the outermost package lies says who wrote the code; to find it, nothing is imported."""
    outermost = name.partition(":")[0].partition(".")[0]
    try:
        found = importlib.util.find_spec(outermost)
    except ValueError:  # a module of this process that was never found by name
        found = None
    if found is None and outermost not in sys.modules:
        return  # the import says so better
    places = [] if found is None else [found.origin, *(found.submodule_search_locations or [])]
    paths = [Path(place) for place in places if place is not None and Path(place).exists()]
    sources.require_allowed(name, paths[0] if paths else None)


def _closure(origin: Path, root: Path, scope: Path) -> set[Path]:
    """`origin` and the files in `scope` that it imports; dotted names start from the folder `root`."""
    found: set[Path] = set()
    waiting = [origin]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += [file for name in _imported(path, root) for file in _files(name, root, scope)]
    return found


def _imported(path: Path, root: Path) -> Iterator[list[str]]:
    if path.suffix != ".py":
        return
    for node in ast.walk(ast.parse(path.read_bytes(), filename=str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = list(path.relative_to(root).parent.parts)
            start = package[: len(package) - node.level + 1] if node.level else []
            module = [*start, *(node.module or "").split(".")] if node.module else start
            yield from ([*module, alias.name] for alias in node.names)


def _files(name: list[str], root: Path, scope: Path) -> Iterator[Path]:
    """Sources that importing the dotted `name` runs: of each of its packages, and its own."""
    for count in range(1, len(name) + 1):
        place = root.joinpath(*name[:count])
        for file in (place.with_name(f"{place.name}.py"), place / "__init__.py"):
            if file.is_file() and file.is_relative_to(scope):
                yield file
