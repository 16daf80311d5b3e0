"""A TCP proxy in front of an S3 server, which does to chosen requests what networks and servers do.

It knows just enough HTTP to see where a request or an answer begins and ends, so that a fault hits one of them.
"""

from __future__ import annotations

import io
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from tests.ports import free_port

BLOCK = 65536
FAULTS = (
    "500",
    "503",
    "500 after",
    "reset",
    "reset after",
    "reset in the answer",
    "cut answer",
    "cut answer of unknown length",
    "stall",
    "stall in the answer",
    "flip in the request",
    "flip in the answer",
)
ERRORS = {"500": ("500 Internal Server Error", "InternalError"), "503": ("503 Slow Down", "SlowDown")}


@dataclass
class Message:
    """A request or an answer: its first line, its header fields and its body."""

    first_line: str
    fields: dict[str, str]
    body: bytes = b""

    @property
    def raw(self) -> bytes:
        """The message as it goes over the wire."""
        head = [self.first_line, *(f"{name}: {value}" for name, value in self.fields.items())]
        return "\r\n".join(head).encode("latin-1") + b"\r\n\r\n" + self.body


Choice = Callable[[Message], bool]


class FaultProxy:
    """Forwards to a port of the loopback; `inject` has a fault hit the next requests that are chosen."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", free_port()))  # nobody takes it while this one is away
        self._address = self._listener.getsockname()
        self.uri = f"http://127.0.0.1:{self._address[1]}"
        self.requests: list[str] = []
        self.hits = 0
        self._mutex = threading.Lock()
        self._fault, self._chosen, self._times = "", _nothing, 0
        self._errors = dict(ERRORS)
        self._open = True
        self._leaves: tuple[int, float | None] = 0, None
        threading.Thread(target=self._accept, daemon=True).start()

    def inject(self, fault: str, chosen: Choice, times: int = 1) -> None:
        """From now on, let `fault` hit the next `times` requests that `chosen` picks."""
        with self._mutex:
            self._fault, self._chosen, self._times, self.hits = fault, chosen, times, 0

    def refuse(self, status: int, code: str, chosen: Choice = lambda request: True) -> None:
        """From now on, answer every request that `chosen` picks with this error."""
        self._errors[code] = (f"{status} Refused", code)
        self.inject(code, chosen, times=2**31)

    def go_away(self) -> None:
        """Answer nothing any more, and refuse connections."""
        self._open = False
        # Closing alone would let the thread that accepts take one more.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def come_back(self) -> None:
        """Be there again, at the same address."""
        self._listener = socket.create_server(self._address)
        self._open = True
        threading.Thread(target=self._accept, daemon=True).start()

    def away_for(self, seconds: float | None) -> None:
        """Go away now, and come back by itself; without `seconds`, only if it is told to."""
        self.go_away()
        if seconds is not None:
            threading.Timer(seconds, self.come_back).start()

    def away_before(self, number: int, seconds: float | None = None) -> None:
        """The same at request `number` from now on (counted from 1), before it is answered."""
        with self._mutex:
            self._leaves = len(self.requests) + number, seconds

    def close(self) -> None:
        """Take no more connections."""
        self._open = False
        self._listener.close()

    def _accept(self) -> None:
        while self._open:
            with suppress(OSError):
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with suppress(OSError, EOFError, ValueError), client:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with socket.create_connection(("127.0.0.1", self._target)) as server:
                server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                incoming, answers = client.makefile("rb"), server.makefile("rb")
                while True:
                    request = _read_head(incoming)
                    if request.fields.pop("expect", None):
                        client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
                    _read_body(incoming, request)
                    fault = self._pick(request)
                    if not self._open:
                        return
                    if "upgrade" in request.fields and not fault:
                        _tunnel(request, client, server)
                        return
                    if not self._pass_on(request, fault, client, server, answers):
                        return

    def _pass_on(
        self, request: Message, fault: str, client: socket.socket, server: socket.socket, answers: io.BufferedReader
    ) -> bool:
        """Have a request answered; False if the connection is of no use after it."""
        if fault in self._errors:
            client.sendall(_refusal(*self._errors[fault]))
            return True
        if fault == "reset":
            return _reset(client)
        if fault == "stall":
            return _wait_for_the_end(client)
        server.sendall((_flipped(request) if fault == "flip in the request" else request).raw)
        answer = _read_head(answers)
        _read_body(answers, answer, of_head=request.first_line.startswith("HEAD"))
        half = answer.raw[: len(answer.raw) - len(answer.body) // 2]
        if fault == "500 after":
            client.sendall(_refusal(*ERRORS["500"]))
        elif fault == "reset after":
            return _reset(client)
        elif fault == "reset in the answer":
            client.sendall(half)
            return _reset(client)
        elif fault == "cut answer":
            client.sendall(half)
            return False
        elif fault == "cut answer of unknown length":
            answer.fields.pop("content-length", None)
            client.sendall(answer.raw[: len(answer.raw) - len(answer.body) // 2])
            return False
        elif fault == "stall in the answer":
            client.sendall(half)
            return _wait_for_the_end(client)
        else:
            client.sendall((_flipped(answer) if fault == "flip in the answer" else answer).raw)
        return True

    def _pick(self, request: Message) -> str:
        with self._mutex:
            self.requests.append(request.first_line)
            if len(self.requests) == self._leaves[0]:
                self.away_for(self._leaves[1])
            if self._times > 0 and self._chosen(request):
                self._times -= 1
                self.hits += 1
                return self._fault
        return ""


def _tunnel(request: Message, client: socket.socket, server: socket.socket) -> None:
    """Pass on what is not HTTP any more, both ways."""
    server.sendall(request.raw)
    threading.Thread(target=_pour, args=(server, client), daemon=True).start()
    _pour(client, server)


def _pour(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while block := source.recv(BLOCK):
            target.sendall(block)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def _nothing(request: Message) -> bool:
    return False


def _read_head(stream: io.BufferedReader) -> Message:
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        line = stream.readline()
        if not line:
            raise EOFError
        head += line
    first, *lines = head.decode("latin-1").split("\r\n")[:-2]
    fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return _read_head(stream) if " 100 " in first else Message(first, fields)


def _read_body(stream: io.BufferedReader, message: Message, *, of_head: bool = False) -> None:
    if message.fields.get("transfer-encoding") == "chunked":
        del message.fields["transfer-encoding"]
        message.body = b"".join(_chunks(stream))
        message.fields["content-length"] = str(len(message.body))
        return
    left = 0 if of_head else int(message.fields.get("content-length", "0"))
    blocks = []
    while left:
        block = stream.read(min(left, BLOCK))
        if not block:
            raise EOFError
        blocks.append(block)
        left -= len(block)
    message.body = b"".join(blocks)


def _chunks(stream: io.BufferedReader) -> Iterator[bytes]:
    while size := int(stream.readline().strip(), 16):
        yield stream.read(size)
        stream.readline()
    stream.readline()


def _refusal(status: str, code: str) -> bytes:
    body = f"<Error><Code>{code}</Code><Message>injected</Message></Error>"
    # boto3 waits for as long as it is told to, so that tests do not wait for it.
    fields = {"content-type": "application/xml", "content-length": str(len(body)), "x-amz-retry-after": "0"}
    return Message(f"HTTP/1.1 {status}", fields, body.encode()).raw


def _flipped(message: Message) -> Message:
    body = bytearray(message.body)
    if body:
        body[len(body) // 2] ^= 1
    return Message(message.first_line, message.fields, bytes(body))


def _reset(client: socket.socket) -> bool:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return False


def _wait_for_the_end(client: socket.socket) -> bool:
    """Say nothing more until the client gives up."""
    while client.recv(BLOCK):
        continue
    return False
