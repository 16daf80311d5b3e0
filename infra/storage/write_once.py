"""Small documents that are each created once and never changed: of several writers of one name exactly one wins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

T = TypeVar("T")


class WriteOnceLog(Protocol):
    """The documents ("pages") in a folder of a store."""

    def create(self, name: str, content: bytes) -> bool:
        """Write a page, durable when this returns; False if there is one of this name. `content` is unique."""

    def read(self, name: str, parse: Callable[[bytes], T], wrong: type[Exception]) -> T | None:
        """A page's content, parsed, or None without such a page.

        `parse` raises `wrong` where the bytes are; so does this where the page is, and not only what came of it.
        """

    def names(self) -> list[str]:
        """The names of all pages, sorted."""

    def folders(self) -> list[str]:
        """The names of the folders here, sorted."""

    def below(self, folder: str) -> WriteOnceLog:
        """Those in a folder here."""
