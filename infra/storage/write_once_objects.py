"""Pages in S3: each is created by a conditional put, which of several at once exactly one wins."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from infra.storage.client import open_objects
from infra.storage.objects import Objects, S3Address
from infra.storage.rereading import read_again

T = TypeVar("T")


class S3Pages:
    """The pages below a key prefix, which ends with a slash."""

    def __init__(self, objects: Objects, prefix: str) -> None:
        self._objects = objects
        self._prefix = prefix

    def create(self, name: str, content: bytes) -> bool:
        """Write a page; False if there is one of this name."""
        return self._objects.create(self._prefix + name, content) is not None

    def read(self, name: str, parse: Callable[[bytes], T], wrong: type[Exception]) -> T | None:
        """A page's content, parsed, or None; read again where `parse` raises `wrong`."""
        found = read_again(self._objects, self._prefix + name, parse, wrong)
        return None if found is None else found[0]

    def names(self) -> list[str]:
        """The names of all pages, sorted."""
        names = [entry.key.removeprefix(self._prefix) for entry in self._objects.entries(self._prefix)]
        return [name for name in names if name and "/" not in name]

    def folders(self) -> list[str]:
        """The names of the folders here, sorted."""
        return self._objects.folders(self._prefix)

    def below(self, folder: str) -> S3Pages:
        """Those in a folder here."""
        return S3Pages(self._objects, f"{self._prefix}{folder}/")


def open_s3_pages(root: str, *folders: str) -> S3Pages:
    """The pages in a folder of the store at `root`."""
    address = S3Address.parse(root)
    return S3Pages(open_objects(address.bucket), address.key(*folders) + "/")
