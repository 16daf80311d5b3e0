"""Imports of a user's code as its files are now.

Python takes a compiled file for current that has the source's size and its time in whole seconds. Code that is edited
twice in a second, or comes from where all files have one time (a container's layer, git with fixed times), would run as
it was before, under the digest of what it is.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
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
from typing import Never

INSTALLED = ("site-packages", "dist-packages")


class CurrentSource(SourceFileLoader):
    """Compiles a module's source, and neither reads nor writes a compiled file beside it."""

    def path_stats(self, path: str) -> Never:
        """Refuse, by which importlib knows that there are no compiled files (SourceLoader.path_stats)."""
        raise OSError("compiled files are not used here")


LOADERS = (
    (ExtensionFileLoader, EXTENSION_SUFFIXES),
    (CurrentSource, SOURCE_SUFFIXES),
    (SourcelessFileLoader, BYTECODE_SUFFIXES),
)


@dataclass(frozen=True)
class ImportsFrom:
    """An entry of sys.path_hooks: modules in `folder` and its packages, but for installed ones, by `CurrentSource`."""

    folder: Path

    def __call__(self, entry: str) -> FileFinder:
        """The finder of a folder of modules. Raises ImportError for those of others, as Python asks for."""
        if not self._holds(entry):
            raise ImportError(f"{entry} is not in {self.folder}")
        return FileFinder(entry, *LOADERS)

    def begin(self) -> None:
        """Let imports look into the folder first."""
        if str(self.folder) not in sys.path:
            sys.path.insert(0, str(self.folder))
        if self not in sys.path_hooks:
            sys.path_hooks.insert(0, self)
            for entry in filter(self._holds, list(sys.path_importer_cache)):
                del sys.path_importer_cache[entry]
            importlib.invalidate_caches()

    def _holds(self, entry: str) -> bool:
        path = Path(entry)
        return path.is_relative_to(self.folder) and not set(path.relative_to(self.folder).parts) & set(INSTALLED)
