"""Imports of a user's code as its files are now.

Python takes a compiled file for current that has the source's size and its time in whole seconds. Code that is edited
twice in a second, or comes from where all files have one time (a container's layer, git with fixed times), would run as
it was before, under the digest of what it is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from importlib.machinery import (
    BYTECODE_SUFFIXES,
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    SourceFileLoader,
    SourcelessFileLoader,
)
from pathlib import Path
from types import CodeType


class CurrentSource(SourceFileLoader):
    """Compiles a module's source, and neither reads nor writes a compiled file beside it."""

    def get_code(self, fullname: str) -> CodeType:
        """Raises SyntaxError or ValueError."""
        return self.source_to_code(self.get_data(self.path), self.path)


LOADERS = (
    (ExtensionFileLoader, EXTENSION_SUFFIXES),
    (CurrentSource, SOURCE_SUFFIXES),
    (SourcelessFileLoader, BYTECODE_SUFFIXES),
)


def import_from(folder: Path) -> None:
    """Let imports look into the folder first, and read what is there by `CurrentSource`."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    hook = hook_of(folder)
    if hook not in sys.path_hooks:
        sys.path_hooks.insert(0, hook)
        for entry in list(sys.path_importer_cache):
            if _is_code_of(folder, entry):
                del sys.path_importer_cache[entry]


@cache
def hook_of(folder: Path) -> Callable[[str], FileFinder]:
    """The one of `sys.path_hooks` for modules in a folder and its packages.

    What else of sys.path lies in that folder, as an environment's packages and Python's own modules may, is left alone.
    """

    def find_current_source(entry: str) -> FileFinder:  # a function: beartype asks all hooks for their name
        if not _is_code_of(folder, entry):
            raise ImportError(f"{entry} is not in {folder}")
        return FileFinder(entry, *LOADERS)

    return find_current_source


def _is_code_of(folder: Path, entry: str) -> bool:
    path = Path(entry)
    if not path.is_relative_to(folder):  # as nearly all are: each package that anybody imports is asked about
        return False
    others = [Path(place) for place in sys.path if place and Path(place) != folder]
    return not any(other.is_relative_to(folder) and path.is_relative_to(other) for other in others)
