"""Does a run that is killed again and again end as if nothing had happened? The demo's loop at a small size.

    python -m benchmarks.chaos [--kills 30] [--seed 0] [--algorithm NAME] [--home .ppoflow/chaos]

Kills the flow process, each engine (also a second rank) and writers in the middle of a write, at seeded random moments
of all stages, starts the same command again whenever the flow process died, and compares the policy of every iteration,
byte for byte, with an uninterrupted run's. Each run trains by another algorithm, in an order drawn by the seed, or all
by the one named. Prints two tables, and writes `benchmarks/results/chaos.json`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.attacks import MOMENTS, Attack, Outcome, Victim, delay, policies

RESULTS = Path("benchmarks/results/chaos.json")
ITERATIONS = 10
OPTIONS = [f"iterations={ITERATIONS}", "checkpoint.every=3", "engines.timeout_s=60", "engines.reward_timeout_s=60"]
VARIANTS = {"1 rank": [], "2 ranks": ["training.num_ranks=2", "training.zero_stage=1"]}
GROUPS = ["rollout.prompts_per_iteration=8", "rollout.samples_per_prompt=4"]
ALGORITHMS = {
    **{"ppo": [], "vapo": [], "ppo_shared": [], "kl_penalty_ppo": [], "reinforce": []},
    **{"rloo": GROUPS, "grpo": GROUPS},
}
ATTACKS_PER_RUN = 5
BY_MOMENT = {
    "generate": ("flow", "rollout"),
    "score": ("flow", "scoring"),
    "advantages": ("flow", "training", "rank 1"),
    "update": ("flow", "training", "rank 1"),
    "mid-write": ("flow",),
}


def main() -> int:
    """Attack runs until enough kills are done; the exit status says whether all was as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--algorithm", choices=ALGORITHMS, help="of all runs; else all of them in turn")
    parser.add_argument("--home", type=Path, default=Path(".ppoflow/chaos"))
    arguments = parser.parse_args()
    home = arguments.home.absolute()
    shutil.rmtree(home, ignore_errors=True)
    numbers = random.Random(arguments.seed)
    attacks = planned(arguments.kills, numbers)
    algorithms = [arguments.algorithm] if arguments.algorithm else numbers.sample([*ALGORITHMS], len(ALGORITHMS))
    expected: dict[tuple[str, str], list[str]] = {}
    runs: list[dict[str, Any]] = []
    for number, algorithm in enumerate(itertools.cycle(algorithms)):
        if not any(attacks.values()):
            break
        variant = next(name for name in itertools.islice(itertools.cycle(VARIANTS), number, None) if attacks[name])
        options = options_of(variant, algorithm)
        if (variant, algorithm) not in expected:
            expected[variant, algorithm] = undisturbed(home / f"whole-{number}", variant, options)
        run = Victim(home / f"run-{number}", options)
        found = attacked(run, variant, attacks[variant], numbers, expected[variant, algorithm])
        runs.append({"algorithm": algorithm, **found})
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps({"seed": arguments.seed, "runs": runs, **summary(runs)}, indent=1) + "\n")
    show(runs)
    return 0 if summary(runs)["survived"] == arguments.kills else 1


def planned(kills: int, numbers: random.Random) -> dict[str, list[Attack]]:
    """Attacks for each variant: all moments in turn, victims by chance; two of them hang instead of dying."""
    plan: dict[str, list[Attack]] = {name: [] for name in VARIANTS}
    for number, moment in zip(range(kills), itertools.cycle(MOMENTS), strict=False):
        victim = numbers.choice(BY_MOMENT[moment])
        engine = victim in ("rollout", "training")
        how = "stop" if engine and sum(a.how == "stop" for a in (*plan["1 rank"], *plan["2 ranks"])) < 2 else "kill"
        variant = "2 ranks" if victim == "rank 1" or number % 4 == 3 else "1 rank"
        plan[variant].append(Attack(victim, moment, how))
    for attacks in plan.values():
        numbers.shuffle(attacks)
    return plan


def options_of(variant: str, algorithm: str) -> list[str]:
    """The command's options."""
    settings = *OPTIONS, *VARIANTS[variant], f"algorithm.kind={algorithm}", *ALGORITHMS[algorithm]
    return [part for text in settings for part in ("--set", text)]


def undisturbed(home: Path, variant: str, options: list[str]) -> list[str]:
    """The digests that an uninterrupted run gives."""
    run = Victim(home, options)
    run.finish()
    print(f"uninterrupted, {variant}, {' '.join(options[1::2])}")
    return policies(run.store)


def attacked(
    run: Victim, variant: str, attacks: list[Attack], numbers: random.Random, expected: list[str]
) -> dict[str, Any]:
    """One run with up to ATTACKS_PER_RUN of the attacks, which are taken from the list."""
    outcomes = list(strike(run, attacks, numbers))
    run.finish()
    same = policies(run.store) == expected
    print(f"{variant}: {len(outcomes)} attacks, {run.starts} starts, {'the same policies' if same else 'DIFFERENT'}")
    return {
        "variant": variant,
        "settings": run.options[1::2],
        "starts": run.starts,
        "same": same,
        "half_artifacts": run.half_artifacts(),
        "left_running": len(list(run.processes())),
        "outcomes": [outcome.document() for outcome in outcomes],
    }


def strike(run: Victim, attacks: list[Attack], numbers: random.Random) -> Iterator[Outcome]:
    """Attack until the run is done or has had enough."""
    for _ in range(ATTACKS_PER_RUN):
        if not attacks:
            return
        outcome = run.suffer(attacks[0], delay(attacks[0], numbers))
        if outcome is None:
            return
        attacks.pop(0)
        print(f"  {outcome.attack} at iteration {outcome.iteration}: next commit after {outcome.recovered_s:.1f} s")
        yield outcome


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """How many attacks, and how many of them were survived with the same bytes and nothing left behind."""
    clean = [run for run in runs if run["same"] and not run["half_artifacts"] and not run["left_running"]]
    survived = [o for run in clean for o in run["outcomes"] if not o["orphans"] and not o["half_artifacts"]]
    return {"attacks": sum(len(run["outcomes"]) for run in runs), "survived": len(survived)}


def show(runs: list[dict[str, Any]]) -> None:
    """A line for each run, and one for each victim and moment."""
    of_runs = Table("algorithm", "ranks", "attacks", "starts", "policies", title="runs")
    for run in runs:
        same = "the same" if run["same"] else "DIFFERENT"
        of_runs.add_row(run["algorithm"], run["variant"], str(len(run["outcomes"])), str(run["starts"]), same)
    Console().print(of_runs)
    table = Table("victim", "moment", "how", "attacks", "seconds to the next commit, median", title="chaos")
    outcomes = [outcome for run in runs for outcome in run["outcomes"]]
    for group in sorted({(o["victim"], o["moment"], o["how"]) for o in outcomes}):
        seconds = sorted(o["recovered_s"] for o in outcomes if (o["victim"], o["moment"], o["how"]) == group)
        table.add_row(*group, str(len(seconds)), f"{seconds[len(seconds) // 2]:.1f}")
    Console().print(table)
    found = summary(runs)
    print(f"{found['survived']} of {found['attacks']} survived with the same bytes, no orphan and no half artifact")


if __name__ == "__main__":
    sys.exit(main())
