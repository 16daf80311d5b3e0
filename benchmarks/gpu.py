"""The training engine's own jobs on a GPU: Qwen2-shaped models of 0.5B and 1.5B with random weights, in bfloat16.

    python -m benchmarks.gpu [--cases qwen-0.5B/weights qwen-1.5B/weights ...] [--iterations 3] [--tokens N]
    python -m benchmarks.gpu --tiny

Response tokens a second of experience and of the update's steps, which leave out loading and writing; model FLOP
utilisation (useful FLOP of those steps over what the GPU's maker promises in bfloat16, and over a large matrix product
here), and the highest memory. It needs torch, transformers, deepspeed, safetensors, pydantic and pyarrow, and no more;
liger_kernel makes it faster. `--tiny` is the same at a tiny size, also without a GPU.
Writes `benchmarks/results/gpu.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from typing import Any

from benchmarks import report

SETTINGS = {"weights": ("--dtype", "bfloat16", "--zero-stage", "1"), "products": ("--compute-dtype", "bfloat16")}
"""What is in bfloat16: the weights, with fp32 masters beside them, or the matrix products alone."""
TOKENS = {"qwen-tiny": 128, "qwen-0.5B": 24_576, "qwen-1.5B": 10_240}
"""In a microbatch of each shape, at most, unless told: a GPU of 80 GB holds not many more."""
# Dense bfloat16 TFLOP/s in the makers' data sheets, by a part of the name.
PROMISED = {"H100 PCIe": 756.0, "H100": 989.0, "H200": 989.0, "A100": 312.0, "L40S": 362.0, "L40": 181.0, "L4": 121.0}


def main() -> None:
    """All shapes and settings, each in a process of its own."""
    parser = report.arguments(__doc__)
    cases = [f"{shape}/{setting}" for shape in TOKENS for setting in SETTINGS]
    parser.add_argument("--cases", nargs="+", choices=cases, default=cases[len(SETTINGS) :])
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--tokens", type=int, help="in a microbatch, at most")
    parser.add_argument("--ranks", type=int, default=1, help="as many GPUs")
    parser.add_argument("--peak", type=float, help="the GPU's dense bfloat16 TFLOP/s, where its name is not known here")
    parser.add_argument("--tiny", action="store_true", help="tiny models, one iteration")
    given = parser.parse_args()
    if given.tiny:
        given.cases, given.iterations = cases[: len(SETTINGS)], 1
    begun = [Case(*name.split("/"), given) for name in given.cases]
    figures = list[dict[str, Any]]()
    try:
        for case in begun:  # models are made side by side, and measured one after the other
            case.wait_until_ready()
        for case in begun:
            figures.append(case.measured())
            report.save("gpu", given, figures)
    finally:
        for case in begun:
            case.end()
    columns = (
        "model, setting",
        "experience tokens/s",
        "steps tokens/s",
        "update MFU",
        "of the matmul rate",
        "peak GiB",
    )
    rows = [row_of(one, given.peak, given.ranks) for one in figures]
    if all("failed" in one for one in figures):
        raise SystemExit("nothing could be measured")
    report.show(f"training engine on {figures[0].get('machine', {}).get('gpu') or 'a CPU'}", columns, rows)


class Case:
    """A process of `benchmarks.training_jobs`, which makes its model and waits."""

    def __init__(self, shape: str, setting: str, given: argparse.Namespace) -> None:
        tokens = given.tokens or TOKENS[shape]
        self.told = {"shape": shape, "setting": f"{setting} in bfloat16", "microbatch_tokens": tokens}
        numbers = {"--iterations": given.iterations, "--tokens": tokens, "--ranks": given.ranks}
        options = [*(word for name, number in numbers.items() for word in (name, str(number))), *SETTINGS[setting]]
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (open until it is read)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.training_jobs", shape, "--wait", *options],
            env={**os.environ, "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def wait_until_ready(self) -> None:
        """Returns when its model is made, or when it has ended."""
        assert self._process.stdout is not None
        while self._process.stdout.readline() not in ("ready\n", ""):
            pass

    def end(self) -> None:
        """Leave no process behind."""
        self._process.kill()
        self._process.wait()

    def measured(self) -> dict[str, Any]:
        """What it says, or why it says nothing: the memory may be too small."""
        said, _ = self._process.communicate("\n")
        if self._process.returncode == 0:
            return {**self.told, **json.loads(said.splitlines()[-1])}
        self._errors.seek(0)
        errors = self._errors.read()
        print(f"{self.told}: {errors[-2000:]}", file=sys.stderr)
        return {**self.told, "failed": errors.strip().splitlines()[-1:]}


def row_of(one: dict[str, Any], peak: float | None, ranks: int) -> list[str | float]:
    """One line of the table. A rank's matrix products run on one GPU, the update on all."""
    label = f"{one['shape']}, {one['setting']}"
    if "failed" in one:
        return [label, "failed", "", "", "", ""]
    speed, memory = one["useful_flop_per_second"]["steps"] / ranks, one["memory_mib"]
    promised = peak or promised_tflops(one["machine"]["gpu"])
    rates = (f"{one['tokens_per_second'][part]:.0f}" for part in ("experience", "steps"))
    utilised = f"{speed / promised / 1e12:.3f}" if promised else "–"
    share = f"{one['useful_flop_over_matmul_rate']['steps'] / ranks:.3f}"
    return [label, *rates, utilised, share, (memory["idle"] + memory["update_above_idle"]) / 1024]


def promised_tflops(gpu: str | None) -> float | None:
    """By the GPU's name, as torch tells it."""
    return next((tflops for part, tflops in PROMISED.items() if gpu and part in gpu), None)


if __name__ == "__main__":
    main()
