"""moto's S3 server as a program, with the two things of S3 that moto leaves out.

moto looks whether a conditional put may happen and does it later, so two at once can both win; here they are done one
after the other. moto takes any body; here one that is not what its sha256 says is refused, as S3 does.
"""

from __future__ import annotations

import hashlib
import io
import logging
import socket
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server

Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]
DRAIN = 10_000_000
REFUSAL = b"<Error><Code>XAmzContentSHA256Mismatch</Code><Message>the body is not what was signed</Message></Error>"


class Strict:
    """The application, with conditional puts one at a time and bodies checked."""

    def __init__(self, application: Application) -> None:
        self._application = application
        self._mutex = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] == "PUT":
            body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            signed = environ.get("HTTP_X_AMZ_CONTENT_SHA256", "UNSIGNED-PAYLOAD")
            if len(signed) == 64 and hashlib.sha256(body).hexdigest() != signed:
                start_response("400 Bad Request", [("Content-Length", str(len(REFUSAL)))])
                return [REFUSAL]
            environ["wsgi.input"] = io.BytesIO(body)
        if "HTTP_IF_MATCH" in environ or "HTTP_IF_NONE_MATCH" in environ:
            with self._mutex:
                return self._answer(environ, start_response)
        return self._answer(environ, start_response)

    def _answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """The application's answer, with its length, without which the connection could not be kept open."""
        answer: list[tuple[str, list[tuple[str, str]]]] = []
        body = b"".join(self._application(environ, lambda status, fields, *rest: answer.append((status, fields))))
        status, fields = answer[0]
        if not status.startswith("204") and "content-length" not in {name.lower() for name, _ in fields}:
            fields = [*fields, ("Content-Length", str(len(body)))]
        start_response(status, fields)
        return [body]


class Undrained:
    """What a client sends, but for werkzeug's reading of what is left after an answer: that is the next request."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def read(self, size: int = -1) -> bytes:
        """So many bytes."""
        return b"" if size == DRAIN else bytes(self._stream.read(size))

    def readline(self, size: int = -1) -> bytes:
        """A line."""
        return bytes(self._stream.readline(size))

    def close(self) -> None:
        """The end."""
        self._stream.close()


class QuietHandler(MotoRequestHandler):
    """Keeps connections open, as S3 does, and writes no line for each request."""

    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        self.rfile = Undrained(self.rfile)

    def send_header(self, keyword: str, value: str) -> None:
        # werkzeug closes every connection because it does not know whether a body was read; here all are.
        if keyword != "Connection":
            super().send_header(keyword, value)

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        return


def main() -> None:
    """Serve on a free port of the loopback, and print it."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    application = Strict(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=QuietHandler)
    server.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    print(server.port, flush=True)
    # The server ends with whoever started it.
    threading.Thread(target=lambda: (sys.stdin.read(), server.shutdown()), daemon=True).start()
    server.serve_forever()


if __name__ == "__main__":
    main()
