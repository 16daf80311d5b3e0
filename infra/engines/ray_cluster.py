"""This process's connection to a Ray cluster. Ray is an extra: it is imported only where it is really used."""

from __future__ import annotations

import ctypes
import logging
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from infra.engines.protocol import EngineError
from infra.settings import export

# Ray reads them when it is imported. Without the first, a call after the end would start a cluster here.
SWITCHES = {"RAY_ENABLE_AUTO_CONNECT": "0", "RAY_USAGE_STATS_ENABLED": "0"}
CALLS_END_S = 10.0
SIGACTION_BYTES = 512  # more than any struct sigaction


class RayUnavailable(EngineError):
    """There is no Ray, no cluster, or no node that can have the engine; waiting has been tried."""

    def __init__(self, message: str, *, retryable: bool = False) -> None:
        super().__init__(message, retryable=retryable)


@dataclass
class RayCluster:
    """Made when the first engine needs it, and shared by all engines of a run.

    Without an `address`, Ray finds its own: RAY_ADDRESS, or the cluster that this machine belongs to. The token too is
    found by Ray (RAY_AUTH_TOKEN_PATH, RAY_AUTH_TOKEN or ~/.ray/auth_token).
    """

    address: str | None = None
    connected: bool = False
    left: bool = False
    calls: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def used(self) -> Iterator[Any]:
        """The module `ray`, connected for as long as the work inside takes. Raises RayUnavailable.

        After `close` nothing connects again but `connect`: a call of a thread that comes late would be under way while
        the interpreter ends, and Ray then ends the process with an error.
        """
        with self.lock:
            if self.left:
                raise RayUnavailable("this process has left the Ray cluster: call connect() first")
            self.calls += 1
        try:
            yield self._connection()
        finally:
            with self.lock:
                self.calls -= 1

    def connect(self) -> Any:
        """The module `ray`, connected."""
        with self.lock:
            self.left = False
        return self._connection()

    def close(self) -> None:
        """Leave the cluster, which ends every actor of this process; calls under way end first, or crash."""
        with self.lock:
            self.left = True
        deadline = time.monotonic() + CALLS_END_S
        while self.calls and time.monotonic() < deadline:
            time.sleep(0.02)
        with self.lock:
            if self.connected:
                import ray

                ray.shutdown()
                self.connected = False

    def _connection(self) -> Any:
        with self.lock:
            export(SWITCHES)
            try:
                import ray
            except ModuleNotFoundError:
                raise RayUnavailable("engines.backend=ray needs Ray on this machine: pip install 'ray'") from None
            if not ray.is_initialized():
                try:
                    # In another thread Ray cannot put a handler of its own on SIGTERM, which would end the process.
                    with kept_handler(signal.SIGTERM), ThreadPoolExecutor(1) as pool:
                        quiet = partial(ray.init, log_to_driver=False, logging_level=logging.ERROR)
                        pool.submit(quiet, self.address or "auto").result()
                except (ConnectionError, RuntimeError, ValueError, AssertionError, ray.exceptions.RayError) as error:
                    raise RayUnavailable(self._complaint(error)) from error
                self.connected = True
            return ray

    def _complaint(self, error: Exception) -> str:
        causes = [one for one in (error.__context__, error) if one is not None and str(one)]
        reasons = "; ".join(str(one).strip().splitlines()[-1] for one in causes)
        return (
            f"no connection to the Ray cluster at {self.address or 'RAY_ADDRESS'} ({reasons}): this machine must be "
            "part of it (ray start --address=HOST:PORT) and have its token (RAY_AUTH_MODE=token, "
            "RAY_AUTH_TOKEN_PATH=FILE)"
        )


@contextmanager
def kept_handler(number: int) -> Iterator[None]:
    """What the C library has as a signal's handler before and after is the same, whatever libraries do to it."""
    libc, before = ctypes.CDLL(None), ctypes.create_string_buffer(SIGACTION_BYTES)
    libc.sigaction(number, None, before)
    try:
        yield
    finally:
        libc.sigaction(number, before, None)
