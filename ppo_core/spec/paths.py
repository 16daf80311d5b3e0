"""Paths as a user writes them in a spec."""

from __future__ import annotations

import re
from os.path import expanduser
from typing import Annotated

from pydantic import AfterValidator

ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def user_path(text: str) -> str:
    """The path with the user's home for ~. Raises ValueError for an address: nothing is downloaded here."""
    if ADDRESS.match(text):
        raise ValueError(
            f"{text} is an address, and this is a path on this machine: download it first (of the hub: hf download "
            "NAME --local-dir FOLDER, for data with --repo-type dataset) and give the folder or file"
        )
    return expanduser(text)


UserPath = Annotated[str, AfterValidator(user_path)]
"""A path, or a function in one, of which ~ is the home of whoever runs ppoflow."""
