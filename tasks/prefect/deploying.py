"""Deploying what a prefect.yaml names, to the configured server."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from infra.settings import child_environment
from ppo_core.records import InputError


def deploy_all(file: Path, pool: str | None, url: str) -> int:
    """Prefect's own command deploys all of `file`, to `pool` if one is given; its exit status. `url` is of the API."""
    with for_pool(file, pool) as changed:
        command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all", "--prefect-file", str(changed)]
        return subprocess.run(command, env=child_environment({"PREFECT_API_URL": url}), check=False).returncode


@contextmanager
def for_pool(file: Path, pool: str | None) -> Iterator[Path]:
    """The file, or a copy for as long as this is open in which every deployment has this work pool.

    Prefect's command takes a pool for one deployment only. InputError where the file is no list of deployments.
    """
    if pool is None:
        yield file
        return
    try:
        document = yaml.safe_load(file.read_text(encoding="utf-8"))
        for deployment in document["deployments"]:
            deployment["work_pool"] = {**(deployment.get("work_pool") or {}), "name": pool}
    except (yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{file} has no list of `deployments`, each with a `work_pool: {{name: …}}` ({error}): correct it"
        ) from None
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / file.name
        copy.write_text(yaml.safe_dump(document, sort_keys=False, allow_unicode=True), encoding="utf-8")
        yield copy
