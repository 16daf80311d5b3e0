"""Addresses of servers and of stores, as settings have them."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def names_a_host(url: str) -> bool:
    """Whether the part of an address that names a server is sound; a database in a file has none."""
    try:
        parts = urlsplit(url)
        return (parts.port or 0) >= 0 and (not parts.scheme.startswith("http") or bool(parts.hostname))
    except ValueError:
        return False


def has_scheme(place: str) -> bool:
    """Whether this is an address, perhaps a mistyped one, and not a path: `s3://x` and `s3:/x`, not `./s3:/x`."""
    return _SCHEME.match(place) is not None
