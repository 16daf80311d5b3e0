"""How a mistake is met: by the command as a user gives it, or inside of this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli.main import app
from tests.e2e.launch import environment, ppoflow

Break = Callable[[Path], object]


@dataclass(frozen=True)
class Mistake:
    """`breaks` makes it in a right project; `says` are parts of the one message that names it and its remedy."""

    what: str
    says: tuple[str, ...]
    breaks: Break = field(default=lambda folder: None)
    command: tuple[str, ...] = ("train", "spec.yaml")
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """What the user sees, and what is left on the machine."""

    seconds: float
    status: int
    output: str
    error: str
    left: list[str]


def meet(mistake: Mistake, project: Path) -> Answer:
    """Make the mistake in a fresh project, start the command as a user would, and look at what is left."""
    mistake.breaks(project)
    home = project / "state"
    extra = {name: value.format(project=project) for name, value in mistake.environment.items()}
    started = time.perf_counter()
    done = ppoflow(home, *mistake.command, cwd=project, **extra)
    seconds = time.perf_counter() - started
    return Answer(seconds, done.returncode, done.stdout, done.stderr, left_in(Path(extra.get("PPOFLOW_HOME", home))))


def meet_here(mistake: Mistake, project: Path, patch: pytest.MonkeyPatch) -> Answer:
    """The same by the command inside of this process, whose checks may share an engine."""
    mistake.breaks(project)
    patch.chdir(project)
    for name, value in environment(project / "state", **mistake.environment).items():
        patch.setenv(name, value)
    started = time.perf_counter()
    done = CliRunner().invoke(app, mistake.command)
    seconds = time.perf_counter() - started
    return Answer(seconds, done.exit_code, done.stdout, done.stderr, left_in(project / "state"))


def left_in(home: Path) -> list[str]:
    """The files there."""
    return sorted(str(path.relative_to(home)) for path in home.rglob("*") if path.is_file())
