"""Settings from the environment. This is the only module that reads or writes it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import AliasChoices, Field, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from infra.runs import validate_run_name


def _beside(data: dict[str, Any], name: str) -> str:
    # Without a valid home there is no default; the complaint about home is the one to show.
    return str(data["home"] / name) if "home" in data else name


class Settings(BaseSettings):
    """Where things are on this machine; nothing here may influence what a stage computes.

    Each setting is the environment variable of its name with the prefix `PPOFLOW_`; an empty one counts as not set.
    """

    model_config = SettingsConfigDict(
        env_prefix="PPOFLOW_", env_ignore_empty=True, frozen=True, extra="forbid", populate_by_name=True
    )

    home: Path = Field(default=Path(".ppoflow"), description="The folder for all state of ppoflow.")
    store: str = Field(
        default_factory=lambda data: _beside(data, "store"),
        min_length=1,
        description="The folder or address of the artifact store.",
    )
    tracking_uri: str = Field(
        default_factory=lambda data: "sqlite:///" + _beside(data, "mlflow/mlflow.db"),
        validation_alias=AliasChoices("PPOFLOW_TRACKING_URI", "MLFLOW_TRACKING_URI"),
        min_length=1,
        description="The MLflow server or database that gets the curves and the registered policies.",
    )
    prefect_api_url: str | None = Field(
        default=None,
        validation_alias=AliasChoices("PPOFLOW_PREFECT_API_URL", "PREFECT_API_URL"),
        pattern=r"^https?://",
        description="The Prefect server to report to; without one, ppoflow starts its own.",
    )
    engine_threads: int | None = Field(
        default=None, ge=1, le=1024, description="CPU threads of each engine; without it, each engine chooses."
    )

    @field_validator("home")
    @classmethod
    def _absolute_home(cls, home: Path) -> Path:
        return home.expanduser().absolute()

    @field_validator("store")
    @classmethod
    def _absolute_store(cls, store: str) -> str:
        return store if "://" in store else str(Path(store).expanduser().absolute())

    @property
    def store_root(self) -> str:
        """What `open_store` takes."""
        return self.store

    @property
    def prefect_home(self) -> Path:
        """The folder of the Prefect server that we start ourselves."""
        return self.home / "prefect"

    @property
    def mlflow_folder(self) -> Path:
        """The folder of MLflow's default database and of what it stores."""
        return self.home / "mlflow"

    def run_folder(self, run: str) -> Path:
        """The folder for what a run leaves on this machine besides artifacts and records."""
        return self.home / "runs" / validate_run_name(run)

    def log_folder(self, run: str) -> Path:
        """The folder for the logs of a run's processes."""
        return self.run_folder(run) / "logs"


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """The environment for a child process: ours, with these on top."""
    return {**os.environ, **extra}


def export(variables: Mapping[str, str]) -> None:
    """Set variables for this process and its children, unless the user has set them already."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)
