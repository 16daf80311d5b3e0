"""Does a run that is killed again and again end as if nothing had happened? The demo's loop at a small size, and DPO.

    python -m benchmarks.chaos [--kills 40] [--seed 0] [--algorithm NAME] [--home .ppoflow/chaos]

Kills the flow process, each engine (also a second rank) and writers in the middle of a write, at seeded random moments
of all stages, starts the same command again whenever the flow process died, and compares the policy of every iteration,
byte for byte, with an uninterrupted run's; of DPO, which has no iterations, every file of every artifact. Each run
trains by another algorithm, in an order drawn by the seed, or all by the one named. Prints two tables, and writes
`benchmarks/results/chaos.json`; what that has of DPO stays where another algorithm is named, and the other way round.
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

from benchmarks.attacks import DPO, TRAINING, Attack, Flow, Outcome, Victim, delay, made, policies
from benchmarks.report import machine

RESULTS = Path("benchmarks/results/chaos.json")
ITERATIONS = 10
TIMEOUTS = ["engines.timeout_s=60", "engines.reward_timeout_s=60"]
OPTIONS = {"train": [f"iterations={ITERATIONS}", "checkpoint.every=3", *TIMEOUTS], "dpo": TIMEOUTS}
VARIANTS = {"1 rank": [], "2 ranks": ["training.num_ranks=2", "training.zero_stage=1"]}
GROUPS = ["rollout.prompts_per_iteration=8", "rollout.samples_per_prompt=4"]
ALGORITHMS = {
    **{"ppo": [], "vapo": [], "ppo_shared": [], "kl_penalty_ppo": [], "reinforce": []},
    **{"rloo": GROUPS, "grpo": GROUPS, "dpo": []},
}
ATTACKS_PER_RUN = 5
MOST_STOPS = 2


def main() -> int:
    """Attack runs until enough kills are done; the exit status says whether all was as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--algorithm", choices=ALGORITHMS, help="of all runs; else all of them in turn")
    parser.add_argument("--home", type=Path, default=Path(".ppoflow/chaos"))
    arguments = parser.parse_args()
    home = arguments.home.absolute()
    shutil.rmtree(home, ignore_errors=True)
    numbers = random.Random(arguments.seed)
    algorithms = [arguments.algorithm] if arguments.algorithm else numbers.sample([*ALGORITHMS], len(ALGORITHMS))
    expected: dict[tuple[str, str], list[str]] = {}
    runs: list[dict[str, Any]] = []
    for number, algorithm in enumerate(itertools.cycle(algorithms)):
        left, stops = arguments.kills - summary(runs)["attacks"], sum(o["how"] == "stop" for o in outcomes_of(runs))
        if not left:
            break
        flow = DPO if algorithm == "dpo" else TRAINING
        variant = "2 ranks" if number % 4 == 1 else "1 rank"
        options = options_of(flow, variant, algorithm)
        attacks = planned(flow, variant, min(left, ATTACKS_PER_RUN), MOST_STOPS - stops, numbers)
        if (variant, algorithm) not in expected:
            expected[variant, algorithm] = undisturbed(Victim(home / f"whole-{number}", options, flow), variant)
        run = Victim(home / f"run-{number}", options, flow)
        found = attacked(run, variant, attacks, numbers, expected[variant, algorithm])
        runs.append({"algorithm": algorithm, **found})
    write(arguments.seed, runs)
    show(runs)
    return 0 if summary(runs)["survived"] == arguments.kills else 1


def planned(flow: Flow, variant: str, count: int, stops: int, numbers: random.Random) -> list[Attack]:
    """Attacks of one run: moments and victims by chance, and at most so many that hang instead of dying. Where there is
    a second rank, one of those that can hit it does."""
    moments = [*flow.moments]
    chosen = numbers.sample(moments, min(count, len(moments)))
    able = [moment for moment in chosen if variant == "2 ranks" and "rank 1" in flow.moments[moment].victims]
    second = numbers.choice(able) if able else None
    attacks = []
    in_order = moments.index if flow.once else lambda moment: not flow.moments[moment].first
    for moment in sorted(chosen, key=in_order):
        victims = [one for one in flow.moments[moment].victims if one != "rank 1" or able]
        victim = "rank 1" if moment == second else numbers.choice(victims)
        how = "stop" if victim in ("rollout", "training") and stops > 0 else "kill"
        stops -= how == "stop"
        attacks.append(Attack(victim, moment, how))
    return attacks


def options_of(flow: Flow, variant: str, algorithm: str) -> list[str]:
    """The command's options."""
    kind = [f"algorithm.kind={algorithm}"] if flow is TRAINING else []
    settings = *OPTIONS[flow.command], *VARIANTS[variant], *kind, *ALGORITHMS[algorithm]
    return [part for text in settings for part in ("--set", text)]


def digests(run: Victim) -> list[str]:
    """What is to be the same after all."""
    return policies(run.store) if run.flow is TRAINING else made(run.store)


def undisturbed(run: Victim, variant: str) -> list[str]:
    """The digests that an uninterrupted run gives."""
    run.finish()
    print(f"uninterrupted {run.flow.command}, {variant}, {' '.join(run.options[1::2])}")
    return digests(run)


def attacked(
    run: Victim, variant: str, attacks: list[Attack], numbers: random.Random, expected: list[str]
) -> dict[str, Any]:
    """One run with the attacks, as far as it is not done before."""
    outcomes = list(strike(run, attacks, numbers))
    run.finish()
    same = digests(run) == expected
    print(f"{variant}: {len(outcomes)} attacks, {run.starts} starts, {'the same bytes' if same else 'DIFFERENT'}")
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
    for attack in attacks:
        outcome = run.suffer(attack, delay(attack, numbers, run.flow))
        if outcome is None:
            return
        print(f"  {outcome.attack} at {outcome.iteration}: one more after {outcome.recovered_s:.1f} s")
        yield outcome


def outcomes_of(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of all runs."""
    return [outcome for run in runs for outcome in run["outcomes"]]


def write(seed: int, runs: list[dict[str, Any]]) -> None:
    """The results; those of algorithms that had no run here are kept, of DPO under its own name."""
    found: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    by_dpo = [run for run in runs if run["algorithm"] == "dpo"]
    others = [run for run in runs if run["algorithm"] != "dpo"]
    if others:
        found |= {"machine": machine(), "seed": seed, "runs": others, **summary(others)}
    if by_dpo:
        found["dpo"] = {"machine": machine(), "seed": seed, "runs": by_dpo, **summary(by_dpo)}
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """How many attacks, and how many of them were survived with the same bytes and nothing left behind."""
    clean = [run for run in runs if run["same"] and not run["half_artifacts"] and not run["left_running"]]
    survived = [o for run in clean for o in run["outcomes"] if not o["orphans"] and not o["half_artifacts"]]
    return {"attacks": len(outcomes_of(runs)), "survived": len(survived)}


def show(runs: list[dict[str, Any]]) -> None:
    """A line for each run, and one for each victim and moment."""
    of_runs = Table("algorithm", "ranks", "attacks", "starts", "bytes", title="runs")
    for run in runs:
        same = "the same" if run["same"] else "DIFFERENT"
        of_runs.add_row(run["algorithm"], run["variant"], str(len(run["outcomes"])), str(run["starts"]), same)
    Console().print(of_runs)
    table = Table("victim", "moment", "how", "attacks", "seconds to the next record or artifact, median", title="chaos")
    outcomes = outcomes_of(runs)
    for group in sorted({(o["victim"], o["moment"], o["how"]) for o in outcomes}):
        seconds = sorted(o["recovered_s"] for o in outcomes if (o["victim"], o["moment"], o["how"]) == group)
        table.add_row(*group, str(len(seconds)), f"{seconds[len(seconds) // 2]:.1f}")
    Console().print(table)
    found = summary(runs)
    print(f"{found['survived']} of {found['attacks']} survived with the same bytes, no orphan and no half artifact")


if __name__ == "__main__":
    sys.exit(main())
