"""The summary at the end of a run: where everything is, and how to go on."""

from __future__ import annotations

import shlex
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Protocol

from infra.backend import open_records
from infra.mlflow.client import is_server, without_password
from infra.mlflow.registry import Registered
from infra.mlflow.run import LOCAL_PAGE, find_page, front_page
from infra.ports import LOOPBACK, free_port
from infra.prefect_server import DEFAULT_PORT
from infra.runs.records import RecordError
from infra.runs.tracked_as import tracking_id
from infra.settings import Settings
from infra.storage.objects import StoreUnavailable
from infra.storage.outage import at_once
from tasks.prefect.server import page_url

MLFLOW_PORT = 5000


class Report(Protocol):
    """What a finished run leaves."""

    @property
    def run(self) -> str: ...
    @property
    def iterations(self) -> int: ...
    @property
    def best(self) -> str: ...
    @property
    def policy(self) -> Registered | None: ...
    @property
    def policy_folder(self) -> Path: ...


def run_summary(report: Report, longer: str) -> str:
    """Where to look after a finished run; `longer` is the command that makes it a longer one.

    Which model to take, and how good it is, comes last, where people look first.
    """
    ask = shlex.join(["ppoflow", "sample", report.run])
    return "\n".join(
        [
            f"run {report.run}: {report.iterations} iterations done",
            *places(report.run, report.policy_folder),
            f'  ask it             {ask} "PROMPT"',
            f"  continue           {longer}",
            *([f"  registered model   models:/{report.policy.name}/{report.policy.version}"] if report.policy else []),
            f"  {report.best}",
        ]
    )


def interrupted(run: str, again: str) -> str:
    """Where to look, and how to go on, after Ctrl-C."""
    folder = Settings().best_policy_folder(run)
    lines = places(run, folder) if folder.is_dir() else [f"  {committed_so_far(run)}"]
    return "\n".join([f"run {run}: interrupted; finished work is kept", *lines, f"  continue           {again}"])


def committed_so_far(run: str) -> str:
    """Whether a run that has no folder here has begun all the same, by the records in its store."""
    settings = Settings()
    try:
        with at_once():  # whoever has interrupted a run does not wait for a store
            last = open_records(settings.store_root, run).last()
    except (RecordError, StoreUnavailable) as error:
        return str(error)
    if last is None:
        return "no iteration was committed yet"
    return f"iteration {last} is the last that is committed, in {settings.store_root}; no policy on this machine"


def places(run: str, policy: Path) -> list[str]:
    """The lines that open the run's pages and serve the policy, as they can be pasted."""
    settings = Settings()
    programs = Path(sys.executable).parent
    prefect = ["env", f"PREFECT_HOME={settings.prefect_home}", str(programs / "prefect"), "server", "start"]
    prefect += at_port(DEFAULT_PORT)
    return [
        f"  policy folder      {policy}",
        f"  serve it           {serving(policy, programs)}",
        f"  Prefect's page     {page_url() or shlex.join(prefect)}",
        *mlflow_page(run, settings.tracking_uri, programs),
    ]


def mlflow_page(run: str, tracking: str, programs: Path) -> list[str]:
    """The address of the run in MLflow; before it, for a database, the command that shows it there."""
    page = page_of(run, tracking) or front_page(tracking)
    if is_server(tracking):
        return [f"  MLflow's page      {page}"]
    command = [str(programs / "mlflow"), "ui", "--backend-store-uri", without_password(tracking), *at_port(MLFLOW_PORT)]
    page = page.replace(LOCAL_PAGE, f"http://{LOOPBACK}:{free_port(MLFLOW_PORT)}")
    return [f"  MLflow's page      {shlex.join(command)}", f"                     then open {page}"]


def page_of(run: str, tracking: str) -> str | None:
    """The run's page; None where there is none, or its id, which tells it from others of its name, cannot be read."""
    try:
        with at_once():
            key = tracking_id(open_records(Settings().store_root, run))
    except (RecordError, StoreUnavailable):
        return None
    return find_page(tracking, run, key)


def at_port(usual: int) -> list[str]:
    """The option for a server whose usual port is taken now."""
    port = free_port(usual)
    return [] if port == usual else ["--port", str(port)]


def serving(policy: Path, programs: Path) -> str:
    """The command that serves the policy. vLLM's CPU build comes under another name, which its own command does not
    know; its server does."""
    try:
        version("vllm")
    except PackageNotFoundError:
        server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(policy)]
        return f"{shlex.join(server)}   (with CUDA: vllm serve {shlex.quote(str(policy))})"
    return shlex.join([str(programs / "vllm"), "serve", str(policy)])
