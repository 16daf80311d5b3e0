"""What this machine has."""

from __future__ import annotations

from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
BF16_UNITS = {"amx_bf16", "avx512_bf16"}


def has_nvidia_gpu() -> bool:
    """Whether an NVIDIA GPU is here, without loading any GPU library."""
    return Path("/dev/nvidia0").exists() or Path("/dev/nvidiactl").exists()


def has_bf16_units(cpuinfo: Path = CPUINFO) -> bool:
    """Whether the processor has units for products in bf16."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return False
    return any(BF16_UNITS.intersection(line.split()) for line in lines if line.startswith("flags"))
