"""What this machine has."""

from __future__ import annotations

from pathlib import Path


def has_nvidia_gpu() -> bool:
    """Whether an NVIDIA GPU is here, without loading any GPU library."""
    return Path("/dev/nvidia0").exists() or Path("/dev/nvidiactl").exists()
