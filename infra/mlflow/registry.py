"""MLflow's model registry: a version points to the artifact where it lies, so its weights are stored once."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from infra.addresses import sqlite_file
from infra.mlflow.client import AWAY, in_short, open_client, uploading, without_password
from infra.mlflow.run import RUN_TAG

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

DIGEST_TAG = "ppoflow.digest"
SOURCE_TAG = "ppoflow.source"
MOST_NAMED = 100
MODEL_URI = re.compile(r"models:/(?P<name>[^/@]+)(?:@(?P<alias>[\w\-]+)|/(?P<version>\d+))")


class RegistryError(RuntimeError):
    """MLflow's registry refused, or did not answer."""


class InvalidModelName(RegistryError, ValueError):
    """This cannot be the name, alias or uri of a registered model."""


@dataclass(frozen=True)
class Registered:
    """What is known of a version that was just made: its model, its number, and the folder or URL of its files."""

    name: str
    version: str
    source: str


@dataclass(frozen=True)
class Version:
    """A version of a registered model; `tags` hold its lineage."""

    name: str
    version: str
    source: str
    tags: Mapping[str, str]
    created_ms: int


def register(
    uri: str,
    *,
    name: str,
    source: str,
    tags: Mapping[str, str],
    aliases: Sequence[str] = (),
    description: str | None = None,
    run_id: str | None = None,
    model_description: str | None = None,
) -> Registered:
    """Register the folder at `source` (its own uri) as a version of `name`; one with this source and digest is taken.

    `tags` hold the lineage and must name `ppoflow.digest`. An MLflow server takes no file:// source from outside the
    run's own artifacts: then, if `run_id` is given, the folder is uploaded to that run, and the version points to the
    copy. `model_description` is that of the model, `description` that of the version; what a person wrote stays.
    `aliases` come to point to this version, but not back from a newer one of another run.
    """
    if not tags.get(DIGEST_TAG):
        raise ValueError(f"the tags {sorted(tags)} do not name {DIGEST_TAG!r}: by it a version is found again")
    _check_aliases(aliases)
    with _registry_errors(uri, f"register {source} as {name!r}"):
        client = open_client(uri)
        _ensure_model(client, name, model_description)
        version = _existing(client, name, source, tags[DIGEST_TAG])
        if version is None:
            version = _create(client, name, source, {**tags, SOURCE_TAG: source}, description, run_id)
        pointed = client.get_registered_model(name).aliases if aliases else {}
        for alias in aliases:
            newer = int(pointed.get(alias, 0)) > int(version.version)
            if not newer or client.get_model_version(name, pointed[alias]).tags.get(RUN_TAG) == tags.get(RUN_TAG):
                client.set_registered_model_alias(name, alias, version.version)
        return Registered(name, str(version.version), str(version.source))


def resolve(uri: str, model: str) -> str:
    """The source uri of `models:/NAME@ALIAS` or `models:/NAME/3`."""
    return describe(uri, model).source


def describe(uri: str, model: str) -> Version:
    """What the registry has of `models:/NAME@ALIAS` or `models:/NAME/3`."""
    parts = MODEL_URI.fullmatch(model)
    if parts is None:
        raise InvalidModelName(
            f"{model!r} does not name a registered model: write models:/NAME@ALIAS or models:/NAME/VERSION"
        )
    _require_database(uri, model)
    with _registry_errors(uri, f"find {model}"):
        client = open_client(uri)
        found = _found(client, parts["name"], parts["alias"], parts["version"])
        return Version(
            name=str(found.name),
            version=str(found.version),
            source=str(found.source),
            tags=dict(found.tags),
            created_ms=int(found.creation_timestamp),
        )


def _require_database(uri: str, model: str) -> None:
    """MLflow would make one, and the next message would be of what is not in it."""
    if (file := sqlite_file(uri)) is not None and not file.exists():
        raise RegistryError(
            f"{model} is not there, for there is no MLflow database {file}: set PPOFLOW_HOME, or PPOFLOW_TRACKING_URI, "
            "to where it was registered"
        )


def _found(client: MlflowClient, name: str, alias: str | None, version: str) -> ModelVersion:
    """Raises LookupError saying what there is instead."""
    from mlflow.exceptions import MlflowException

    try:
        if alias is not None:
            return client.get_model_version_by_alias(name, alias)
        return client.get_model_version(name, version)
    except MlflowException as error:
        if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            raise
        raise LookupError(_instead(client, name, alias, version)) from error


def _instead(client: MlflowClient, name: str, alias: str | None, version: str) -> str:
    known = _known(client)
    if name not in known and len(known) < MOST_NAMED:
        return _no_model(name, known)
    aliases = [f"@{given} is version {at}" for given, at in client.get_registered_model(name).aliases.items()]
    missing = f"version {version}" if alias is None else f"alias {alias}"
    return f"{name} has no {missing} (its aliases: {', '.join(sorted(aliases)) or 'none'})"


def _known(client: MlflowClient) -> list[str]:
    return [str(model.name) for model in client.search_registered_models(max_results=MOST_NAMED)]


def _no_model(name: str, known: Sequence[str]) -> str:
    more = ", …" if len(known) == MOST_NAMED else ""
    return f"no model is registered as {name} (registered: {', '.join(known) or 'none'}{more})"


def aliases_of(uri: str, name: str) -> dict[str, str]:
    """The aliases of a registered model, each with the version that it points to."""
    _require_database(uri, f"models:/{name}")
    with _registry_errors(uri, f"read the aliases of {name!r}"):
        from mlflow.exceptions import MlflowException

        client = open_client(uri)
        try:
            found = client.get_registered_model(name).aliases
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            raise LookupError(_no_model(name, _known(client))) from error
        return {str(alias): str(version) for alias, version in found.items()}


def is_there(uri: str, name: str, version: str) -> bool:
    """Whether a registered model has this version, and nobody has deleted it."""
    with _registry_errors(uri, f"look whether {name!r} has a version {version}"):
        from mlflow.exceptions import MlflowException

        try:
            open_client(uri).get_model_version(name, version)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return False
        return True


def point_alias(uri: str, name: str, alias: str, version: str | None) -> None:
    """Have an alias point to a version, whatever it pointed to; None removes it."""
    _check_aliases([alias])
    with _registry_errors(uri, f"move the alias {alias!r} of {name!r} to version {version}"):
        client = open_client(uri)
        if version is None:
            client.delete_registered_model_alias(name, alias)
        else:
            client.set_registered_model_alias(name, alias, version)


@contextmanager
def _registry_errors(uri: str, intent: str) -> Iterator[None]:
    """Callers get one kind of error and need not know MLflow's."""
    try:
        yield
    except Exception as error:
        from mlflow.exceptions import MlflowException
        from requests import RequestException
        from sqlalchemy.exc import SQLAlchemyError

        if isinstance(error, MlflowException | RequestException | SQLAlchemyError | OSError | LookupError):
            why = in_short(str(error)).replace(AWAY, f"it {AWAY}")
            raise RegistryError(f"MLflow at {without_password(uri)} could not {intent}: {why}") from error
        raise


def _check_aliases(aliases: Sequence[str]) -> None:
    for alias in aliases:
        if not re.fullmatch(r"[\w\-]+", alias) or alias == "latest" or re.fullmatch(r"[vV]\d+", alias):
            raise InvalidModelName(
                f"the alias {alias!r} is not allowed: use letters, digits, dashes and underscores, "
                "but neither `latest` nor v1, v2 …, which MLflow reserves"
            )


def _ensure_model(client: MlflowClient, name: str, description: str | None) -> None:
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name, description=description)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
        if description and not client.get_registered_model(name).description:
            client.update_registered_model(name, description=description)


def _existing(client: MlflowClient, name: str, source: str, digest: str) -> ModelVersion | None:
    token: str | None = None
    while True:
        page = client.search_model_versions(f"name = '{name}'", max_results=200, page_token=token)
        for version in page:
            if version.tags.get(DIGEST_TAG) == digest and version.tags.get(SOURCE_TAG) == source:
                return version
        token = page.token
        if not token:
            return None


def _create(
    client: MlflowClient,
    name: str,
    source: str,
    tags: Mapping[str, str],
    description: str | None,
    run_id: str | None,
) -> ModelVersion:
    from mlflow.exceptions import MlflowException

    def version_at(place: str) -> ModelVersion:
        return client.create_model_version(name, place, run_id=run_id, tags=dict(tags), description=description)

    try:
        return version_at(source)
    except MlflowException as error:
        scheme, _, path, _, _ = urlsplit(source)
        local = Path(unquote(path)) if scheme == "file" else None
        if error.error_code != "INVALID_PARAMETER_VALUE" or run_id is None or local is None:
            raise
        folder = f"models/{tags[DIGEST_TAG][:12]}"
        try:
            with uploading(local):
                client.log_artifacts(run_id, str(local), folder)
        except Exception as failed:  # of the client of whatever store the run's artifacts are in: there are many
            raise RegistryError(
                f"{local} could not be uploaded to MLflow's artifacts at {client.get_run(run_id).info.artifact_uri} "
                f"({in_short(str(failed))}): give this process access to that store, or start MLflow's server so that "
                "it passes artifacts on (--serve-artifacts)"
            ) from failed
        return version_at(f"{client.get_run(run_id).info.artifact_uri}/{folder}")
