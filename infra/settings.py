"""Settings from the environment. This is the only module that reads or writes it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from ipaddress import IPv4Address
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AliasChoices, Field, SecretStr, ValidationInfo, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from infra.addresses import absolute, escaped, has_scheme, names_a_host, sqlite_url
from infra.engines.environment import DEFAULTS, around_proxies, permitted, way_out
from infra.engines.hardware import gpus_of, has_nvidia_gpu
from infra.runs.folders import RunFolders

_VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]*$"
_Absolute = Annotated[Path, AfterValidator(absolute)]
_BUCKET = r"^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$"


def _beside(data: dict[str, Any], name: str) -> str:
    return str(data["home"] / name) if "home" in data else name  # the complaint about home is the one to show


class Settings(RunFolders, BaseSettings):
    """Where things are on this machine; nothing here but the number of CPU threads influences what a stage computes.

    Each setting is the environment variable of its name with the prefix `PPOFLOW_`; an empty one counts as not set.
    """

    model_config = SettingsConfigDict(
        env_prefix="PPOFLOW_", env_ignore_empty=True, frozen=True, extra="forbid", populate_by_name=True
    )

    home: _Absolute = Field(default=Path(".ppoflow"), description="The folder for all state of ppoflow.")
    store: str = Field(
        default_factory=lambda data: _beside(data, "store"),
        min_length=1,
        description="The folder or address of the artifact store.",
    )
    cache: _Absolute = Field(
        default_factory=lambda data: Path(_beside(data, "cache")),
        description="The folder for local copies of the artifacts of an s3:// store.",
    )
    cache_gib: float = Field(
        default=50.0, gt=0, description="Size limit of the cache, GiB; files in use are kept beyond it."
    )
    store_timeout_s: float = Field(
        default=900.0, ge=0, description="Seconds that running work waits for an s3:// store that does not answer."
    )
    tracking_uri: str = Field(
        default_factory=lambda data: sqlite_url(_beside(data, "mlflow/mlflow.db")),
        validation_alias=AliasChoices("PPOFLOW_TRACKING_URI", "MLFLOW_TRACKING_URI"),
        min_length=1,
        description="The MLflow server or database that gets the curves and the registered policies.",
    )
    mlflow_credentials: Path | None = Field(
        default=None,
        description="A private file with the MLflow server's login, in the form of ~/.mlflow/credentials; with "
        "MLFLOW_TRACKING_AUTH=ppoflow every MLflow client uses it.",
    )
    prefect_api_url: str | None = Field(
        default=None,
        validation_alias=AliasChoices("PPOFLOW_PREFECT_API_URL", "PREFECT_API_URL"),
        description="The Prefect server to report to; without one, ppoflow starts its own.",
    )
    plugins: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(".",),
        min_length=1,
        description="Where code named in specs, such as reward functions, may come from: absolute folders (. is "
        "the spec's own) and packages, separated by commas.",
    )
    reward_env: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(),
        description="Environment variables passed on to reward functions, such as a judge's API key, separated by "
        "commas; other secrets are kept from engines.",
    )
    reward_urls: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(),
        description="Servers that the rewards http and judge may send samples to, as http://HOST:PORT, separated by "
        "commas; without it, any.",
    )
    trust_remote_code: bool = Field(
        default=False, description="Allow custom code in the folders of models and tokenizers; no spec can allow it."
    )
    run_generated_code: bool = Field(
        default=False, description="Allow the reward unit_tests to run code that models write; no spec can allow it."
    )
    engine_threads: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="CPU threads per engine (another number can round differently); without it, all that it may use.",
    )
    engine_wait_policy: Literal["passive", "active"] | None = Field(
        default=None,
        description="How waiting threads of an engine behave: passive sleeps, for a machine with other work; without "
        "it they spin for a moment first, which is faster on a quiet one.",
    )

    hf_endpoint: str = Field(
        default="https://huggingface.co",
        validation_alias=AliasChoices("HF_ENDPOINT"),
        description="The Hugging Face Hub, or a mirror of it, that hf:// names refer to.",
    )
    hf_home: _Absolute = Field(
        default_factory=lambda: Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface",
        validation_alias=AliasChoices("HF_HOME"),
        description="The folder in which `hf auth login` leaves its token.",
    )
    hf_token: SecretStr | None = Field(
        default=None,
        validation_alias=AliasChoices("HF_TOKEN"),
        description="Token for private and gated repositories on the Hub; without one, that in HF_HOME.",
    )
    hf_offline: bool = Field(
        default=False,
        validation_alias=AliasChoices("HF_HUB_OFFLINE"),
        description="Never contact the Hub: what hf:// names refer to must be in the store.",
    )

    @field_validator("plugins", "reward_env", "reward_urls", mode="before")
    @classmethod
    def _joined_by_commas(cls, listed: object) -> object:
        return tuple(one.strip() for one in listed.split(",")) if isinstance(listed, str) else listed

    @field_validator("plugins")
    @classmethod
    def _places(cls, plugins: tuple[str, ...]) -> tuple[str, ...]:
        for place in plugins:
            folder = place == "." or place.startswith("/")
            if not folder and not all(part.isidentifier() for part in place.split(".")):
                raise ValueError(
                    f"{place!r} is not a place for code: give . (the spec's folder), absolute folders or packages"
                )
        return plugins

    @field_validator("reward_urls")
    @classmethod
    def _servers(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for url in urls:
            if not re.fullmatch(r"https?://[^/?#@\s]+", url) or not names_a_host(url):
                raise ValueError(
                    f"{url!r} is not the address of a server: write http://HOST:PORT or https://HOST, without a path"
                )
        return urls

    @field_validator("reward_env")
    @classmethod
    def _variables(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if not re.fullmatch(_VARIABLE, name):
                raise ValueError(f"{name!r} is not the name of a variable: give only names, separated by commas")
        return names

    @field_validator("prefect_api_url", "hf_endpoint")
    @classmethod
    def _server(cls, url: str | None, info: ValidationInfo) -> str | None:
        if url is not None and (not url.startswith(("http://", "https://")) or not names_a_host(url)):
            form = "https://HOST" if info.field_name == "hf_endpoint" else "http://HOST:PORT/api"
            raise ValueError(f"not the address of a server: write {form}")
        return url

    @field_validator("tracking_uri")
    @classmethod
    def _server_or_database(cls, uri: str) -> str:
        if not uri.startswith("databricks") and ("://" not in uri or not names_a_host(uri)):
            raise ValueError("not an address: write http://HOST:PORT for a server, or sqlite:////FOLDER/mlflow.db")
        return uri

    @field_validator("store")
    @classmethod
    def _absolute_store(cls, store: str) -> str:
        return store if has_scheme(store) else str(absolute(store))

    @property
    def store_root(self) -> str:
        """What `open_store` takes."""
        return self.store

    @property
    def cache_folder(self) -> Path:
        """What `open_store` takes as `cache`."""
        return self.cache

    @property
    def prefect_home(self) -> Path:
        """The folder of the Prefect server that we start ourselves."""
        return self.home / "prefect"

    @property
    def mlflow_folder(self) -> Path:
        """The folder of MLflow's default database and of what it stores."""
        return self.home / "mlflow"


class StackSettings(BaseSettings):
    """Where `python -m infra.deploy.stack` runs the servers of a team, and which of them are the user's own.

    Each setting is the environment variable of its name with the prefix `PPOFLOW_STACK_`; an empty one is not set.
    """

    model_config = SettingsConfigDict(env_prefix="PPOFLOW_STACK_", env_ignore_empty=True, frozen=True, extra="forbid")

    folder: _Absolute = Field(
        default_factory=lambda: Settings().home / "stack", description="Data, logs and passwords of the servers."
    )
    passwords: _Absolute = Field(
        default_factory=lambda data: Path(str(data.get("folder", ""))) / "secrets/passwords.json",
        description="The one file that every password comes from; made where it is missing.",
    )
    host: IPv4Address = Field(default=IPv4Address("127.0.0.1"), description="The address that the servers listen on.")
    authentication: bool = Field(default=True, description="Ask for passwords; only on loopback can it be off.")
    postgres: Annotated[str, AfterValidator(escaped)] | None = Field(
        default=None,
        pattern=r"^postgresql://[^/?#]+$",
        description="Your own PostgreSQL, without a database's name; without it, one is started.",
    )
    s3: str | None = Field(
        default=None, pattern=r"^https?://[^/?#@]+$", description="Your own S3 endpoint; without it, Ceph is started."
    )
    bucket: str = Field(default="ppoflow", pattern=_BUCKET, description="The bucket for artifacts and runs.")
    mlflow_bucket: str = Field(default="mlflow", pattern=_BUCKET, description="The bucket for MLflow's own files.")
    s3_gib: int = Field(default=50, ge=4, le=65536, description="The largest size of Ceph's (sparse) disk file.")
    pool: str = Field(default="gpu", pattern=r"^[a-z0-9-]{1,64}$", description="The work pool, as in ppoflow deploy.")
    ray_resources: dict[str, float] = Field(
        default={"rollout": 2, "training": 1, "scoring": 1},
        description="What the Ray head offers, besides CPUs and GPUs.",
    )
    ray_nodes: tuple[dict[str, float], ...] = Field(
        default=(), description="Further Ray nodes on this machine, each with what it offers; on loopback only."
    )
    postgres_user: str = Field(default="postgres", description="Who runs PostgreSQL when root starts the stack.")
    postgres_port: int = Field(default=5433, ge=1, le=65535, description="The port of PostgreSQL.")
    monitor_port: int = Field(default=3300, ge=1, le=65535, description="The port of Ceph's monitor.")
    s3_port: int = Field(default=7480, ge=1, le=65535, description="The port of S3.")
    prefect_port: int = Field(default=4200, ge=1, le=65535, description="The port of Prefect's server.")
    mlflow_port: int = Field(default=5000, ge=1, le=65535, description="The port of MLflow's server.")
    ray_port: int = Field(default=6379, ge=1, le=65535, description="The port of the Ray head.")
    ray_client_port: int = Field(default=10001, ge=1, le=65535, description="The port for Ray's clients (ray://).")

    @model_validator(mode="after")
    def _passwords_beyond_loopback(self) -> StackSettings:
        if self.host.is_unspecified:
            raise ValueError(f"host={self.host} is not an address that clients can connect to: give this machine's own")
        if not self.host.is_loopback and not self.authentication:
            raise ValueError(
                f"host={self.host} can be reached from other machines and authentication is off: "
                "leave PPOFLOW_STACK_AUTHENTICATION on, or listen on 127.0.0.1"
            )
        if self.ray_nodes and not self.host.is_loopback:
            raise ValueError(f"ray_nodes need host=127.0.0.1, not {self.host}: use `ray start` on the other machines")
        return self


def child_environment(extra: Mapping[str, str], *, without: Sequence[str] = ()) -> dict[str, str]:
    """The environment for a child process: ours, less the names that begin with one of `without`, and these on top."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(tuple(without))}
    return {**kept, **extra}


def engine_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """The environment for an engine: of ours what it needs and nothing secret, and `extra` on top."""
    return {**DEFAULTS, **permitted(os.environ), **extra}


def visible_gpus() -> list[str]:
    """The GPUs of this machine that engines may use."""
    return gpus_of(os.environ.get("CUDA_VISIBLE_DEVICES")) if has_nvidia_gpu() else []


def direct_environment(*hosts: str) -> dict[str, str]:
    """Variables by which clients ask no proxy for what is on this machine, or on those hosts."""
    return around_proxies(os.environ, ("127.0.0.1", "localhost", *hosts))


def reach_directly(*hosts: str) -> None:
    """Set what `direct_environment` gives, for this process and its children."""
    os.environ.update(direct_environment(*hosts))


def reward_environment(names: Sequence[str]) -> dict[str, str]:
    """What reward functions see besides: the way to the network, and those of `names` that are set."""
    return {**way_out(os.environ), **{name: os.environ[name] for name in names if name in os.environ}}


def set_variables(prefix: str) -> list[str]:
    """The names that begin so of variables that are set, in order."""
    return sorted(name for name, value in os.environ.items() if value and name.startswith(prefix))


def export(variables: Mapping[str, str]) -> None:
    """Set variables for this process and its children, unless the user has set them already."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)
