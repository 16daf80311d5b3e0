"""The training engine's own jobs on a GPU: Qwen2-shaped models of 0.5B and 1.5B with random weights, in bfloat16.

    python -m benchmarks.gpu [--shapes qwen-0.5B qwen-1.5B] [--iterations 3] [--tokens 16384] [--ranks 1]
    python -m benchmarks.gpu --tiny

Response tokens a second of experience and update, model FLOP utilisation (useful FLOP of the update over what the GPU's
maker promises in bfloat16, and over a large matrix product here), and the highest memory. It needs torch, transformers,
deepspeed, safetensors, pydantic and pyarrow, and no more. `--tiny` is the same at a tiny size, also without a GPU.
Writes `benchmarks/results/gpu.json`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from benchmarks import report
from benchmarks.shapes import SHAPES

SETTINGS = {
    "weights in bfloat16": ("--dtype", "bfloat16", "--zero-stage", "1"),
    "products in bfloat16": ("--compute-dtype", "bfloat16"),
}
# Dense bfloat16 TFLOP/s in the makers' data sheets, by a part of the name.
PROMISED = {"H100 PCIe": 756.0, "H100": 989.0, "H200": 989.0, "A100": 312.0, "L40S": 362.0, "L40": 181.0, "L4": 121.0}


def main() -> None:
    """All shapes and settings, each in a process of its own."""
    parser = report.arguments(__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["qwen-0.5B", "qwen-1.5B"])
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=16_384, help="in a microbatch, at most")
    parser.add_argument("--ranks", type=int, default=1, help="as many GPUs")
    parser.add_argument("--peak", type=float, help="the GPU's dense bfloat16 TFLOP/s, where its name is not known here")
    parser.add_argument("--tiny", action="store_true", help="tiny models, one iteration")
    given = parser.parse_args()
    if given.tiny:
        given.shapes, given.iterations, given.tokens = ["qwen-tiny"], 1, 128
    figures = list[dict[str, Any]]()
    for shape in given.shapes:
        for name, options in SETTINGS.items():
            common = ("--iterations", str(given.iterations), "--tokens", str(given.tokens), "--ranks", str(given.ranks))
            figures.append(measured(shape, name, (*common, *options)))
            report.save("gpu", given, figures)
    columns = (
        "model, setting",
        "experience tokens/s",
        "update tokens/s",
        "update MFU",
        "of the matmul rate",
        "peak GiB",
    )
    rows = [row_of(one, given.peak, given.ranks) for one in figures]
    if all("failed" in one for one in figures):
        raise SystemExit("nothing could be measured")
    report.show(f"training engine on {figures[0].get('machine', {}).get('gpu') or 'a CPU'}", columns, rows)


def measured(shape: str, name: str, options: tuple[str, ...]) -> dict[str, Any]:
    """What `benchmarks.training_jobs` says, or why it says nothing: the memory may be too small."""
    command = [sys.executable, "-m", "benchmarks.training_jobs", shape, *options]
    environment = {**os.environ, "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    case = {"shape": shape, "setting": name}
    if done.returncode != 0:
        print(f"{shape}, {name}: {done.stderr[-2000:]}", file=sys.stderr)
        return {**case, "failed": done.stderr.strip().splitlines()[-1:]}
    return {**case, **json.loads(done.stdout.splitlines()[-1])}


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
