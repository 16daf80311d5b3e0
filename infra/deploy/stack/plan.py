"""Which servers the stack has, and whether this machine can run them: asked before anything starts."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Collection, Sequence, Set
from importlib.util import find_spec

from infra.deploy.stack import ceph, mlflow_server, postgres, prefect_servers, ray_head
from infra.deploy.stack.buckets import create_buckets, write_keys
from infra.deploy.stack.credentials import load_credentials
from infra.deploy.stack.logins import write_logins
from infra.deploy.stack.service import Service, StackError
from infra.deploy.stack.site import SERVERS, Site, program
from infra.ports import is_free
from infra.settings import StackSettings

MAKERS: dict[str, Callable[[Site], Service]] = {
    "postgres": postgres.postgres,
    "ceph-mon": ceph.monitor,
    "ceph-osd": ceph.disk,
    "s3": ceph.gateway,
    "prefect": prefect_servers.server,
    "mlflow": mlflow_server.mlflow_server,
    "worker": prefect_servers.worker,
    "ray": ray_head.ray_head,
}
CEPH = ("ceph-mon", "ceph-osd", "s3")
# What each needs: programs of Debian's packages, and modules of ppoflow's dependencies.
PROGRAMS = {
    "postgres": {"postgres": "postgresql", "initdb": "postgresql"},
    "ceph-mon": {
        "ceph-mon": "ceph-mon",
        "monmaptool": "ceph-common",
        "ceph-authtool": "ceph-common",
        "ceph": "ceph-common",
    },
    "ceph-osd": {"ceph-osd": "ceph-osd"},
    "s3": {"radosgw": "radosgw", "radosgw-admin": "radosgw"},
}
# Besides supervisord, which runs them all.
MODULES = {"postgres": ("psycopg2",), "mlflow": ("flask_wtf",), "ray": ("ray", "grpc")}
INSTEAD = {
    "postgres": "name your own server in PPOFLOW_STACK_POSTGRES=postgresql://user@host:port",
    "s3": "name your own S3 endpoint in PPOFLOW_STACK_S3=http://host:port",
}


def choose(settings: StackSettings, only: Collection[str] = ()) -> frozenset[str]:
    """The names of the servers to start: all, or those of `only`; never those that the user has already."""
    if unknown := sorted(set(only) - set(SERVERS)):
        raise StackError(f"no such server: {', '.join(unknown)}: choose from {', '.join(SERVERS)}")
    chosen = set(only) or set(SERVERS)
    chosen |= set(CEPH) if chosen & set(CEPH) else set()
    own = {*(CEPH if settings.s3 else ()), *(("postgres",) if settings.postgres else ())}
    if refused := sorted(own & set(only)):
        raise StackError(f"{', '.join(refused)}: your settings name your own: leave it out of --only, or unset them")
    return frozenset(chosen - own)


def open_site(settings: StackSettings, servers: frozenset[str]) -> Site:
    """Folders and passwords, made where they are missing."""
    settings.folder.mkdir(parents=True, exist_ok=True)
    # Root's PostgreSQL is another user, who must pass through to its own folder.
    settings.folder.chmod(0o711 if os.geteuid() == 0 else 0o700)
    for name in ("secrets", "run", "logs"):
        (settings.folder / name).mkdir(exist_ok=True)
        (settings.folder / name).chmod(0o700)
    site = Site(settings, load_credentials(settings.passwords), servers)
    postgres.write_password_file(site)
    write_keys(site)
    write_logins(site)
    return site


def services(site: Site) -> list[Service]:
    """The servers of a site, in an order in which each comes after what it needs."""
    found = [make(site) for name, make in MAKERS.items() if name in site.servers]
    return [*found, *(ray_head.ray_nodes(site) if "ray" in site.servers else ())]


def require_programs(servers: Collection[str]) -> None:
    """StackError where a program or a package of Python is missing; it names all of them."""
    missing = {name: packages for name in servers if (packages := missing_packages(name))}
    lines = []
    if debian := sorted({package for packages in missing.values() for package in packages}):
        lines.append(f"install Debian's packages: apt-get install --no-install-recommends {' '.join(debian)}")
        lines += [
            f"or {INSTEAD[name]}" for name in INSTEAD if name in missing or (name == "s3" and missing.keys() & CEPH)
        ]
    if modules := sorted(
        {module for name in servers for module in ("supervisor", *MODULES.get(name, ())) if find_spec(module) is None}
    ):
        lines.append(f"install ppoflow's pinned packages (make install): Python finds no {', '.join(modules)}")
    if lines:
        wanting = ", ".join(sorted(missing) or sorted(servers))
        raise StackError("\n  ".join([f"this machine lacks programs for {wanting}:", *lines]))


def missing_packages(server: str) -> list[str]:
    """The Debian packages that this server needs and this machine has not."""
    return sorted({package for name, package in PROGRAMS.get(server, {}).items() if program(name) is None})


def require_free_ports(starting: Sequence[Service], *, held: Set[tuple[str, int]] | None = frozenset()) -> None:
    """StackError where two servers want a port, or another program has it and it is not `held` by one of our own.

    None: nobody looks after our own servers now, so that they may hold any; they end before others start.
    """
    wanted: dict[int, str] = {}
    for service in starting:
        for port in service.ports:
            if (other := wanted.setdefault(port.number, service.name)) != service.name:
                raise StackError(
                    f"{other} and {service.name} cannot both listen on port {port.number}: choose another one with "
                    f"PPOFLOW_STACK_{port.setting}"
                )
    if held is None:
        return
    taken = [
        f"{service.name} cannot listen on {port.host}:{port.number}, another program does: end that, or choose another "
        f"port with PPOFLOW_STACK_{port.setting}"
        for service in starting
        for port in service.ports
        if held.isdisjoint((host, port.number) for host in (port.host, "0.0.0.0", "::"))
        and not is_free(port.number, port.host)
    ]
    if taken:
        raise StackError("\n".join(taken))


def require_own_servers(site: Site) -> None:
    """StackError where the user's own PostgreSQL or S3 does not take us."""
    if site.settings.postgres and (why := postgres.reason_unreachable(site)):
        raise StackError(f"PPOFLOW_STACK_POSTGRES: {why}: check the address, and the password in PGPASSFILE")
    if site.settings.s3:
        create_buckets(site)


def require_reach(site: Site) -> None:
    """StackError where PostgreSQL's user would not get through to its folder."""
    user = postgres.user_of(site)
    if "postgres" not in site.servers or not user:
        return
    try:
        done = subprocess.run(["test", "-x", site.settings.folder], user=user, group=user, extra_groups=[], check=False)
    except (LookupError, PermissionError) as error:
        raise StackError(f"PostgreSQL cannot run as {user!r} ({error}): choose PPOFLOW_STACK_POSTGRES_USER") from None
    if done.returncode:
        raise StackError(
            f"PostgreSQL, which runs as {user!r}, cannot get to {site.settings.folder}: start the stack as another "
            "user than root, or choose a folder that others may pass through with PPOFLOW_STACK_FOLDER=/var/lib/ppoflow"
        )
