"""What MLflow accepts as the name of a metric, parameter or tag, and how long values may be."""

from __future__ import annotations

import hashlib
import re

MAX_NAME_LENGTH = 250


def entry_name(key: str) -> str:
    """The name under which `key` is stored, for metrics, parameters and tags alike.

    MLflow allows letters, digits, `_ - . : /` and spaces, in a form that is a plain relative path. So every other
    character (`@ ( ) , %` …), every run of two or more dots and a lone dot between slashes become as many underscores;
    empty parts of the path go (`a//b` is `a/b`); a name over 250 characters ends in a digest of itself instead of its
    tail. Names that differ in such characters alone (`pass@1`, `pass%1`) fall together.

    >>> entry_name("eval/pass@4")
    'eval/pass_4'
    """
    cleaned = re.sub(r"[^/\w.\- :]", "_", key)
    cleaned = re.sub(r"\.{2,}", lambda dots: "_" * len(dots.group()), cleaned)
    parts = ["_" if part == "." else part for part in cleaned.split("/") if part]
    name = "/".join(parts) or "_"
    if len(name) <= MAX_NAME_LENGTH:
        return name
    return f"{name[: MAX_NAME_LENGTH - 13]}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"


def marked_cut(value: str, limit: int) -> str:
    """`value` itself, or its beginning and a note of its full length, `limit` characters in all."""
    if len(value) <= limit:
        return value
    note = f" … [cut: {len(value)} characters in all]"
    return value[: limit - len(note)] + note
