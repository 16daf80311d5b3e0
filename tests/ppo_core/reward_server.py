"""A server that scores, as users would write one, with troubles to order."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.http_server import serving

Answer = tuple[int, dict[str, str], Any]
"""Status, headers, and a document, or text as it is."""


@dataclass
class RewardServer:
    """What was asked, in order, and how many requests were in flight at most."""

    url: str = ""
    asked: list[Any] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


@contextmanager
def reward_server(answer: Callable[[int, Any], Answer], *, delay_s: float = 0.0) -> Iterator[RewardServer]:
    """`answer(number of the request, its document)` says what comes back."""
    server = RewardServer()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            document = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with server.lock:
                number = len(server.asked)
                server.asked.append(document)
                server.headers.append(dict(self.headers))
                server.in_flight += 1
                server.most_in_flight = max(server.most_in_flight, server.in_flight)
            time.sleep(delay_s)
            status, headers, body = answer(number, document)
            content = (body if isinstance(body, str) else json.dumps(body)).encode()
            with server.lock:
                server.in_flight -= 1
            self.send_response(status)
            for name, value in {"Content-Type": "application/json", **headers}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    with serving(Handler) as url:
        server.url = url
        yield server


def lengths(_: int, document: Any) -> Answer:
    """The length of each response is its score."""
    return 200, {}, {"scores": [len(sample["response"]) for sample in document["samples"]]}
