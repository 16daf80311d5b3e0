"""The folders that a run writes to: there, or to be made, and writable."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from pydantic import AliasChoices, ValidationError
from pydantic.fields import FieldInfo

from infra.backend import is_remote
from infra.mlflow.client import without_password
from infra.settings import Settings, StackSettings, set_variables
from infra.storage.filesystem import local_root
from ppo_core.records import InputError
from ppo_core.spec.explaining import requirement

OURS = "PPOFLOW_"
OF_PROCESSES = {
    "PPOFLOW_GUARDED",
    "PPOFLOW_STACK_MARK",
    "PPOFLOW_CONTAINERS",
    "PPOFLOW_SECRETS",
    "PPOFLOW_UID",
    "PPOFLOW_PASSWORDS",
}
"""Variables that are no settings: marks of our own processes, and what compose.yaml is filled in with."""


@dataclass(frozen=True)
class Place:
    """A folder of the user's choice, by the variable that names it."""

    what: str
    path: Path
    variable: str


def require_readable_state(settings: Settings | None = None) -> None:
    """Raise InputError where the state folder or a local store cannot be read; nothing there yet is no mistake."""
    for place in places(settings or read_settings()):
        if _existing(place) == place.path and not os.access(place.path, os.R_OK | os.X_OK):
            raise _refusal(place, f"user {os.geteuid()} may not read it. Change its permissions")


def read_settings() -> Settings:
    """The settings. Raises InputError naming each variable of the environment that is refused."""
    try:
        return Settings()
    except ValidationError as error:
        raise InputError("\n".join(_problems(error))) from None


def _problems(error: ValidationError) -> Iterator[str]:
    for item in error.errors():
        if item["type"] != "default_factory_not_called":  # follows from another one
            field = str(item["loc"][0])
            name, given = " or ".join(names_of(field)), without_password(str(item["input"]))
            yield f"{name}={given!r} in the environment: {requirement(item)}"


def names_of(field: str) -> list[str]:
    """The variables that set a setting."""
    known = next((info for name, info in Settings.model_fields.items() if field in (name, *aliases(info))), None)
    return aliases(known) or [field if field.isupper() else f"PPOFLOW_{field.upper()}"] if known else [field]


def unknown_variables() -> list[str]:
    """A line for each variable that begins as ours do and means nothing, with the nearest that does."""
    stack = StackSettings.model_config["env_prefix"]
    known = {name for field in Settings.model_fields for name in names_of(field)} | OF_PROCESSES
    known |= {f"{stack}{field.upper()}" for field in StackSettings.model_fields}
    ends, notes = sorted(name.removeprefix(OURS) for name in known if name.startswith(OURS)), []
    for name in set_variables(OURS):
        if name not in known:
            close = get_close_matches(name.removeprefix(OURS), ends, n=1)
            notes.append(f"{name} is not a setting of ppoflow{f': did you mean {OURS}{close[0]}?' if close else ''}")
    return notes


def aliases(info: FieldInfo) -> list[str]:
    """Where a setting has several variables, each of them."""
    choices = info.validation_alias
    return [str(choice) for choice in choices.choices] if isinstance(choices, AliasChoices) else []


def require_writable_state(settings: Settings) -> None:
    """Raise InputError where a run could not write its state; makes nothing."""
    require_readable_state(settings)
    home, *others = places(settings)
    inner = (settings.prefect_home, settings.mlflow_folder, settings.home / "runs", settings.home / "logs")
    for place in (home, *others, *(Place(home.what, path, home.variable) for path in inner)):
        folder = _existing(place)
        if not os.access(folder, os.W_OK | os.X_OK):
            where = "it" if folder == place.path else str(folder)
            raise _refusal(place, f"user {os.geteuid()} may not write to {where}. Change its permissions")


def places(settings: Settings) -> Iterator[Place]:
    """The state folder first."""
    yield Place("the state folder", settings.home, "PPOFLOW_HOME")
    if is_remote(settings.store_root):
        yield Place("the cache", settings.cache_folder, "PPOFLOW_CACHE")
    else:
        yield Place("the store", local_root(settings.store_root), "PPOFLOW_STORE")


def nearest(path: Path) -> Path:
    """The path itself, or the nearest one above it that exists."""
    return next(place for place in (path, *path.parents) if os.path.lexists(place))


def _existing(place: Place) -> Path:
    """The nearest folder that exists. Raises InputError where a file is in the way."""
    found = nearest(place.path)
    if not found.is_dir():
        kind = "a broken link" if found.is_symlink() else "a file"
        raise _refusal(place, f"{'it' if found == place.path else found} is {kind}. Move it")
    return found


def _refusal(place: Place, reason: str) -> InputError:
    return InputError(f"{place.what} {place.path} cannot be used: {reason}, or set {place.variable} to another folder")
