"""What this machine has."""

from __future__ import annotations

import socket
from pathlib import Path


def has_nvidia_gpu() -> bool:
    """Whether an NVIDIA GPU is here, without loading any GPU library."""
    return Path("/dev/nvidia0").exists() or Path("/dev/nvidiactl").exists()


def free_port() -> int:
    """A TCP port on the loopback address that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
