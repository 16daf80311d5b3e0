"""Deploying what a prefect.yaml names, to the configured server and to one work pool."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from infra.settings import child_environment


def deploy_all(file: Path, pool: str, url: str) -> int:
    """Have Prefect's own command deploy all of `file` to `pool`, by the API at `url`; its exit status."""
    with for_pool(file, pool) as changed:
        command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all", "--prefect-file", str(changed)]
        return subprocess.run(command, env=child_environment({"PREFECT_API_URL": url}), check=False).returncode


@contextmanager
def for_pool(file: Path, pool: str) -> Iterator[Path]:
    """The file, or a copy for as long as this is open in which every deployment has this work pool.

    Prefect's command takes a pool for one deployment only.
    """
    document: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    pools = [deployment.setdefault("work_pool", {}) for deployment in document.get("deployments") or []]
    if all(one.get("name") == pool for one in pools):
        yield file
        return
    for one in pools:
        one["name"] = pool
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / file.name
        copy.write_text(yaml.safe_dump(document, sort_keys=False, allow_unicode=True), encoding="utf-8")
        yield copy
