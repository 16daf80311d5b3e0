"""Small documents that are each created once and never changed: of several writers of one name exactly one wins."""

from __future__ import annotations

from typing import Protocol


class WriteOnceLog(Protocol):
    """The documents ("pages") in a folder of a store."""

    def create(self, name: str, content: bytes) -> bool:
        """Write a page, durable when this returns; False if there is one of this name. `content` is unique."""

    def read(self, name: str) -> bytes | None:
        """A page's content, or None."""

    def names(self) -> list[str]:
        """The names of all pages, sorted."""

    def folders(self) -> list[str]:
        """The names of the folders here, sorted."""

    def below(self, folder: str) -> WriteOnceLog:
        """Those in a folder here."""
