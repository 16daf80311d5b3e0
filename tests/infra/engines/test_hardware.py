"""How many cores a container's quota leaves, by the files of cgroup v1 and v2 as the kernel writes them; and GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.engines import hardware
from infra.engines.hardware import gpus_of, quota_cores, usable_cores
from infra.settings import Settings
from tasks.stages import engine_programs

OWN = "proc/self/cgroup"


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({OWN: "0::/\n", "sys/fs/cgroup/cpu.max": "400000 100000\n"}, 4),
        ({OWN: "0::/\n", "sys/fs/cgroup/cpu.max": "350000 100000\n"}, 3),
        ({OWN: "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
        ({OWN: "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        ({OWN: "0::/\n"}, None),
        ({}, None),
        # A service of systemd: the quota is of one of the groups above.
        ({OWN: "0::/a.slice/b.service\n", "sys/fs/cgroup/a.slice/cpu.max": "200000 100000\n"}, 2),
        (
            {
                OWN: "0::/a.slice/b.service\n",
                "sys/fs/cgroup/a.slice/cpu.max": "600000 100000\n",
                "sys/fs/cgroup/a.slice/b.service/cpu.max": "300000 100000\n",
            },
            3,
        ),
        # Version 1, in a container that sees the host's path.
        (
            {
                OWN: "4:memory:/docker/f00\n2:cpu,cpuacct:/docker/f00\n1:cpuset:/docker/f00\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "250000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            2,
        ),
        (
            {
                OWN: "1:cpu:/\n0::/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
    ],
)
def test_cores_of_a_quota(tmp_path: Path, files: dict[str, str], cores: int | None) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert quota_cores(tmp_path) == cores


@pytest.mark.parametrize(("quota", "usable"), [(None, 8), (3, 3), (64, 8)])
def test_no_more_cores_than_a_process_may_run_on(
    monkeypatch: pytest.MonkeyPatch, quota: int | None, usable: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(hardware, "quota_cores", lambda: quota)
    assert usable_cores() == usable


@pytest.mark.parametrize(
    ("quota", "setting", "threads"), [(None, None, None), (3, None, "3"), (9, None, "4"), (3, 5, "5")]
)
def test_engines_of_a_container_have_as_many_threads_as_its_quota(
    monkeypatch: pytest.MonkeyPatch, quota: int | None, setting: int | None, threads: str | None
) -> None:
    """As many threads as a large machine has cores would stop each other; bytes elsewhere stay what they were."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(4)))
    monkeypatch.setattr(hardware, "quota_cores", lambda: quota)
    monkeypatch.setattr(engine_programs, "quota_cores", lambda: quota)
    assert engine_programs.quiet(Settings(engine_threads=setting)).get("OMP_NUM_THREADS") == threads


@pytest.mark.parametrize(
    ("visible", "seen"),
    [
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("none", []),
        ("-1,0", []),
        ("0,-1,1", ["0"]),
        ("0, 1,", ["0", "1"]),
        ("GPU-a1,MIG-b2, 3", ["GPU-a1", "MIG-b2", "3"]),
    ],
)
def test_the_list_of_gpus_ends_at_the_first_that_is_none_as_for_cuda(visible: str, seen: list[str]) -> None:
    """Slurm writes NoDevFiles for a job without GPUs."""
    assert gpus_of(visible) == seen


def test_without_a_list_they_are_the_devices(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / name).touch()
    assert gpus_of(None, tmp_path) == ["0", "1"]
