"""What a run and its notes may be called: a run's name is the name of its folder."""

from __future__ import annotations

import re

TRACKING = "tracking"
"""The notes of the id on a tracking server: they may be moved away where they are damaged, the run gets another one."""
NOTES = ("rollbacks", "divergences", "reruns", "changes", TRACKING)
RUN_NAME_LIMIT = 100
_RUN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


class InvalidRunName(ValueError):
    """This name cannot name a run."""


def validate_run_name(name: str) -> str:
    """Return a run's name, or say why it cannot be one."""
    if len(name) > RUN_NAME_LIMIT:
        raise InvalidRunName(f"run name of {len(name)} characters: use at most {RUN_NAME_LIMIT}")
    if not is_run_name(name):
        raise InvalidRunName(
            f"run name {name!r}: use letters, digits, dots, dashes and underscores, "
            "beginning with a letter, a digit or an underscore, without two dots in a row"
        )
    return name


DOWNLOADS = "download"
"""The kind of artifacts that a store may have before any run."""


def no_run_name(place: str) -> str:
    """What is wrong with what lies among the runs under a name that no run can have."""
    return f"{place} bears no name that a run can have: rename it to one, or move it out of the runs"


def no_runs(place: str, remedy: str) -> str:
    """What is wrong with a store of artifacts without runs; the remedy is for one that is to have none."""
    return (
        f"{place} is not there, and the store has artifacts: put it back from a copy, or, where there is to be no run, "
        f"{remedy}"
    )


def note_kind(kind: str) -> str:
    """Return a kind of notes, or say that there is none of this name."""
    if kind not in NOTES:
        raise ValueError(f"a run has no notes of kind {kind!r}: use one of {', '.join(NOTES)}")
    return kind


def is_run_name(name: str) -> bool:
    """Whether the folder of this name below `runs/` can be a run's."""
    return _RUN_NAME.fullmatch(name) is not None and len(name) <= RUN_NAME_LIMIT and ".." not in name
