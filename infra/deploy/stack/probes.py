"""Questions to a server over TCP and HTTP, asked until it is healthy; and to the kernel, which ports it has."""

from __future__ import annotations

import base64
import contextlib
import json
import socket
from http import HTTPStatus
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, Request, build_opener

import psutil

TIMEOUT_S = 5.0
MAPPED = "::ffff:"
"""So an address of IPv4 begins on a socket of IPv6, as Ray's are."""


def listens(host: str, port: int) -> bool:
    """Whether anything takes connections there."""
    try:
        with socket.create_connection((host, port), TIMEOUT_S):
            return True
    except OSError:
        return False


def answers(url: str) -> bool:
    """Whether GET gives 200."""
    return ask(url)[0] == HTTPStatus.OK


def ask(url: str, *, method: str = "GET", body: object = None, login: str | None = None) -> tuple[int, Any]:
    """The status and the JSON of an answer; status 0 where nobody answers, and None for what is no JSON."""
    headers = {"Content-Type": "application/json"}
    if login is not None:
        headers["Authorization"] = "Basic " + base64.b64encode(login.encode()).decode()
    content = None if body is None else json.dumps(body).encode()
    request = Request(url, data=content, headers=headers, method=method)
    try:
        # Without proxies: the environment's one knows nothing of this machine's loopback.
        with build_opener(ProxyHandler({})).open(request, timeout=TIMEOUT_S) as answer:
            return answer.status, _document(answer.read())
    except HTTPError as error:
        with error:
            return error.code, _document(error.read())
    except (URLError, OSError):
        return 0, None


def listening(pid: int) -> set[tuple[str, int]]:
    """The addresses and TCP ports on which a process, or one below it, takes connections."""
    found: set[tuple[str, int]] = set()
    with contextlib.suppress(psutil.NoSuchProcess):
        main = psutil.Process(pid)
        for one in (main, *main.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                sockets = one.net_connections(kind="tcp")
                places = [item.laddr for item in sockets if item.status == psutil.CONN_LISTEN]
                found |= {(place.ip.removeprefix(MAPPED), place.port) for place in places}
    return found


def _document(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return None
