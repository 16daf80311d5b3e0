"""Whole iterations beside TRL's PPOTrainer: same policy, prompts, longest response, epochs and minibatches.

    python -m benchmarks.iteration [--cases demo 27M …] [--sides NAME …] [--rounds 3] [--iterations 7]

`demo` is the example after its supervised start, `27M` a new model with a vocabulary of 32,000 that never ends before
64 tokens, `27M-mixed` the same after a supervised start on responses of 8 to 64 tokens: both sides stop at its <eos>.
Neither side's policy moves (its rate is next to nothing), so that both sample responses of the same lengths.
TRL is installed into an environment of its own (`--trl`), the first time. Each round runs every side once,
so that a busy machine is busy for all. Prints medians over iterations from the third on, and writes them into
`benchmarks/results/iteration.json`, beside those of cases that are not run; of a case, the sides that are run are all
that it has then.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import yaml
from pyarrow import parquet
from rich.console import Console
from rich.table import Table

from benchmarks.report import arguments, at_least, machine, ppoflow, versions
from benchmarks.shapes import PROMPT, SHAPES, write_tokenizer

TRL = "trl==1.12.0"  # the last version with a PPOTrainer
PARTS = ("rollout", "experience", "update", "iteration")
TOKENS = "tokens"
"""Mean length of the responses, which says whether both sides do the same work."""
STAGES = {
    "rollout": ("seconds/generate_rollouts",),
    "experience": ("seconds/score_rollouts", "seconds/compute_advantages"),
    "update": ("seconds/update_policy",),
    "iteration": ("seconds/iteration",),
    TOKENS: ("rollout/response_length",),
}
OURS = {
    "ppoflow": ("training.compute_dtype=float32",),
    "ppoflow, products in bfloat16": ("training.compute_dtype=bfloat16",),
    # As TRL does, which keeps the logits of its sampling.
    "… and no pass for old logprobs": ("training.compute_dtype=bfloat16", "advantages.old_logprobs=sampler"),
}
PEERS: Mapping[str, tuple[str, ...]] = {TRL: (), f"{TRL}, bf16": ("--bf16",)}
WARM_UP = 2
SFT_STEPS, SFT_ROWS = 150, 32
STILL = "1e-9"
"""The learning rate of both sides: a policy that learns changes the length of its responses."""
CASES = ("demo", "27M", "27M-mixed")


@dataclass(frozen=True)
class Case:
    """A spec, and how many responses of what length it trains on, how often."""

    spec: Path
    responses: int = 256
    epochs: int = 2
    length: int = 48

    @property
    def peer_options(self) -> tuple[str, ...]:
        """The same for TRL."""
        return tuple(
            f"--{name}={value}"
            for name, value in (
                ("responses", self.responses),
                ("epochs", self.epochs),
                ("length", self.length),
                ("learning-rate", STILL),
            )
        )


def main() -> None:
    """All cases, all sides, in turns."""
    parser = arguments(__doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--sides", nargs="+", choices=[*PEERS, *OURS], default=[*PEERS, *OURS], metavar="NAME")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iterations", type=at_least(WARM_UP + 1), default=7)
    parser.add_argument("--home", type=Path, default=Path(".ppoflow/benchmarks"))
    parser.add_argument("--trl", type=Path, default=Path(".ppoflow/trl"), help="the folder of TRL's environment")
    given = parser.parse_args()
    home, python = given.home.absolute(), environment(given.trl.absolute())
    settings = {"rounds": given.rounds, "iterations": given.iterations}
    facts = {"machine": machine(), "versions": {**versions(), "trl": packages(python)}, "settings": settings}
    given.results.mkdir(parents=True, exist_ok=True)
    path = given.results / "iteration.json"
    document: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for name in given.cases:
        case = Case(Path("examples/arithmetic/demo.yaml")) if name == "demo" else large_case(home / name)
        found = compare(case, home, python, given)
        medians = {
            side: {part: statistics.median(one[part] for one in iterations) for part in (*PARTS, TOKENS)}
            for side, iterations in found.items()
        }
        document[name] = {**facts, "medians": medians, "iterations": found}  # of sides that were measured together
        path.write_text(json.dumps(document, indent=1) + "\n")
        show(name, medians)


def compare(case: Case, home: Path, python: Path, given: Namespace) -> dict[str, list[dict[str, float]]]:
    """Every side that is asked for, once a round."""
    policy, prompts = start(case, home)
    found: dict[str, list[dict[str, float]]] = {side: [] for side in given.sides}
    for _ in range(given.rounds):
        for side in given.sides:
            if side in PEERS:
                options = (*case.peer_options, *PEERS[side])
                found[side] += peer(python, policy, prompts, given.iterations, options)
            else:
                found[side] += ours(case, home, policy, given.iterations, OURS[side])
            say(side, found[side])
    return found


def say(side: str, iterations: list[dict[str, float]]) -> None:
    """What is known so far."""
    print(f"{side}: {statistics.median(one['iteration'] for one in iterations):.2f} s", file=sys.stderr, flush=True)


def large_case(folder: Path) -> Case:
    """A spec with a tokenizer of words, prompts of 16 of them, and a model that is made at the start."""
    mixed, dice = folder.name == "27M-mixed", Random(0)
    shape = SHAPES["27M" if mixed else "27M-fixed"]

    def words(number: int) -> str:
        return " ".join(f"w{dice.randrange(2, shape.vocabulary)}" for _ in range(number))

    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(shape.vocabulary, folder / "tokenizer")
    write_rows(
        folder / "prompts.jsonl", [{"prompt": words(PROMPT), "answer": "w2"} for _ in range(2 * shape.responses)]
    )
    spec = {
        "name": f"iteration-{folder.name}",
        "dataset": {"train": "prompts.jsonl", "max_prompt_tokens": PROMPT},
        "model": {"tokenizer": "tokenizer", "config": shape.config},
        "rollout": {"prompts_per_iteration": shape.responses, "max_response_tokens": shape.longest},
        "reward": {"sources": [{"kind": "regex", "pattern": "w1"}]},
        "update": {"num_ppo_epochs": shape.epochs},
    }
    if mixed:
        lengths = (dice.randint(shape.shortest, shape.longest - 1) for _ in range(SFT_STEPS * SFT_ROWS))
        examples = [{"prompt": words(PROMPT), "completion": words(length)} for length in lengths]
        write_rows(folder / "examples.jsonl", examples)
        spec["sft"] = {"data": "examples.jsonl", "num_steps": SFT_STEPS, "batch_size": SFT_ROWS, "learning_rate": 1e-3}
    (folder / "spec.yaml").write_text(yaml.safe_dump(spec))
    return Case(folder / "spec.yaml", shape.responses, shape.epochs, shape.longest)


def write_rows(path: Path, rows: Sequence[Mapping[str, str]]) -> None:
    """As JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def has_trl(folder: Path) -> bool:
    """Whether the folder is an environment with TRL, which pip installs after all that it needs."""
    python = folder / "bin/python"
    asked = [python, "-c", "import importlib.metadata as m; m.version('trl')"]
    return python.exists() and not subprocess.run(asked, stderr=subprocess.DEVNULL, check=False).returncode


def environment(folder: Path) -> Path:
    """The Python of TRL's environment, which is made where there is none, or one without TRL."""
    python = folder / "bin/python"
    if not has_trl(folder):
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        torch = subprocess.run(
            [sys.executable, "-c", "import torch; print(torch.__version__.partition('+')[0])"],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout.strip()
        subprocess.run([python, "-m", "pip", "install", "--quiet", f"torch=={torch}", TRL], check=True)
    return python


def packages(python: Path) -> dict[str, str]:
    """What TRL's environment has, but for what these need: pip chose the versions when it was made."""
    names = ("trl", "torch", "transformers", "accelerate")
    program = f"import importlib.metadata as m; print(*map(m.version, {names}))"
    done = subprocess.run([python, "-c", program], stdout=subprocess.PIPE, text=True, check=True)
    return dict(zip(names, done.stdout.split(), strict=True))


def train(case: Case, home: Path, run: str, *settings: str) -> list[dict[str, Any]]:
    """A run, and its records."""
    changes = [part for setting in settings for part in ("--set", setting)]
    command = ppoflow(home, "train", str(case.spec), "--run", run, *changes)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return [json.loads(path.read_text()) for path in sorted((home / f"store/runs/{run}/iterations").glob("*.json"))]


def start(case: Case, home: Path) -> tuple[Path, Path]:
    """The folder of the policy that the spec starts from, and a file of the prompts' token ids."""
    first = train(case, home, f"start-{int(time.time())}", "iterations=1", "evaluation.every=1000")[0]
    places = [Path(reference["uri"].removeprefix("file://")) for reference in (first["reference"], first["dataset"])]
    prompts = home / "prompts.json"
    table = parquet.read_table(places[1] / "train.parquet", columns=["prompt_token_ids"])
    prompts.write_text(json.dumps(table["prompt_token_ids"].to_pylist()))
    return places[0] / "policy", prompts


def ours(case: Case, home: Path, policy: Path, iterations: int, settings: tuple[str, ...]) -> list[dict[str, float]]:
    """Seconds of each iteration after the warm-up, by stage; those outside the engines are in `iteration`."""
    number = time.time_ns()
    # Another seed each time: nothing is found in the store. The last iteration is evaluated, and left out.
    changes = (f"seed={number % 10**6}", f"iterations={iterations + 1}", "evaluation.every=1000")
    # TRL writes no checkpoints here. Ours has the policy in files always, since the sampler reads it there.
    changes += (f"checkpoint.every={iterations + 1}",)
    start_there = ("sft=null", f"model={{path: {policy}}}", f"update.learning_rate={STILL}")
    records = train(case, home, f"run-{number}", *changes, *start_there, *settings)
    metrics = [record["metrics"] for record in records[1 + WARM_UP : -1]]
    return [{part: sum(one[name] for name in names) for part, names in STAGES.items()} for one in metrics]


def peer(
    python: Path, policy: Path, prompts: Path, iterations: int, options: tuple[str, ...]
) -> list[dict[str, float]]:
    """The same of TRL."""
    program = Path(__file__).with_name("trl_iterations.py")
    done = subprocess.run(
        [python, program, policy, prompts, "--iterations", str(iterations), *options],
        cwd=prompts.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=True,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return lines[WARM_UP:]


def show(case: str, medians: Mapping[str, Mapping[str, float]]) -> None:
    """Ratios above 1 are faster than TRL, than the faster of its two where both were measured."""
    best = min((medians[name]["iteration"] for name in medians if name in PEERS), default=math.nan)
    table = Table(title=f"{case}: seconds of an iteration, medians")
    for column in ("", *PARTS, TOKENS, "faster than TRL"):
        table.add_column(column, justify="right" if column else "left")
    for name, parts in medians.items():
        table.add_row(name, *(f"{parts[part]:.2f}" for part in (*PARTS, TOKENS)), f"{best / parts['iteration']:.2f}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
