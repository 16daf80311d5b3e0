"""Ports of this machine for servers that somebody will start."""

from __future__ import annotations

import socket

LOOPBACK = "127.0.0.1"
NEIGHBOURS = 100


def free_port(wanted: int) -> int:
    """`wanted` if nobody listens there now, else the next one that is free; `wanted` again where none is."""
    for port in range(wanted, min(wanted + NEIGHBOURS, 65_536)):
        if is_free(port):
            return port
    return wanted


def is_free(port: int, host: str = LOOPBACK) -> bool:
    """Whether a server could listen there now."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError:
            return False
    return True
