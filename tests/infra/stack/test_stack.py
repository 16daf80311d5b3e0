"""The stack's plan: addresses, passwords, and what is refused before anything starts."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import socket
import stat
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from infra.deploy.stack.__main__ import main
from infra.deploy.stack.credentials import ADMIN, load_credentials, write_private
from infra.deploy.stack.mlflow_server import auth_configuration
from infra.deploy.stack.plan import (
    choose,
    open_site,
    require_free_ports,
    require_own_servers,
    require_programs,
    services,
)
from infra.deploy.stack.service import StackError
from infra.deploy.stack.site import SERVERS, Site
from infra.mlflow.login import read_login
from infra.settings import StackSettings
from tests.infra.stack.stack_sites import site_in, stack_settings
from tests.ports import free_port

OUTSIDE = "192.0.2.7"
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return site_in(tmp_path / "stack")


def passwords(site: Site) -> list[str]:
    return list(site.credentials.model_dump(exclude={"stack"}).values())


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """`python -m infra.deploy.stack`, called: its exit code, what it said and what it complained of."""

    def call(*words: str, **environment: str) -> tuple[int, str, str]:
        capsys.readouterr()
        with monkeypatch.context() as changed:
            changed.setattr(sys, "argv", ["stack", *words])
            for name, value in environment.items():
                changed.setenv(name, value)
            with pytest.raises(SystemExit) as ended:
                main()
        return int(ended.value.code or 0), *capsys.readouterr()

    return call


def test_every_server_is_bound_to_loopback(site: Site):
    assert [service.name for service in services(site)] == list(SERVERS)
    for service in services(site):
        assert {port.host for port in service.ports} <= {"127.0.0.1"}
        assert "0.0.0.0" not in " ".join(service.command)


def test_no_password_is_on_a_command_line_or_in_an_address(site: Site):
    shown = " ".join(" ".join([*service.command, service.address]) for service in services(site))
    assert [password for password in passwords(site) if password in shown] == []
    urls = [value for service in services(site) for value in service.environment.values() if "://" in value]
    assert [url for url in urls if any(password in url for password in passwords(site))] == []


def test_another_address_is_for_what_clients_use_alone(tmp_path: Path):
    site = site_in(tmp_path / "stack", host=OUTSIDE)
    hosts = {service.name: {port.host for port in service.ports} for service in services(site) if service.ports}
    assert hosts == {
        "postgres": {"127.0.0.1"},
        "ceph-mon": {"127.0.0.1"},
        **{name: {OUTSIDE} for name in ("s3", "prefect", "mlflow", "ray")},
    }
    assert site.client_environment()["PREFECT_API_URL"].startswith(f"http://{OUTSIDE}:")
    assert "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER" not in site.client_environment()


def test_another_address_without_authentication_is_refused(tmp_path: Path, command: Command):
    with pytest.raises(ValidationError, match=rf"host={OUTSIDE}.*PPOFLOW_STACK_AUTHENTICATION on"):
        StackSettings(folder=tmp_path, host=OUTSIDE, authentication=False)
    with pytest.raises(ValidationError, match="give this machine's own"):
        StackSettings(folder=tmp_path, host="0.0.0.0")
    with pytest.raises(ValidationError, match=r"ray_nodes need host=127\.0\.0\.1"):
        StackSettings(folder=tmp_path, host=OUTSIDE, ray_nodes=[{"training": 1}])
    unsafe = {"PPOFLOW_STACK_HOST": OUTSIDE, "PPOFLOW_STACK_AUTHENTICATION": "0", "PPOFLOW_HOME": str(tmp_path)}
    code, _, complaint = command("up", **unsafe)
    assert (code, list(tmp_path.iterdir())) == (1, [])
    assert "authentication is off" in complaint


def test_authentication_is_on_by_default_and_can_be_off_on_loopback(site: Site, tmp_path: Path):
    by_name = {service.name: service for service in services(site)}
    assert "PREFECT_SERVER_API_AUTH_STRING" in by_name["prefect"].environment
    assert "basic-auth" in by_name["mlflow"].command
    assert by_name["ray"].environment["RAY_AUTH_MODE"] == "token"
    off = {service.name: service for service in services(site_in(tmp_path / "off", authentication=False))}
    assert "PREFECT_SERVER_API_AUTH_STRING" not in off["prefect"].environment
    assert "basic-auth" not in off["mlflow"].command
    assert off["ray"].environment["RAY_AUTH_MODE"] == "disabled"


def test_passwords_are_made_once_and_only_the_owner_reads_them(tmp_path: Path):
    settings = stack_settings(tmp_path / "stack")
    first, second = (open_site(settings, frozenset(SERVERS)) for _ in range(2))
    assert first.credentials == second.credentials
    assert len(set(passwords(first))) == len(passwords(first)) == 7
    files = [path for path in first.secrets.rglob("*") if path.is_file()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert stat.S_IMODE(first.secrets.stat().st_mode) == 0o700
    assert not [password for password in passwords(first) if password in repr(first)]


def test_passwords_that_others_can_read_or_that_are_damaged_are_refused(site: Site):
    path = site.secrets / "passwords.json"
    path.chmod(0o644)
    with pytest.raises(StackError, match="chmod 600"):
        load_credentials(path)
    path.chmod(0o600)
    path.write_text(json.dumps({"postgres": "a-secret-of-16-characters", "x": 1}))
    with pytest.raises(StackError, match="damaged") as refused:
        load_credentials(path)
    assert "a-secret" not in str(refused.value)


def test_missing_programs_are_named_with_their_packages_before_anything_starts(tmp_path: Path, command: Command):
    code, _, complaint = command("up", PATH=str(tmp_path / "empty"), PPOFLOW_STACK_FOLDER=str(tmp_path / "stack"))
    assert (code, (tmp_path / "stack").exists()) == (1, False)
    assert "apt-get install --no-install-recommends ceph-common ceph-mon ceph-osd" in complaint
    assert "PPOFLOW_STACK_S3=http://host:port" in complaint
    assert "radosgw" in command("packages", PATH=str(tmp_path / "empty"))[1].split()


def test_servers_of_the_users_own_need_no_programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    own = stack_settings(tmp_path, s3="http://127.0.0.1:9000", postgres="postgresql://me@127.0.0.1:5432")
    assert choose(own) == {"prefect", "mlflow", "worker", "ray"}
    monkeypatch.setenv("PATH", str(tmp_path))
    require_programs(choose(own))
    with pytest.raises(StackError, match="s3: your settings name your own"):
        choose(own, ["s3"])


def test_a_part_of_the_stack_can_be_chosen(tmp_path: Path):
    settings = stack_settings(tmp_path)
    assert choose(settings, ["s3", "ray"]) == {"ceph-mon", "ceph-osd", "s3", "ray"}
    with pytest.raises(StackError, match="no such server: redis: choose from postgres"):
        choose(settings, ["redis"])
    alone = open_site(settings, choose(settings, ["prefect", "mlflow"]))
    by_name = {service.name: service for service in services(alone)}
    assert by_name["prefect"].environment["PREFECT_SERVER_DATABASE_CONNECTION_URL"].startswith("sqlite+aiosqlite:////")
    assert by_name["mlflow"].environment["MLFLOW_BACKEND_STORE_URI"].startswith("sqlite:////")
    assert str(alone.folder("mlflow") / "artifacts") in by_name["mlflow"].command


def test_a_port_that_somebody_has_is_named_with_its_setting(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        site = site_in(tmp_path / "stack", prefect_port=taken.getsockname()[1])
        with pytest.raises(StackError, match=rf"prefect cannot listen on.*{site.settings.prefect_port}.*PREFECT_PORT"):
            require_free_ports(services(site))
        require_free_ports(services(site), held={("127.0.0.1", site.settings.prefect_port)})
        with pytest.raises(StackError, match="prefect cannot listen"):
            require_free_ports(services(site), held={("127.0.0.2", site.settings.prefect_port)})
        require_free_ports(services(site), held=None)


@pytest.mark.parametrize("login", ["me:pa%ss", "me:p@ss"])
def test_a_login_that_is_not_escaped_is_refused_and_not_shown(login: str, command: Command):
    code, _, complaint = command("packages", PPOFLOW_STACK_POSTGRES=f"postgresql://{login}@127.0.0.1:5432")
    assert (code, complaint.count("\n")) == (1, 1)
    assert "postgres: Value error, in a user's name and password write %25 for %, and %40 for @" in complaint
    assert "ss@" not in complaint


@pytest.mark.parametrize(("name", "value"), [("ray_nodes", "[{rollout: 1}]"), ("ray_resources", "rollout=2")])
def test_json_that_is_none_is_a_line(name: str, value: str, command: Command):
    code, _, complaint = command("packages", **{f"PPOFLOW_STACK_{name.upper()}": value})
    assert (code, complaint.count("\n")) == (1, 1)
    assert f'"{name}"' in complaint
    assert "line 1 column" in complaint
    assert complaint.endswith("""write JSON, as in PPOFLOW_STACK_RAY_NODES='[{"rollout": 1}]'\n""")


def test_what_root_writes_again_keeps_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "fchown", lambda _, user, group: given.append((user, group)))
    write_private(tmp_path / "keys", "one")
    assert given == []
    found = (tmp_path / "keys").stat()
    write_private(tmp_path / "keys", "two")
    assert given == [(found.st_uid, found.st_gid)]
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o600


def test_two_servers_get_no_port_together(tmp_path: Path):
    port = free_port()
    with pytest.raises(StackError, match=rf"prefect and mlflow cannot both listen on port {port}: .*MLFLOW_PORT"):
        require_free_ports(services(site_in(tmp_path, prefect_port=port, mlflow_port=port)), held=None)


def test_own_servers_that_do_not_answer_are_refused_before_anything_starts(tmp_path: Path):
    port = free_port()
    with pytest.raises(StackError, match=r"PPOFLOW_STACK_POSTGRES: .*refused"):
        require_own_servers(site_in(tmp_path / "a", postgres=f"postgresql://me@127.0.0.1:{port}"))
    with pytest.raises(StackError, match="PPOFLOW_STACK_S3"):
        require_own_servers(site_in(tmp_path / "b", s3=f"http://127.0.0.1:{port}"))


def test_env_prints_a_shell_that_uses_the_stack(site: Site, command: Command):
    (site.settings.folder / "servers.json").write_text(json.dumps(SERVERS))
    settings = {f"PPOFLOW_STACK_{name.upper()}": str(value) for name, value in site.settings if "port" in name}
    settings = {name: value for name, value in settings.items() if value != "None"}
    printed = command("env", PPOFLOW_STACK_FOLDER=str(site.settings.folder), **settings)[1].splitlines()
    words = [shlex.split(line) for line in printed]
    assert words[0][0] == "unset"
    assert {"AWS_SECRET_ACCESS_KEY", "PREFECT_API_AUTH_STRING", "MLFLOW_TRACKING_PASSWORD", "RAY_AUTH_TOKEN"} < set(
        words[0]
    )
    exported = dict(word.split("=", 1) for verb, word in words[1:] if verb == "export")
    assert exported == site.client_environment()
    assert exported["PPOFLOW_STORE"] == "s3://ppoflow/store"
    assert [password for password in passwords(site) if password in "\n".join(printed)] == []
    files = {name: Path(value) for name, value in exported.items() if value.startswith(str(site.secrets))}
    named = {
        "PREFECT_PROFILES_PATH",
        "PPOFLOW_MLFLOW_CREDENTIALS",
        "AWS_SHARED_CREDENTIALS_FILE",
        "RAY_AUTH_TOKEN_PATH",
    }
    assert set(files) == named
    holds = {name: path.read_text() for name, path in files.items() if path.exists()}  # Ray's comes with Ray
    assert {stat.S_IMODE(files[name].stat().st_mode) for name in holds} == {0o600}
    assert set(holds) >= named - {"RAY_AUTH_TOKEN_PATH"}
    assert tomllib.loads(holds["PREFECT_PROFILES_PATH"])["profiles"][exported["PREFECT_PROFILE"]] == {
        "PREFECT_API_URL": exported["PREFECT_API_URL"],
        "PREFECT_API_AUTH_STRING": site.login,
    }
    assert read_login(files["PPOFLOW_MLFLOW_CREDENTIALS"]) == (ADMIN, site.credentials.mlflow)


def test_no_password_is_in_the_environment_of_the_worker(site: Site):
    (worker,) = [service for service in services(site) if service.name == "worker"]
    assert [one for one in passwords(site) if one in str(worker.environment)] == []
    assert worker.environment["PREFECT_PROFILES_PATH"] == str(site.prefect_profiles)
    assert worker.environment["PREFECT_PROFILE"] == "ppoflow"


def test_what_does_not_exist_says_so(tmp_path: Path, command: Command):
    for word in ("status", "env"):
        code, _, complaint = command(word, PPOFLOW_STACK_FOLDER=str(tmp_path / "stack"))
        assert (code, "start it with `make stack`" in complaint) == (1, True)
    assert command("down", PPOFLOW_STACK_FOLDER=str(tmp_path / "stack"))[0] == 0


def test_one_command_starts_or_ends_the_stack_at_a_time(site: Site, command: Command):
    with (site.settings.folder / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        code, _, complaint = command("down", PPOFLOW_STACK_FOLDER=str(site.settings.folder))
    assert (code, "another command starts or ends the stack" in complaint) == (1, True)


def test_the_files_for_containers_are_private_and_hold_the_same_passwords(site: Site, command: Command):
    path = Path(command("containers", PPOFLOW_STACK_FOLDER=str(site.settings.folder))[1].strip())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    written = dict(line.split("=", 1) for line in path.read_text().splitlines())
    assert (written["PREFECT_LOGIN"], written["RAY_TOKEN"]) == (site.login, site.credentials.ray)
    assert site.ray_token.read_text() == site.credentials.ray


def test_mlflow_reads_an_address_with_a_percent_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    site = site_in(tmp_path / "50%", postgres="postgresql://user:p%40ss@db.example:5432")
    (tmp_path / "auth.ini").write_text(auth_configuration(site))
    monkeypatch.setenv("MLFLOW_AUTH_CONFIG_PATH", str(tmp_path / "auth.ini"))
    from mlflow.server.auth.config import read_auth_config

    assert read_auth_config().database_uri == site.database("mlflow", driver="psycopg2")
