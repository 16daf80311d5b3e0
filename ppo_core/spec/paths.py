"""Paths as a user writes them in a spec; a name of the hub may stand in their place."""

from __future__ import annotations

import re
from os.path import expanduser
from typing import Annotated

from pydantic import AfterValidator

from ppo_core.spec.hub import hub_name, is_hub_name

ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
DRIVE = re.compile(r"[A-Za-z]:[\\/]")
"""How an absolute path of Windows begins, whose colon names no function."""


def user_path(text: str) -> str:
    """The path with the user's home for ~, or a name of the hub. Raises ValueError for any other address."""
    if is_hub_name(text):
        hub_name(text)
        return text
    if ADDRESS.match(text):
        raise ValueError(
            f"{text} is a URL, and a local path is needed here: write hf://OWNER/NAME for what is on the Hugging Face "
            "Hub; download anything else first, and give its folder or file"
        )
    return expanduser(text)


def model_path(text: str) -> str:
    """The same for a model, which is a whole folder or repository."""
    if is_hub_name(text) and (path := hub_name(text).path) is not None:
        raise ValueError(
            f"{text} names {path} in a repository, but a model is a whole repository: leave :{path} out, or download "
            "that folder first and give its local path"
        )
    return user_path(text)


def is_function(source: str) -> bool:
    """Whether rows come from a function, `path/to/file.py:function`."""
    return ":" in source and not is_hub_name(source) and not DRIVE.match(source)


UserPath = Annotated[str, AfterValidator(user_path)]
"""A path, or a function in one, of which ~ is the home of whoever runs ppoflow; or a name of the hub."""
ModelPath = Annotated[str, AfterValidator(model_path)]
"""The folder of a model or of a tokenizer, or a name of the hub."""
