"""The stack's passwords in the form that Docker Compose and Kubernetes take them: by reference, from a private file."""

from __future__ import annotations

import os
from pathlib import Path

from infra.deploy.stack.credentials import ADMIN, Credentials, write_private
from infra.deploy.stack.site import DATABASE_USER, Site

USER = 1000
"""Of the containers, where root starts them."""


def container_variables(credentials: Credentials) -> dict[str, str]:
    """The names that infra/deploy/compose.yaml and infra/deploy/kubernetes refer to."""
    return {
        "POSTGRES_USER": DATABASE_USER,
        "POSTGRES_PASSWORD": credentials.postgres,
        "PREFECT_LOGIN": f"{ADMIN}:{credentials.prefect}",
        "MLFLOW_USER": ADMIN,
        "MLFLOW_PASSWORD": credentials.mlflow,
        "MLFLOW_COOKIES": credentials.mlflow_cookies,
        "RAY_TOKEN": credentials.ray,
    }


def write_container_files(site: Site) -> Path:
    """The file for Compose's --env-file and kubectl's --from-env-file; S3's keys and Ray's token lie beside it.

    Compose mounts passwords and keys as they are: those that root makes belong to the user of the containers.
    """
    write_private(site.ray_token, site.credentials.ray)
    path = site.secrets / "containers.env"
    user = os.getuid() or USER
    if os.getuid() == 0:
        for mounted in (site.settings.passwords, site.s3_credentials):
            os.chown(mounted, user, user)
    here = {"PPOFLOW_SECRETS": site.secrets, "PPOFLOW_PASSWORDS": site.settings.passwords, "PPOFLOW_UID": user}
    lines = [f"{name}={value}" for name, value in {**container_variables(site.credentials), **here}.items()]
    write_private(path, "\n".join(lines) + "\n")
    return path
