"""The whole stack as it is: started, looked at from outside, and ended. Ceph and PostgreSQL where they are installed,
else an S3 endpoint of the user's own and sqlite."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from pathlib import Path

import psutil
import pytest

from infra.deploy.stack.credentials import ADMIN, Credentials, load_credentials
from infra.deploy.stack.orphans import MARK
from infra.deploy.stack.plan import missing_packages, open_site
from infra.deploy.stack.probes import ask
from infra.deploy.stack.ray_head import is_alive
from infra.deploy.stack.site import SERVERS
from infra.deploy.stack.supervisor import Supervisor
from infra.settings import StackSettings
from tests.infra.programs import ROOT
from tests.infra.stack.stack_sites import stack_folder, stack_settings
from tests.infra.storage.s3.s3_server import FOREIGN, S3Server
from tests.processes import command_line, runs
from tests.waiting import until

pytestmark = pytest.mark.thorough
CEPH = {"ceph-mon", "ceph-osd", "s3"}
RAY_LOGS = {".log", ".out", ".err"}
CLIENT = """
from infra.mlflow.client import open_client
from infra.settings import Settings
from tasks.prefect.server import prefect_api
client = open_client(Settings().tracking_uri)
run = client.create_run(client.create_experiment("stack"))
client.log_text(run.info.run_id, "kept", "note.txt")
client.create_registered_model("policy")
version = client.create_model_version("policy", source="s3://ppoflow/store/checkpoints/abc")
with prefect_api():
    print(client.list_artifacts(run.info.run_id)[0].path, version.source)
"""
REFUSED = """
from tasks.prefect.server import prefect_api
try:
    with prefect_api():
        print("let in")
except Exception as error:
    print(type(error).__name__, error)
"""


@dataclass(frozen=True)
class Stack:
    """A stack that is up: its settings, its passwords and what a user's shell gets."""

    settings: StackSettings
    environment: dict[str, str]
    clients: dict[str, str]
    servers: set[str]
    said: str

    @property
    def passwords(self) -> Credentials:
        return load_credentials(self.settings.passwords)

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        return run([sys.executable, "-m", "infra.deploy.stack", *words], self.environment)

    def client(self, program: str, **changed: str) -> str:
        return run([sys.executable, "-c", program], {**self.environment, **self.clients, **changed}).stdout.strip()

    def pids(self) -> dict[str, int]:
        """The main process of each server; 0 where none runs."""
        found = Supervisor(open_site(self.settings, frozenset(self.servers))).servers()
        return {name: server.pid for name, server in found.items()}

    def processes(self) -> list[psutil.Process]:
        """All that the stack has started, found by its mark and by the trees below."""
        found: dict[int, psutil.Process] = {}
        for process in psutil.process_iter():
            try:
                marked = process.environ().get(MARK, "").startswith(self.passwords.stack)
                below = process.children(recursive=True) if marked else []
            except psutil.Error:
                continue
            found |= {one.pid: one for one in (process, *below) if marked}
        return list(found.values())


def run(command: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1200, check=False)


@pytest.fixture(scope="module")
def stack(s3_server: S3Server) -> Iterator[Stack]:
    folder = stack_folder()
    installed = {name for name in SERVERS if not missing_packages(name)}
    servers = installed if installed >= CEPH else installed - CEPH
    own = {} if installed >= CEPH else {"s3": s3_server.uri}
    settings = stack_settings(folder, **own)
    named = {f"PPOFLOW_STACK_{name.upper()}": str(value) for name, value in settings if "port" in name}
    named = {name: value for name, value in named.items() if value != "None"} | {
        f"PPOFLOW_STACK_{name.upper()}": value
        for name, value in {"folder": str(folder), "ray_nodes": json.dumps([{"training": 1}]), **own}.items()
    }
    inherited = {name: value for name, value in os.environ.items() if name not in FOREIGN}
    environment = {**inherited, **s3_server.environment(), **named, "PPOFLOW_HOME": str(folder / "home")}
    command = [sys.executable, "-m", "infra.deploy.stack"]
    try:
        up = run([*command, "up", "--only", ",".join(sorted(servers))], environment)
        assert up.returncode == 0, up.stdout + up.stderr
        lines = [shlex.split(line) for line in run([*command, "env"], environment).stdout.splitlines()]
        clients = dict(word.split("=", 1) for verb, word, *_ in lines if verb == "export")
        yield Stack(settings, environment, clients, servers, up.stdout + up.stderr)
    finally:
        run([*command, "down"], environment)
        shutil.rmtree(folder, ignore_errors=True)


def test_all_are_healthy_and_a_second_start_changes_nothing(stack: Stack):
    before = stack.pids()
    assert set(before) == {*stack.servers, "ray-1", "orphan_processes"}
    again = stack.command("up", "--only", ",".join(sorted(stack.servers)))
    assert again.returncode == 0, again.stderr
    assert stack.pids() == before
    assert stack.command("status").returncode == 0


def test_every_socket_is_on_loopback(stack: Stack):
    listening = []
    for process in stack.processes():
        try:
            name, sockets = process.name(), process.net_connections(kind="inet")
        except psutil.NoSuchProcess:
            continue
        listening += [(name, one.laddr) for one in sockets if one.status == psutil.CONN_LISTEN]
    assert len(listening) >= len(stack.servers & {"prefect", "mlflow", "ray"})
    assert [found for found in listening if not is_loopback(found[1].ip)] == []


def is_loopback(address: str) -> bool:
    found = ip_address(address)
    mapped = found.ipv4_mapped if isinstance(found, IPv6Address) else None
    return (mapped or found).is_loopback


def test_without_a_login_there_is_no_answer(stack: Stack):
    prefect, mlflow = stack.clients["PREFECT_API_URL"], stack.clients["MLFLOW_TRACKING_URI"]
    asked = {f"{prefect}/admin/version": stack.passwords.prefect}
    asked[f"{mlflow}/api/2.0/mlflow/experiments/search?max_results=1"] = stack.passwords.mlflow
    for url, password in asked.items():
        assert [ask(url)[0], ask(url, login=f"{ADMIN}:x")[0], ask(url, login=f"{ADMIN}:{password}")[0]] == [
            401,
            401,
            200,
        ]
    tokens = (stack.passwords.ray, "x" * 48, "")
    assert [is_alive(stack.clients["RAY_ADDRESS"], token) for token in tokens] == [True, False, False]


def test_our_clients_come_in_with_what_env_prints_and_say_so_when_they_do_not(stack: Stack):
    assert stack.client(CLIENT) == "note.txt s3://ppoflow/store/checkpoints/abc"
    commands = (["prefect", "work-pool", "ls"], ["mlflow", "experiments", "search"])
    for words in commands:
        done = run([sys.executable, "-m", *words], {**stack.environment, **stack.clients})
        assert done.returncode == 0, done.stderr
        assert {"gpu", "stack"} & set(done.stdout.split()), done.stdout
    said = stack.client(REFUSED, PREFECT_API_AUTH_STRING="admin:wrong")
    assert "PrefectServerError" in said
    assert "refuses us (401): put its login" in said
    assert "admin:wrong" not in said


def test_no_password_is_in_a_process_list_or_a_log(stack: Stack):
    secrets = list(stack.passwords.model_dump(exclude={"stack"}).values())
    shown = "\n".join(" ".join(command_line(process)) for process in stack.processes())
    logs = list((stack.settings.folder / "logs").iterdir())
    ray = [path for path in (stack.settings.folder / "ray").rglob("*.*") if path.suffix in RAY_LOGS and path.is_file()]
    assert {path.suffix for path in ray} == RAY_LOGS
    assert "supervisord" in shown
    assert {path.stem for path in logs} == {*stack.servers, "ray-1", "orphan_processes", "supervisord"}
    texts = [shown, stack.said, *(path.read_text(errors="replace") for path in (*logs, *ray))]
    assert [secret[:4] for secret in secrets if any(secret in text for text in texts)] == []


@pytest.mark.parametrize("name", ["mlflow", "prefect", "ray-1"])
def test_one_that_is_killed_comes_back_and_is_healthy(stack: Stack, name: str):
    before = stack.pids()
    os.kill(before[name], signal.SIGKILL)
    until(lambda: stack.pids()[name] not in (0, before[name]))
    until(lambda: stack.command("status").returncode == 0)
    assert {**before, name: 0} == {**stack.pids(), name: 0}


def test_down_leaves_no_process(stack: Stack):
    processes = stack.processes()
    assert len(processes) >= len(stack.servers)
    assert stack.command("down").returncode == 0
    assert [process for process in processes if process.is_running() and runs(process.pid)] == []
    assert stack.processes() == []
    assert stack.command("status").returncode == 1
    assert not list(Path(stack.settings.folder / "run").iterdir())
