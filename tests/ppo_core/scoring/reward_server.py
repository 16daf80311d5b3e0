"""A server that scores, as users would write one, with troubles to order; and rewards that ask it."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ppo_core.processes.plugins import Sources
from ppo_core.records import PromptRow
from ppo_core.scoring.reward import Sample
from ppo_core.scoring.weighted import WeightedRewards
from ppo_core.spec import RewardSpec
from tests.http_server import serving
from tests.waiting import LONG_S

ROWS = [PromptRow(str(number), f"prompt {number}", [1], number, {"level": number}) for number in range(10)]
SAMPLES = [Sample(row, "x" * number) for number, row in enumerate(ROWS)]
RUBRIC = "Rate {response} to {prompt}; right is {answer}. {{}} End with a line `Score: NUMBER`."
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
def reward_server(
    answer: Callable[[int, Any], Answer], *, delay_s: float = 0.0, together: int = 1
) -> Iterator[RewardServer]:
    """`answer(number of the request, its document)` says what comes back, once `together` requests have come."""
    server, met = RewardServer(), threading.Event()

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
                if len(server.asked) >= together:
                    met.set()
            met.wait(LONG_S)
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
            with suppress(ConnectionError):  # of a client that has not waited for it
                self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    with serving(Handler) as url:
        server.url = url
        yield server


def lengths(_: int, document: Any) -> Answer:
    """The length of each response is its score."""
    return 200, {}, {"scores": [len(sample["response"]) for sample in document["samples"]]}


def rewards(kind: str, url: str, said: list[str] | None = None, **options: Any) -> WeightedRewards:
    more = {"model": "m", "rubric": RUBRIC} if kind == "judge" else {}
    spec = RewardSpec.model_validate({"sources": [{"kind": kind, "url": url, **more, **options}]})
    notes = said if said is not None else []
    return WeightedRewards(spec, Sources(Path()), "answer", lambda done, total, note: notes.append(note))


def scores(found: WeightedRewards, samples: list[Sample] = SAMPLES) -> list[float | None]:
    (name,) = found.weights
    return [parts.scores[name] for parts in found.score(samples)]
