"""Addresses of servers and of stores, as settings have them."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def names_a_host(url: str) -> bool:
    """Whether the part of an address that names a server is sound; a database in a file has none."""
    try:
        parts = urlsplit(url)
        return (parts.port or 0) >= 0 and (not parts.scheme.startswith("http") or bool(parts.hostname))
    except ValueError:
        return False


def escaped(url: str) -> str:
    """The address, whose login has no character that would end it; else a ValueError, which does not quote it."""
    server = url.partition("://")[2]
    if server.count("@") > 1 or re.search(r"%(?![0-9A-Fa-f]{2})", server):
        raise ValueError("in a user's name and password write %25 for %, and %40 for @")
    return url


def sqlite_url(path: str | Path, driver: str = "sqlite") -> str:
    """The address of a database in a file; what a path may have and an address may not is escaped.

    >>> sqlite_url("/home/50%/mlflow.db")
    'sqlite:////home/50%25/mlflow.db'
    """
    return f"{driver}:///{path}".replace("%", "%25").replace("?", "%3F")


def sqlite_file(url: str) -> Path | None:
    """The file of such an address; None for any other, for one with options, and for a database in memory."""
    path = url.removeprefix("sqlite:///")
    return None if path in (url, "", ":memory:") or "?" in path else Path(unquote(path))


def absolute(path: str | Path) -> Path:
    """Where a path leads from the current folder; `~` is the user's home. ValueError where that folder is gone."""
    try:
        return Path(path).expanduser().absolute()
    except FileNotFoundError:
        raise ValueError(
            f"{path} begins at the current folder, which is gone: go to one that is there (cd), or give absolute paths"
        ) from None


def has_scheme(place: str) -> bool:
    """Whether this is an address, perhaps a mistyped one, and not a path: `s3://x` and `s3:/x`, not `./s3:/x`."""
    return _SCHEME.match(place) is not None
