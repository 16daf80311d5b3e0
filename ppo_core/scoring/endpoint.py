"""A server asked over HTTP with many requests at a time: tried again where it may help, given up where it is down.

A request fails for good after all its tries. Where that happens to three (or to all, if they are fewer) and meanwhile
no other is answered, the server is taken to be down: nothing more is sent, and the stage fails, to be tried later.
One that answered before is first sent again what it answered: if it does again, those three alone have no score.
What a server refuses it would refuse again: that is bad input, told at once. Only a sample of its own may be what it
refuses (400, 413, 422): where others are answered, such a one has no score. So it is with an answer in another form
(no JSON, too few scores, NaN), which is asked for again first; three of them before any other are bad input, or all,
if they are fewer. So are three or more whose last answers were unclear, where no answer to another could be read.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp

from ppo_core.processes.permissions import passed_on
from ppo_core.records import InputError
from ppo_core.scoring.reward import LONGEST_PAUSE_S, NotScored, Progress, RewardFailed, pause_after, shorten
from ppo_core.spec.reward.kinds import HttpRewardSpec, JudgeSpec

PASSING = frozenset({408, 425, 429})
OF_A_SAMPLE = frozenset({400, 413, 422})
DOWN_AFTER = 3
SHOWN = 200
MIB = 2**20
LONGEST_ANSWER_MIB = 16
"""Of an answer, or 1 MiB for each of its samples, if they are more."""
Read = Callable[[int, Any], Any]


class Unclear(ValueError):
    """An answer that cannot be used though the server is well: asked again, it may answer otherwise."""


class _Passing(Exception):
    """Trouble of the server's own; `pause`: what it asks to wait, in seconds."""

    def __init__(self, message: str, pause: float | None) -> None:
        super().__init__(message)
        self.pause = pause


class _Refused(Exception):
    """A request that the server refuses, which may be for what is in it."""


class _Unusable(Exception):
    """An answer in another form than the one agreed on."""


@dataclass
class Endpoint:
    """The server of a spec. Raises InputError where the variable with its key is not set.

    `answered` counts what was answered before, in an earlier round of the same requests; `known` is the body of one.
    """

    spec: HttpRewardSpec | JudgeSpec
    url: str
    progress: Progress
    answered: int = 0
    known: Any = None
    headers: dict[str, str] = field(init=False)
    proxy: str | None = field(init=False)

    def __post_init__(self) -> None:
        name = self.spec.key_variable
        key = (passed_on(name) or "").strip() if name else ""
        if name and not key.isprintable():
            raise InputError(
                f"the reward {self.spec.component}: {name} has line breaks or control characters: set only the key"
            )
        if name and not key:
            raise InputError(
                f"the reward {self.spec.component} takes its key from {name}, which is not set where rewards run: "
                f"export it in ppoflow's environment, and list it in PPOFLOW_REWARD_ENV"
            )
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}
        # aiohttp would find the environment's proxy too, and send logins of ~/.netrc with it.
        parts = urlsplit(self.url)
        self.proxy = None if proxy_bypass(parts.hostname or "") else getproxies().get(parts.scheme)

    def ask(self, bodies: Sequence[Any], read: Read) -> list[Any]:
        """For each body `read(index, answer)` of the server's answer to it, or NotScored.

        `read` raises Unclear for an answer of a server that is well, InputError for another. Raises RewardFailed where
        the server is down, InputError where it refuses, or gives no answer that can be used.
        """
        return asyncio.run(_Asking(self, bodies, read, self.answered, self.known).all())


@dataclass
class _Asking:
    """One round of requests.

    `answered` are those to which anything of use came back, earlier ones included, `known` is the body of the last of
    them, `unclear` why the last answer could not be read of those that failed for good by that, `unheard` those that
    did without any answered meanwhile, `useless` what the server said, by their numbers, to those that it refused or
    answered in another form.
    """

    endpoint: Endpoint
    bodies: Sequence[Any]
    read: Read
    answered: int
    known: Any
    done: int = 0
    unheard: int = 0
    unclear: list[str] = field(default_factory=list)
    useless: dict[int, str] = field(default_factory=dict)
    probing: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def all(self) -> list[Any]:
        spec = self.endpoint.spec
        answers: list[Any] = [None] * len(self.bodies)
        waiting = iter(range(len(self.bodies)))
        limits = aiohttp.ClientTimeout(total=spec.timeout_s)
        connector = aiohttp.TCPConnector(limit=spec.concurrency)
        headers = self.endpoint.headers
        async with aiohttp.ClientSession(connector=connector, timeout=limits, headers=headers) as session:

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
        if self.useless and not self.answered:
            raise InputError(next(iter(self.useless.values())))
        read = any(not isinstance(answer, NotScored) for answer in answers)
        if len(self.unclear) >= DOWN_AFTER and not read and not self.endpoint.answered:
            raise InputError(
                f"the reward {spec.component}: {self.endpoint.url} gave none of {len(answers)} samples an answer that "
                f"can be read, the last one {self.unclear[-1]}: correct the reward's `rubric`, raise its "
                "`max_tokens`, or name another `model`"
            )
        return answers

    async def _request(self, session: aiohttp.ClientSession, index: int) -> Any:
        """All tries of one request."""
        spec, before, last, reason = self.endpoint.spec, self.answered, "", ""
        for attempt in range(spec.retries + 1):
            pause = pause_after(attempt)
            try:
                answer = self._read(index, await self._post(session, self.bodies[index]))
            except Unclear as error:
                last, reason, pause = "unclear", str(error), 0.0
                self._hear(index)
            except _Refused as error:
                self.useless[index] = str(error)
                return self._failed(str(error), refused=True)
            except _Unusable as error:
                last, reason = "form", str(error)
                self._misunderstood(index, reason)
            except _Passing as error:
                last, reason, pause = "status", str(error), error.pause if error.pause is not None else pause
            except TimeoutError:
                last, reason = "slow", f"no answer within timeout_s={spec.timeout_s:g}"
            except (aiohttp.ClientError, OSError) as error:
                last, reason = "silence", str(error) or type(error).__name__
            else:
                self.done += 1
                self._hear(index)
                self._tell(f"answers of {spec.component}")
                return answer
            self._tell(f"{spec.component}: {reason}")
            if attempt < spec.retries and pause:
                await asyncio.sleep(pause)
                self._tell(f"{spec.component}: asking again")
        tries = f"{spec.retries + 1} tries" if spec.retries else "1 try"
        if last == "form":
            return self._failed(f"{reason} (after {tries})", refused=True)
        if last == "unclear":
            self.unclear.append(f"{reason} (after {tries})")
        self.unheard = self.unheard + 1 if self.answered == before else 0
        async with self.probing:
            if self.unheard >= self._few and not await self._still_answers(session):
                raise RewardFailed(self._down(last, reason, tries))
        return self._failed(f"{reason} (after {tries})")

    async def _still_answers(self, session: aiohttp.ClientSession) -> bool:
        """Whether the server says anything to a request that it answered before, tried as often as any."""
        before, retries = self.answered, self.endpoint.spec.retries
        for attempt in range(retries + 1 if before and self.known else 0):
            await asyncio.sleep(pause_after(attempt - 1) if attempt else 0.0)
            self._tell(f"{self.endpoint.spec.component}: asking whether the server still answers")
            with suppress(_Passing, TimeoutError, aiohttp.ClientError, OSError):
                with suppress(_Refused, _Unusable):
                    await self._post(session, self.known)
                self.unheard = 0
                return True
        return self.answered > before

    def _hear(self, index: int) -> None:
        self.answered, self.unheard, self.known = self.answered + 1, 0, self.bodies[index]

    def _read(self, index: int, answer: Any) -> Any:
        try:
            return self.read(index, answer)
        except InputError as error:
            raise _Unusable(str(error)) from error

    def _misunderstood(self, index: int, reason: str) -> None:
        self.useless[index] = reason
        if not self.answered and len(self.useless) >= DOWN_AFTER:
            raise InputError(reason)

    @property
    def _few(self) -> int:
        """So many requests in vain, with no other answered, and the server is not what it should be."""
        return min(DOWN_AFTER, len(self.bodies) + self.endpoint.answered)

    def _failed(self, reason: str, *, refused: bool = False) -> NotScored:
        self.done += 1
        return NotScored(reason, refused)

    def _tell(self, note: str) -> None:
        self.endpoint.progress(self.done, len(self.bodies), note)

    def _down(self, last: str, reason: str, tries: str) -> str:
        of = f" of each of {self.unheard} requests" if self.unheard > 1 else ""
        where, name = self.endpoint.url, self.endpoint.spec.component
        if last == "status":
            return (
                f"the reward {name}: {where} keeps answering {reason} (after {tries}{of}): see the server's log, "
                "lower the reward's `concurrency`, or raise its `retries`"
            )
        remedy = "start the server, or correct the reward's `url`"
        if last == "slow":
            remedy = "raise the reward's `timeout_s`, lower its `concurrency`, or see whether the server works"
        return f"the reward {name} gets no answer from {where}: {reason} (after {tries}{of}): {remedy}"

    async def _post(self, session: aiohttp.ClientSession, body: Any) -> Any:
        """The JSON document that the server answers."""
        where = f"{self.endpoint.url} (the reward {self.endpoint.spec.component})"
        options: dict[str, Any] = {"allow_redirects": False, "proxy": self.endpoint.proxy}
        async with session.post(self.endpoint.url, json=body, **options) as response:
            most = max(LONGEST_ANSWER_MIB, len(body.get("samples", ())))
            text, is_whole = await _text_of(response, most * MIB)
            said = f"{response.status} {response.reason}: {' '.join(text.split())[:SHOWN]}"
            if response.status in PASSING or response.status >= 500:
                raise _Passing(said, _retry_after(response.headers.get("Retry-After")))
            if response.status in OF_A_SAMPLE:
                raise _Refused(f"{where} answered {said}")
            if response.status != 200:
                raise InputError(
                    f"{where} answered {said}: correct the reward's `url` or key, or see what the server expects"
                )
            if not is_whole:
                raise _Unusable(
                    f"{where} answered with more than {most} MiB, {shorten(text)}: let it answer the scores alone, or "
                    "name another address as the reward's `url`"
                )
            try:
                return json.loads(text)
            except (json.JSONDecodeError, RecursionError):
                raise _Unusable(
                    f"{where} answered {response.content_type}, not JSON: {' '.join(text.split())[:SHOWN]!r}: correct "
                    "the reward's `url`"
                ) from None
            except ValueError:  # more digits than Python reads
                raise _Unusable(
                    f"{where} answered with an integer that is too long to be read, {shorten(text)}: let it answer "
                    "numbers that fit into a float"
                ) from None


async def _text_of(response: aiohttp.ClientResponse, most: int) -> tuple[str, bool]:
    """What the server answered, up to so many bytes, and whether that is all."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > most:
            break
    try:
        text = body[:most].decode(response.charset or "utf-8", "replace")
    except (LookupError, ValueError):  # no encoding of texts
        text = body[:most].decode("utf-8", "replace")
    return text, len(body) <= most


def _retry_after(header: str | None) -> float | None:
    """The header in seconds; dates and anything longer than our own longest pause are not waited for."""
    if header is None or not header.strip().isdecimal():
        return None
    return min(float(header), LONGEST_PAUSE_S)
