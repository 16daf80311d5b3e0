"""`python -m infra.deploy.stack up | down | status | env`."""

from __future__ import annotations

import fcntl
import json
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Event
from typing import Annotated

import typer
from pydantic import ValidationError

from infra.deploy.stack.bring_up import Servers, State
from infra.deploy.stack.containers import write_container_files
from infra.deploy.stack.plan import (
    choose,
    missing_packages,
    open_site,
    require_free_ports,
    require_own_servers,
    require_programs,
    require_reach,
    services,
)
from infra.deploy.stack.service import StackError
from infra.deploy.stack.site import SERVERS, Site
from infra.deploy.stack.supervisor import Supervisor
from infra.deploy.stack.supervisor_config import configuration_path
from infra.settings import StackSettings, reach_directly

WATCH_S = 1.0

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
Only = Annotated[str, typer.Option(help=f"Start these alone, separated by commas: {', '.join(SERVERS)}.")]


Wait = Annotated[bool, typer.Option(help="Stay until a signal comes or one of them ends for good, then end them all.")]


@app.command()
def up(only: Only = "", wait: Wait = False) -> None:
    """Start the servers in the background and return when all are healthy; those that run already stay."""
    began = time.monotonic()
    settings = _settings()
    chosen = choose(settings, [name for name in only.split(",") if name])
    require_programs(chosen)
    supervisor = Supervisor(open_site(settings, frozenset(SERVERS)))
    with _locked(settings):
        # One that runs already is there for those that start now.
        site = open_site(settings, chosen | (supervisor.kept() & choose(settings)))
        require_reach(site)
        require_own_servers(site)
        require_free_ports(services(site), held=supervisor.ports())
        _remember(site)
        supervisor.configure(services(site))
        kept = supervisor.kept()
        require_free_ports([service for service in services(site) if service.name not in kept])
        supervisor.launch()
        servers = Servers(site, services(site), supervisor, say=lambda line: typer.echo(f"  {line}", err=True))
        try:
            servers.bring_up()
        finally:
            _show(servers.states())
    typer.echo(
        f"{len(site.servers)} servers are healthy after {time.monotonic() - began:.1f} s. For a shell that uses them:"
    )
    typer.echo(f'  eval "$({sys.executable} -m infra.deploy.stack env)"')
    if wait:
        watch(supervisor, site)


@app.command()
def down() -> None:
    """End every server, and whatever a start that was cut off has left."""
    settings = _settings()
    if not settings.folder.exists():
        typer.echo(f"there is no stack in {settings.folder}")
        return
    with _locked(settings):
        Supervisor(open_site(settings, frozenset(SERVERS))).end()
    typer.echo(f"the stack in {settings.folder} has ended; its data are still there")


@app.command()
def status() -> None:
    """Show how the servers are; exit code 1 where one of those that were started is not healthy."""
    site = _remembered(_settings())
    states = Servers(site, services(site), Supervisor(site)).states()
    _show(states)
    typer.echo(f"{sys.executable} -m supervisor.supervisorctl -c {shlex.quote(str(configuration_path(site)))} status")
    if not all(state.healthy for state in states):
        raise typer.Exit(1)


@app.command()
def env() -> None:
    """Print what a shell needs to use the stack, passwords in files: eval "$(python -m infra.deploy.stack env)"."""
    site = _remembered(_settings())
    if outranking := site.outranking():
        typer.echo(f"unset {' '.join(outranking)}")
    for name, value in site.client_environment().items():
        typer.echo(f"export {name}={shlex.quote(value)}")


@app.command()
def containers() -> None:
    """Make the passwords for compose.yaml and kubernetes/ of infra/deploy, and print the path of their file."""
    typer.echo(write_container_files(open_site(_settings(), frozenset(SERVERS))))


@app.command()
def packages() -> None:
    """Print the Debian packages that are missing here."""
    typer.echo(" ".join(sorted({package for name in choose(_settings()) for package in missing_packages(name)})))


def _settings() -> StackSettings:
    """The settings. This process and what it starts ask the stack from now on past a proxy of the environment."""
    try:
        settings = StackSettings()
    except ValidationError as error:
        said = "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors())
        raise StackError(f"the settings PPOFLOW_STACK_… do not hold: {said}") from None
    except ValueError as error:  # of pydantic-settings, which reads JSON before it looks at anything
        example = """PPOFLOW_STACK_RAY_NODES='[{"rollout": 1}]'"""
        said = f"{error}: {error.__cause__}"
        raise StackError(f"the settings PPOFLOW_STACK_… do not hold: {said}: write JSON, as in {example}") from None
    reach_directly(str(settings.host))
    return settings


@contextmanager
def _locked(settings: StackSettings) -> Iterator[None]:
    """One start or end at a time; the lock goes with the process that holds it."""
    settings.folder.mkdir(parents=True, exist_ok=True)
    with (settings.folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StackError(f"another command starts or ends the stack in {settings.folder}: wait for it") from None
        yield


def watch(supervisor: Supervisor, site: Site) -> None:
    """For containers, whose main process we are."""
    asked = Event()
    before = {number: signal.signal(number, lambda *_: asked.set()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        while not asked.wait(WATCH_S):
            if ended := sorted(site.servers - supervisor.kept()):
                raise StackError(f"{', '.join(ended)} ended for good: its log says why; the others were ended too")
    finally:
        supervisor.end()
        for number, handler in before.items():
            signal.signal(number, handler)


def _remember(site: Site) -> None:
    (site.settings.folder / "servers.json").write_text(json.dumps(sorted(site.servers)))


def _remembered(settings: StackSettings) -> Site:
    path = settings.folder / "servers.json"
    if not path.exists():
        raise StackError(f"there is no stack in {settings.folder}: start it with `make stack`")
    return open_site(settings, frozenset(json.loads(path.read_text())))


def _show(states: Sequence[State]) -> None:
    rows = [("server", "address", "health", "log"), *((one.name, one.address, one.health, one.log) for one in states)]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        typer.echo("  ".join([*(text.ljust(width) for text, width in zip(row, widths, strict=False)), row[3]]))


def main() -> None:
    """The command; a mistake of the user's is a line on stderr and exit code 1."""
    try:
        app()
    except StackError as error:
        print(error, file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
