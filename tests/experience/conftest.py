"""One model for all projects."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.experience.project import make_model, make_project

Project = Callable[[], Path]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder that nobody changes."""
    return make_model(tmp_path_factory.mktemp("right") / "model")


@pytest.fixture
def project(tmp_path: Path, model: Path) -> Path:
    """A project in which all is right."""
    return make_project(tmp_path / "project", model)
