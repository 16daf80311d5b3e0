"""What this machine has."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Collection, Iterator
from itertools import takewhile
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
BF16_UNITS = {"amx_bf16", "avx512_bf16"}
BF16_CAPABILITY = 8
GPU_ANSWER_S = 5.0


def usable_cores() -> int:
    """Cores that this process may keep busy: those that it may run on, but no more than its quota."""
    allowed = len(os.sched_getaffinity(0))
    return min(allowed, quota_cores() or allowed)


def quota_cores(root: Path = Path("/")) -> int | None:
    """Whole cores that the quotas of this process's control groups come to, at least one; None: there is no quota.

    A container with a limit of CPUs has one. Thread pools do not see it: they take all cores of the machine, and the
    kernel stops them for most of the time.
    """
    return min((max(1, int(quota / period)) for quota, period in _quotas(root)), default=None)


def _quotas(root: Path) -> Iterator[tuple[float, float]]:
    """Microseconds of processor time in each period, by cgroup v2 and v1, of each group that this process is in.

    A container may see the path of its group on the host, which it does not have: its own group is the topmost then.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if controllers else ("cpu.max",)
        for below in (Path(path.strip("/")), *Path(path.strip("/")).parents):
            try:
                numbers = " ".join((top / below / name).read_text() for name in names).split()
            except OSError:
                continue
            if len(numbers) == 2 and all(number.isdigit() and int(number) > 0 for number in numbers):
                yield float(numbers[0]), float(numbers[1])


def has_nvidia_gpu() -> bool:
    """Whether an NVIDIA GPU is here, without loading any GPU library."""
    return Path("/dev/nvidia0").exists() or Path("/dev/nvidiactl").exists()


def gpus_of(visible: str | None, devices: Path = Path("/dev")) -> list[str]:
    """The GPUs that programs here see, as CUDA_VISIBLE_DEVICES (`visible`; None: unset) names them, or by number.

    As for CUDA the list ends at the first that names none: -1, NoDevFiles.

    >>> gpus_of("2, 3"), gpus_of("0,-1,1"), gpus_of("NoDevFiles")
    (['2', '3'], ['0'], [])
    """
    if visible is not None:
        names = (name.strip() for name in visible.split(","))
        return list(takewhile(lambda name: name.isdecimal() or name.startswith(("GPU-", "MIG-")), names))
    return [str(number) for number in range(len(list(devices.glob("nvidia[0-9]*"))))]


def nvidia_smi(query: str) -> str:
    """What nvidia-smi says of its GPUs, a line each, with commas between values; nothing where it does not answer."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    command = [program, f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=GPU_ANSWER_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def smallest_memory_gib(table: str, gpus: Collection[str]) -> float | None:
    """The least memory of those GPUs, by the lines that nvidia-smi prints for `index,uuid,memory.total` (MiB).

    None where one of them is not there, or does not tell.

    >>> smallest_memory_gib("0, GPU-a1, 81920\\n1, GPU-b2, 4096", ["0"])
    80.0
    >>> smallest_memory_gib("0, GPU-a1, [N/A]", ["0"])
    """
    sizes = _third(table, gpus)
    return min(map(float, sizes)) / 1024 if sizes and all(size.isdigit() for size in sizes) else None


def lacks_bf16(table: str, gpus: Collection[str]) -> bool:
    """Whether one of those GPUs is known to have no units for products in bf16, which came with compute capability 8;
    by the lines that nvidia-smi prints for `index,uuid,compute_cap`.

    >>> lacks_bf16("0, GPU-a1, 9.0\\n1, GPU-b2, 7.5", ["0"]), lacks_bf16("0, GPU-a1, 7.5", ["GPU-a1"])
    (False, True)
    """
    majors = [capability.partition(".")[0] for capability in _third(table, gpus)]
    return any(major.isdigit() and int(major) < BF16_CAPABILITY for major in majors)


def _third(table: str, gpus: Collection[str]) -> list[str]:
    """What lines of index, uuid and a value say of those GPUs; nothing of one that is not there."""
    lines = [[part.strip() for part in line.split(",")] for line in table.split("\n") if line.strip()]
    known = {name: value for index, uuid, value in lines for name in (index, uuid)}
    return [known.get(name, "") for name in gpus]


def has_bf16_units(cpuinfo: Path = CPUINFO) -> bool:
    """Whether the processor has units for products in bf16."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return False
    return any(BF16_UNITS.intersection(line.split()) for line in lines if line.startswith("flags"))
