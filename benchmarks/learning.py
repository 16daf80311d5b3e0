"""Does PPO learn the demo's task? Three seeds, each a whole run from nothing, through the command line.

    python -m benchmarks.learning [--seeds 0 1 2] [--against SETTINGS ...] [--home .ppoflow/benchmarks] [--trl FOLDER]

`--against training.compute_dtype=bfloat16 advantages.gamma=0.99,update.clip_low=0.1` also runs every seed with these
settings, each time beside the demo's own. TRL's PPOTrainer, where its environment is (`benchmarks.iteration` makes it),
learns the same from each start, from the first one at three learning rates. Prints held-out accuracy by iteration and
where the seconds went, and writes `benchmarks/results/learning.json`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyarrow import parquet
from rich.console import Console
from rich.table import Table

from benchmarks.iteration import has_trl
from benchmarks.report import machine, ppoflow, versions

SPEC = Path("examples/arithmetic/demo.yaml")
RESULTS = Path("benchmarks/results/learning.json")
PARTS = ("store", "hops", "tracking", "prefect_and_rest")
ITERATIONS = 30
PEER_RATES = ("1.5e-4", "1e-4", "3e-4")
"""The demo's rate, on every seed, and on the first one others. TRL's default is 3e-6, for models of billions."""


def main() -> None:
    """Run all seeds, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--against", nargs="*", default=[], metavar="SETTINGS", help="spec.path=value,...")
    parser.add_argument("--home", type=Path, default=Path(".ppoflow/benchmarks"))
    parser.add_argument("--trl", type=Path, default=Path(".ppoflow/trl"), help="the folder of TRL's environment")
    arguments = parser.parse_args()
    python = arguments.trl.absolute() / "bin/python"
    sides = [[], *(side.split(",") for side in arguments.against)]
    beside = has_trl(arguments.trl.absolute())
    results, peers = list[dict[str, Any]](), [] if beside else measured_before()
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    for seed in arguments.seeds:
        for side in sides:
            results.append(run_seed(seed, arguments.home, side))
            write(results, peers)
        if beside:
            start = next(result["run"] for result in results if result["seed"] == seed)
            for rate in PEER_RATES if seed == arguments.seeds[0] else PEER_RATES[:1]:
                peers.append(trl(python, arguments.home, start, seed, rate))
                write(results, peers)
    show(results)
    show_peers(peers)


def measured_before() -> list[dict[str, Any]]:
    """TRL's rows of the last time that it was there."""
    return list(json.loads(RESULTS.read_text())["trl"]) if RESULTS.exists() else []


def write(results: list[dict[str, Any]], peers: list[dict[str, Any]]) -> None:
    """What is known so far."""
    facts = {"machine": machine(), "versions": versions(), "spec": str(SPEC)}
    RESULTS.write_text(json.dumps({**facts, "seeds": results, "trl": peers}, indent=1) + "\n")


def trl(python: Path, home: Path, run: str, seed: int, rate: str) -> dict[str, Any]:
    """TRL's PPOTrainer on the run's prompts, from its supervised start, and the accuracy on what it holds out."""
    record = json.loads((home / f"store/runs/{run}/iterations/000000.json").read_text())
    start, dataset = (Path(record[name]["uri"].removeprefix("file://")) for name in ("reference", "dataset"))
    files = {split: home.absolute() / f"{split}.json" for split in ("train", "eval")}
    for split, path in files.items():
        rows = parquet.read_table(dataset / f"{split}.parquet").to_pylist()
        path.write_text(json.dumps([{"ids": row["prompt_token_ids"], **texts(row)} for row in rows]))
    program, reward = Path(__file__).with_name("trl_iterations.py"), SPEC.with_name("reward.py").absolute()
    task = ["--task", reward, files["eval"], "--learning-rate", rate, "--seed", str(seed)]
    done = subprocess.run(
        [python, program, start / "policy", files["train"], "--iterations", str(ITERATIONS), *task],
        cwd=home,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    accuracy = {number: line["accuracy"] for number, line in enumerate(lines, 1) if "accuracy" in line}
    return {"seed": seed, "learning_rate": rate, "accuracy": accuracy}


def texts(row: Mapping[str, Any]) -> dict[str, str]:
    """Prompt and right answer of a row of the dataset."""
    return {"prompt": row["prompt"], "answer": json.loads(row["reference_answer"])}


def run_seed(seed: int, home: Path, settings: list[str]) -> dict[str, Any]:
    """One run with some settings, `spec.path=value`; its curves come from its records."""
    name = f"seed-{seed}-{int(time.time())}"
    changes = [part for change in (f"seed={seed}", *settings) for part in ("--set", change)]
    started = time.perf_counter()
    subprocess.run(ppoflow(home, "train", str(SPEC), "--run", name, *changes), check=True)
    seconds = time.perf_counter() - started
    files = sorted((home / "store" / "runs" / name / "iterations").glob("*.json"))
    records = [json.loads(path.read_text())["metrics"] for path in files]
    return {"run": name, "seed": seed, "settings": settings, "seconds": seconds, **summary(records)}


def summary(records: list[dict[str, float]]) -> dict[str, Any]:
    """Curves, and medians over the iterations from the second on."""
    later = records[2:]

    def median(name: str) -> float:
        return statistics.median(record.get(name, 0.0) for record in later)

    return {
        "accuracy": curve(records, "evaluation/accuracy"),
        "greedy_accuracy": curve(records, "evaluation/greedy_accuracy"),
        "score": curve(records, "score/mean"),
        "kl": curve(records, "kl/reference"),
        "response_length": curve(records, "rollout/response_length"),
        "sampler_logprob_difference_max": max(r.get("sampler/logprob_difference_max", 0.0) for r in records),
        "seconds_ppo": sum(record["seconds/iteration"] for record in records[1:]),
        "seconds_per_iteration": median("seconds/iteration"),
        "seconds_outside_engines": {
            "median": median("seconds/outside_engines"),
            "largest": max(record["seconds/outside_engines"] for record in later),
            **{part: median(f"seconds/outside_{part}") for part in PARTS},
        },
    }


def curve(records: list[dict[str, float]], name: str) -> dict[int, float]:
    """Iteration -> value, where it was measured."""
    return {iteration: record[name] for iteration, record in enumerate(records) if name in record}


def show(results: list[dict[str, Any]]) -> None:
    """The table a person reads."""
    accuracy = Table(title="held-out accuracy, sampled at temperature 1 (greedy)")
    iterations = sorted(results[0]["accuracy"])
    for name in ("seed", "settings", *(str(i) for i in iterations), "minutes", "PPO", "s / iteration", "s outside"):
        accuracy.add_column(name, justify="right")
    for result in results:
        cells = [f"{result['accuracy'][i]:.3f} ({result['greedy_accuracy'][i]:.2f})" for i in iterations]
        minutes, ppo = result["seconds"] / 60, result["seconds_ppo"] / 60
        outside = result["seconds_outside_engines"]["median"]
        times = [f"{minutes:.1f}", f"{ppo:.1f}", f"{result['seconds_per_iteration']:.1f}", f"{outside:.2f}"]
        accuracy.add_row(str(result["seed"]), ",".join(result["settings"]), *cells, *times)
    console = Console(width=200)
    console.print(accuracy)
    for result in results:
        parts = result["seconds_outside_engines"]
        made_of = ", ".join(f"{part} {parts[part]:.3f}" for part in PARTS)
        side = " ".join([f"seed {result['seed']}", *result["settings"]])
        console.print(f"{side}: seconds outside the engines per iteration (medians): {made_of}")


def show_peers(peers: list[dict[str, Any]]) -> None:
    """The same of TRL."""
    table = Table(title="TRL's PPOTrainer, from the same starts: held-out accuracy at temperature 1")
    for name in ("seed", "learning rate", *(str(number) for number in (peers[0]["accuracy"] if peers else ()))):
        table.add_column(name, justify="right")
    for peer in peers:
        table.add_row(str(peer["seed"]), peer["learning_rate"], *(f"{one:.3f}" for one in peer["accuracy"].values()))
    if peers:
        Console(width=200).print(table)


if __name__ == "__main__":
    main()
