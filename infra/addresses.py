"""Addresses of servers, as settings have them."""

from __future__ import annotations

from urllib.parse import urlsplit


def names_a_host(url: str) -> bool:
    """Whether the part of an address that names a server is sound; a database in a file has none."""
    try:
        parts = urlsplit(url)
        return (parts.port or 0) >= 0 and (not parts.scheme.startswith("http") or bool(parts.hostname))
    except ValueError:
        return False
