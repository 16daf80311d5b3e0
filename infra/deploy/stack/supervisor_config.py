"""The configuration of supervisord: a program for each server, and a Unix socket of our own to control them."""

from __future__ import annotations

import math
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from infra.deploy.stack.orphans import MARK
from infra.deploy.stack.service import Service, StackError
from infra.deploy.stack.site import SERVERS, Site

SUPERVISORD = "supervisord"
ORPHANS = Path(__file__).with_name("orphan_processes.py")
# supervisord binds this name with its process id behind it, and then renames that.
SOCKET = "supervisor.sock"
SOCKET_CHARACTERS = len(f"/{SOCKET}.{2**22}")
# A value ends where what looks like a comment begins.
UNWRITABLE = re.compile(r"[\r\n]|\s[;#]")


def socket_path(site: Site) -> Path:
    """Where supervisord takes orders."""
    return site.short_folder("run", SOCKET_CHARACTERS) / SOCKET


def configuration_path(site: Site) -> Path:
    """For supervisord and supervisorctl; as private as the passwords that it hands to servers."""
    return site.settings.folder / "supervisord.conf"


def log_path(site: Site, name: str) -> Path:
    """What a server, or supervisord itself, writes."""
    return site.settings.folder / "logs" / f"{name}.log"


def mark(site: Site, name: str) -> dict[str, str]:
    """The variable by which a process of this stack is known."""
    return {MARK: f"{site.credentials.stack}.{name}"}


def own_sections(site: Site) -> str:
    """What concerns supervisord itself, which it reads only when it starts."""
    folder, socket = site.settings.folder, str(socket_path(site))
    about_itself = {
        "logfile": str(log_path(site, SUPERVISORD)),
        "logfile_maxbytes": "5MB",
        "logfile_backups": "2",
        "pidfile": str(folder / "run/supervisord.pid"),
        "directory": str(folder),
        "umask": "077",
    }
    orphans = {
        "command": shlex.join([sys.executable, "-I", "-S", str(ORPHANS), f"{MARK}={site.credentials.stack}."]),
        "environment": _environment(mark(site, ORPHANS.stem)),
        "events": "PROCESS_STATE_BACKOFF,PROCESS_STATE_EXITED,PROCESS_STATE_STOPPED",
        "autorestart": "true",
        "stderr_logfile": _escape(str(log_path(site, ORPHANS.stem))),
    }
    rpc = {"supervisor.rpcinterface_factory": "supervisor.rpcinterface:make_main_rpcinterface"}
    return "".join(
        [
            f"; Of the shell's variables, those that begin with {', '.join(site.hidden())} are not handed on.\n",
            _section("unix_http_server", {"file": socket, "chmod": "0700"}),
            _section("supervisorctl", {"serverurl": f"unix://{socket}"}),
            _section("rpcinterface:supervisor", rpc),
            _section(SUPERVISORD, about_itself),
            _section(f"eventlistener:{ORPHANS.stem}", orphans),
        ]
    )


def program_section(site: Site, service: Service) -> str:
    """One server. It starts when we say so, once what it needs is healthy, and again whenever it ends by itself."""
    options = {
        "command": shlex.join(service.command),
        "directory": str(service.folder),
        "environment": _environment({**service.environment, **mark(site, service.name)}),
        **({"user": service.user} if service.user else {}),
        # The last ones end first.
        "priority": str(SERVERS.index(service.name) if service.name in SERVERS else len(SERVERS)),
        "autostart": "false",
        "autorestart": "true",
        "startretries": "20",
        "stopsignal": service.stop_signal.name.removeprefix("SIG"),
        "stopwaitsecs": str(math.ceil(service.grace_s)),
        "killasgroup": "true",
        "redirect_stderr": "true",
        "stdout_logfile": _escape(str(log_path(site, service.name))),  # it reads percent signs of this one twice
        "stdout_logfile_maxbytes": "20MB",
        "stdout_logfile_backups": "3",
    }
    return _section(f"program:{service.name}", options)


def _section(name: str, options: Mapping[str, str]) -> str:
    for option, value in options.items():
        if UNWRITABLE.search(value):
            raise StackError(
                f"supervisord cannot read a line break, ' ;' or ' #' in a value, and {option} of [{name}] has one: "
                "choose other paths and passwords (PPOFLOW_STACK_FOLDER, PPOFLOW_STACK_POSTGRES)"
            )
    return "\n".join([f"[{name}]", *(f"{option}={_escape(value)}" for option, value in options.items()), "\n"])


def _escape(value: str) -> str:
    return value.replace("%", "%%")


def _environment(variables: Mapping[str, str]) -> str:
    """It knows no escapes: a value with one kind of quotes stands in the other one."""
    if both := [name for name, value in variables.items() if {'"', "'"} <= set(value)]:
        raise StackError(f"supervisord cannot read a value with both kinds of quotes, as in {both}: choose another one")
    quoted = {name: f"'{value}'" if '"' in value else f'"{value}"' for name, value in variables.items()}
    return ",".join(f"{name}={value}" for name, value in sorted(quoted.items()))
