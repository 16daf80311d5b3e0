"""How many samples a second are scored: by a Python function, and by a server that takes 50 ms for each answer.

    python -m benchmarks.rewards [--rounds 5]

The server runs beside it, in a process of its own. Prints medians and writes `benchmarks/results/rewards.json`.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from aiohttp import web

from benchmarks import report
from ppo_core.processes.plugins import Sources
from ppo_core.records import PromptRow
from ppo_core.scoring.reward import Sample
from ppo_core.scoring.weighted import WeightedRewards
from ppo_core.spec import RewardSpec

LATENCY_S = 0.05
IN_FLIGHT = 64
RULE = "def words(completions, **columns):\n    return [float(len(text.split())) for text in completions]\n"


def main() -> None:
    """Measure every case in turn, several rounds."""
    parser = report.arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.Process(target=serve, args=(theirs,), daemon=True)
    server.start()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "rules.py").write_text(RULE)
        http = {"kind": "http", "url": f"http://127.0.0.1:{ours.recv()}/score", "concurrency": IN_FLIGHT}
        cases = {
            "a Python function": ({"function": "rules.py:words"}, 10_000),
            "http, one sample a request": ({**http, "batch_size": 1}, 4_000),
            "http, 16 samples a request": ({**http, "batch_size": 16}, 10_000),
        }
        spent: dict[str, list[float]] = {name: [] for name in cases}
        for _ in range(given.rounds):
            for name, (source, count) in cases.items():
                spent[name].append(seconds(source, count, Path(folder)))
    server.terminate()
    rows = [
        {"case": name, "samples": count, "seconds": statistics.median(spent[name]), "rounds": spent[name]}
        for name, (_, count) in cases.items()
    ]
    title = f"scoring; the server answers after {LATENCY_S * 1000:.0f} ms, {IN_FLIGHT} requests in flight"
    table = [
        [row["case"], f"{row['samples']:,}", row["seconds"], f"{row['samples'] / row['seconds']:,.0f}"] for row in rows
    ]
    report.show(title, ("reward", "samples", "seconds", "samples a second"), table)
    report.save("rewards", given, {"latency_s": LATENCY_S, "requests_in_flight": IN_FLIGHT, "cases": rows})


def seconds(source: dict[str, Any], count: int, folder: Path) -> float:
    """Of scoring `count` samples, everything in it."""
    samples = [Sample(PromptRow(str(n), f"prompt {n}", [1], "2", {"level": n}), "a b c") for n in range(count)]
    started = time.perf_counter()
    rewards = WeightedRewards(RewardSpec.model_validate({"sources": [source]}), Sources(folder), "answer")
    scored = rewards.score(samples)
    spent = time.perf_counter() - started
    assert all(rewards.total(parts.scores) == 3.0 for parts in scored)
    return spent


def serve(pipe: Connection) -> None:
    """Count the words of each response, 50 ms after the question."""

    async def score(request: web.Request) -> web.Response:
        document = await request.json()
        await asyncio.sleep(LATENCY_S)
        return web.json_response({"scores": [len(one["response"].split()) for one in document["samples"]]})

    app = web.Application()
    app.router.add_post("/score", score)
    listener = socket.create_server(("127.0.0.1", 0))
    pipe.send(listener.getsockname()[1])
    web.run_app(app, sock=listener, print=None)


if __name__ == "__main__":
    main()
