"""Paths as a user writes them in a spec."""

from __future__ import annotations

from os.path import expanduser
from typing import Annotated

from pydantic import AfterValidator

UserPath = Annotated[str, AfterValidator(expanduser)]
"""A path, or a function in one, of which ~ is the home of whoever runs ppoflow."""
