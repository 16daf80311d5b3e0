"""PostgreSQL on loopback, with a password for every connection."""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import shutil
import signal
import subprocess
from pathlib import Path

from infra.deploy.stack.credentials import write_private
from infra.deploy.stack.service import Port, Service, StackError
from infra.deploy.stack.site import DATABASE_USER, LOOPBACK, Site, program
from infra.settings import child_environment

INITDB_TIMEOUT_S = 120.0


def postgres(site: Site) -> Service:
    """The server that Prefect and MLflow keep their tables in. Root runs it as another user, as it demands."""
    data = site.folder("postgres") / "data"
    port = site.settings.postgres_port
    # No socket in /tmp for everyone to try: clients come over loopback.
    options = {"listen_addresses": LOOPBACK, "port": port, "unix_socket_directories": "", "shared_buffers": "64MB"}
    return Service(
        name="postgres",
        address=f"{LOOPBACK}:{port}",
        ports=[Port(LOOPBACK, port, "POSTGRES_PORT")],
        command=[
            program("postgres") or "postgres",
            *("-D", str(data)),
            *(part for name, value in options.items() for part in ("-c", f"{name}={value}")),
        ],
        folder=site.folder("postgres"),
        user=user_of(site),
        prepare=lambda: _create_cluster(site, data),
        healthy=lambda: reason_unreachable(site) is None,
        stop_signal=signal.SIGINT,  # "fast shutdown": does not wait for clients to leave
    )


def user_of(site: Site) -> str:
    """Who runs PostgreSQL, where that is not us."""
    return site.settings.postgres_user if os.geteuid() == 0 else ""


def reason_unreachable(site: Site) -> str | None:
    """Why no connection to PostgreSQL is made; None when one is."""
    import psycopg2

    try:
        psycopg2.connect(**_connection(site, "postgres")).close()
    except psycopg2.OperationalError as error:
        return str(error).strip().splitlines()[0]
    except psycopg2.ProgrammingError:  # it quotes the address, with a password
        return "no address that PostgreSQL's client can read"
    return None


def create_database(site: Site, name: str) -> None:
    """Have a database of this name; a folder for a file of that name where there is no PostgreSQL."""
    if site.database_server is None:
        site.folder(name).mkdir(parents=True, exist_ok=True)
        return
    import psycopg2

    # Not `with`: that would open a transaction, in which no database can be created.
    connection = psycopg2.connect(**_connection(site, "postgres"))
    try:
        connection.autocommit = True
        with connection.cursor() as cursor, contextlib.suppress(psycopg2.errors.DuplicateDatabase):
            cursor.execute(f'CREATE DATABASE "{name}"')
    except psycopg2.errors.InsufficientPrivilege:
        raise StackError(f"PostgreSQL's user may not create the database {name!r}: create it, or allow it") from None
    finally:
        connection.close()


def write_password_file(site: Site) -> None:
    """PostgreSQL's own form: host:port:database:user:password."""
    login = f"{LOOPBACK}:{site.settings.postgres_port}:*:{DATABASE_USER}:{site.credentials.postgres}\n"
    write_private(site.password_file, login)


def _connection(site: Site, database: str) -> dict[str, str | int]:
    own = {} if site.settings.postgres else {"passfile": str(site.password_file)}
    return {"dsn": f"{site.database_server}/{database}", "connect_timeout": 3, **own}


def _create_cluster(site: Site, data: Path) -> None:
    """initdb, beside and then renamed, so that one which was killed half-way counts for nothing."""
    if data.exists():
        return
    folder, user = data.parent, user_of(site)
    beside, password = folder / "data.new", folder / "password"
    shutil.rmtree(beside, ignore_errors=True)
    password.unlink(missing_ok=True)
    write_private(password, site.credentials.postgres)
    if user:
        for path in (folder, password):
            shutil.chown(path, user, pwd.getpwnam(user).pw_gid)
    login = ["--username", DATABASE_USER, "--auth", "scram-sha-256", "--pwfile", str(password)]
    done = subprocess.run(
        [program("initdb") or "initdb", "-D", str(beside), *login, "--encoding", "UTF8", "--locale", "C.UTF-8"],
        user=user or None,
        group=pwd.getpwnam(user).pw_gid if user else None,
        extra_groups=[] if user else None,
        env=child_environment({}, without=site.hidden()),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=INITDB_TIMEOUT_S,
        check=False,
    )
    password.unlink()
    if done.returncode:
        said = re.sub(r"\s+", " ", done.stderr).strip()[-500:]
        raise StackError(f"initdb for {data} ended with exit code {done.returncode}: {said}")
    beside.rename(data)
