"""TCP ports for servers that tests start later, or more than once."""

from __future__ import annotations

import random
import socket

# Below those that the kernel gives to connections and to whoever asks for any: nobody gets one of these by chance.
PORTS = range(20_000, 32_000)
_reserved: list[socket.socket] = []


def free_port(address: str = "127.0.0.1") -> int:
    """A port that nobody listens on, and that no other test process of this machine gets while this one runs."""
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        mark = socket.socket(socket.AF_UNIX)
        try:
            mark.bind(f"\0ppoflow-tests-port-{port}")  # the kernel takes it back when this process ends
            with socket.socket() as listener:
                listener.bind((address, port))
        except OSError:
            mark.close()
        else:
            _reserved.append(mark)
            return port
    raise RuntimeError(f"no port in {PORTS} is free at {address}: end what listens there")


def free_ports(count: int) -> list[int]:
    """So many, each another."""
    return [free_port() for _ in range(count)]
