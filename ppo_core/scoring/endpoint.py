"""A server asked over HTTP with many requests at a time: tried again where it may help, given up where it is down.

A request fails for good after all its tries. Where three in a row do, the server is taken to be down: nothing more is
sent, and the stage fails, to be tried again later. What a server refuses, or answers in another form, it would answer
again: that is bad input, told at once.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from ppo_core.permissions import passed_on
from ppo_core.records import InputError
from ppo_core.scoring.reward import NotScored, Progress, RewardFailed
from ppo_core.spec.reward_kinds import HttpRewardSpec, JudgeSpec

PASSING = frozenset({408, 425, 429})
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 20.0
DOWN_AFTER = 3
SHOWN = 200
Read = Callable[[int, Any], Any]


class Unclear(ValueError):
    """An answer that cannot be used though the server is well: asked again, it may answer otherwise."""


class _Passing(Exception):
    """Trouble of the server's own; `pause`: what it asks to wait, in seconds."""

    def __init__(self, message: str, pause: float | None) -> None:
        super().__init__(message)
        self.pause = pause


@dataclass
class Endpoint:
    """The server of a spec. Raises InputError where the variable with its key is not set."""

    spec: HttpRewardSpec | JudgeSpec
    url: str
    progress: Progress
    headers: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        name = self.spec.key_variable
        key = passed_on(name) if name else None
        if name and not key:
            raise InputError(
                f"the reward {self.spec.component} takes its key from {name}, which is not set where rewards run: "
                f"export it where ppoflow runs, and let PPOFLOW_REWARD_ENV name it"
            )
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}

    def ask(self, bodies: Sequence[Any], read: Read) -> list[Any]:
        """For each body `read(index, answer)` of the server's answer to it, or NotScored.

        `read` raises Unclear where to ask again may help, InputError where not. Raises RewardFailed where the server is
        down, InputError where it refuses.
        """
        return asyncio.run(_Asking(self, bodies, read).all())


@dataclass
class _Asking:
    """One round of requests."""

    endpoint: Endpoint
    bodies: Sequence[Any]
    read: Read
    done: int = 0
    failed_in_a_row: int = 0

    async def all(self) -> list[Any]:
        spec = self.endpoint.spec
        answers: list[Any] = [None] * len(self.bodies)
        waiting = iter(range(len(self.bodies)))
        limits = aiohttp.ClientTimeout(total=spec.timeout_s)
        connector = aiohttp.TCPConnector(limit=spec.concurrency)
        # Proxies of the environment count, as for any program.
        async with aiohttp.ClientSession(
            connector=connector, timeout=limits, headers=self.endpoint.headers, trust_env=True
        ) as session:

            async def work() -> None:
                for index in waiting:
                    answers[index] = await self._request(session, index)

            tasks = [asyncio.create_task(work()) for _ in range(min(spec.concurrency, len(self.bodies)))]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        return answers

    async def _request(self, session: aiohttp.ClientSession, index: int) -> Any:
        """All tries of one request."""
        spec, unclear, reason = self.endpoint.spec, False, ""
        for attempt in range(spec.retries + 1):
            pause = min(FIRST_PAUSE_S * 2**attempt, LONGEST_PAUSE_S)
            try:
                unclear = False
                return self._finish(self.read(index, await self._post(session, self.bodies[index])))
            except Unclear as error:
                unclear, reason, pause = True, str(error), 0.0
            except _Passing as error:
                reason, pause = str(error), error.pause if error.pause is not None else pause
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                reason = str(error) or f"no answer within timeout_s={spec.timeout_s:g}"
            self.endpoint.progress(self.done, len(self.bodies), f"{spec.component}: {reason}")
            if attempt < spec.retries and pause:
                await asyncio.sleep(pause)
        tries = f"{spec.retries + 1} tries" if spec.retries else "1 try"
        if not unclear:
            self.failed_in_a_row += 1
            if self.failed_in_a_row >= min(DOWN_AFTER, len(self.bodies)):
                of = f" of each of {self.failed_in_a_row} requests" if self.failed_in_a_row > 1 else ""
                raise RewardFailed(
                    f"the reward {spec.component} gets no answer from {self.endpoint.url}: {reason} (after {tries}{of})"
                    ": start the server, or correct the reward's `url`"
                )
        self.done += 1
        return NotScored(f"{reason} (after {tries})")

    def _finish(self, answer: Any) -> Any:
        self.done, self.failed_in_a_row = self.done + 1, 0
        self.endpoint.progress(self.done, len(self.bodies), f"answers of {self.endpoint.spec.component}")
        return answer

    async def _post(self, session: aiohttp.ClientSession, body: Any) -> Any:
        """The JSON document that the server answers."""
        where = f"{self.endpoint.url} (the reward {self.endpoint.spec.component})"
        async with session.post(self.endpoint.url, json=body, allow_redirects=False) as response:
            text = await response.text(errors="replace")
            said = f"{response.status} {response.reason}: {' '.join(text.split())[:SHOWN]}"
            if response.status in PASSING or response.status >= 500:
                raise _Passing(said, _retry_after(response.headers.get("Retry-After")))
            if response.status != 200:
                raise InputError(
                    f"{where} answered {said}: correct the reward's `url`, its key, or what the server takes"
                )
            try:
                return json.loads(text)
            except json.JSONDecodeError:
                raise InputError(
                    f"{where} answered {response.content_type}, not JSON: {' '.join(text.split())[:SHOWN]!r}: correct "
                    "the reward's `url`"
                ) from None


def _retry_after(header: str | None) -> float | None:
    """The header in seconds; dates and anything longer than our own longest pause are not waited for."""
    if header is None or not header.strip().isdigit():
        return None
    return min(float(header), LONGEST_PAUSE_S)
