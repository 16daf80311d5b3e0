"""Every algorithm, and the switches that matter, on the demo's task: as many responses as the demo, the same seeds.

    python -m benchmarks.variants [--only NAME ...] [--seeds 0 1 2] [--iterations 10] [--home .ppoflow/benchmarks]

Each row is examples/arithmetic/demo.yaml with a few other settings, of which the rates fall as they do in 30
iterations. The supervised start of a seed is made once. Prints held-out accuracy, the last iteration's KL per response
and the response tokens that were learned from, and writes `benchmarks/results/variants.json` after each run: what that
has of a row is not run again.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.learning import run_seed
from benchmarks.report import machine

RESULTS = Path("benchmarks/results/variants.json")
GROUPS = ("rollout.prompts_per_iteration=64", "rollout.samples_per_prompt=4")
VARIANTS: Mapping[str, tuple[str, ...]] = {
    "demo": (),
    "ppo_shared": ("algorithm.kind=ppo_shared",),
    "kl_penalty_ppo": ("algorithm.kind=kl_penalty_ppo",),
    "reinforce": ("algorithm.kind=reinforce",),
    "rloo, 4 a prompt": ("algorithm.kind=rloo", *GROUPS, "advantages.whiten=false"),
    "grpo, 4 a prompt": ("algorithm.kind=grpo", *GROUPS, "advantages.whiten=false"),
    "grpo as in DAPO": (
        *("algorithm.kind=grpo", *GROUPS, "rollout.dynamic_sampling.max_batches=3", "advantages.kl.coef=0"),
        *("advantages.whiten=false", "update.clip_high=0.28"),
    ),
    "vapo": (
        *("algorithm.kind=vapo", "advantages.kl.coef=0", "update.clip_high=0.28"),
        "update.critic_warmup_iterations=1",
    ),
    "warm-up of 5 iterations": ("update.warmup_iterations=5",),
    "critic's rate 3e-4": ("update.critic_learning_rate=3e-4",),
    "policy's rate 1e-4": ("update.learning_rate=1e-4",),
    "one epoch": ("update.num_ppo_epochs=1",),
    "four epochs": ("update.num_ppo_epochs=4",),
    "not whitened": ("advantages.whiten=false",),
    "gae_lambda 1": ("advantages.gae_lambda=1",),
    "KL in the loss": ("advantages.kl.coef=0", "update.kl_loss_coef=0.01"),
    "KL coefficient 0.05": ("advantages.kl.coef=0.05",),
    "mean over responses": ("update.aggregation=sequence_mean_token_mean",),
    "value_clip 0.2": ("update.value_clip=0.2",),
    "dual_clip 3": ("update.dual_clip=3",),
    "entropy bonus of 0.01": ("update.entropy_coef=0.01",),
    "adaptive KL, target 0.5": ("advantages.kl={kind: adaptive, coef: 0.01, target: 0.5}",),
    "whitened in minibatches": ("advantages.whiten=minibatch",),
    "whitened, not centred": ("advantages.whiten_centred=false",),
    "scores over their deviation": ("advantages.score_norm=std",),
    "critic alone for 2 iterations": ("update.critic_warmup_iterations=2",),
    "cosine": ("update.schedule=cosine",),
    "reference every 2 iterations": ("advantages.reference={kind: every, iterations: 2}",),
    "the policy's average, decay 0.5": ("update.ema_decay=0.5", "evaluation.weights=ema"),
    "LoRA of rank 16, rate 1.5e-3": ("model.lora.rank=16", "update.learning_rate=1.5e-3"),
    "overlapped": ("schedule=overlapped", "update.importance_correction=token"),
    "products in bfloat16": ("training.compute_dtype=bfloat16",),
    "the sampler's logprobs": ("advantages.old_logprobs=sampler",),
    "curriculum over 5 iterations": (
        "dataset.train=generate.py:graded",
        "dataset.curriculum={column: terms, prompts: 1280}",
    ),
    "bf16 and the sampler's logprobs": ("training.compute_dtype=bfloat16", "advantages.old_logprobs=sampler"),
}
RESPONSES = 256
"""Of an iteration that are learned from, in every row."""
SCHEDULE = ("update.decay_iterations=30", "evaluation.every=5")


def main() -> None:
    """All rows on one seed, then on the next."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*VARIANTS], default=[*VARIANTS], metavar="NAME")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--home", type=Path, default=Path(".ppoflow/benchmarks"))
    given = parser.parse_args()
    runs: list[dict[str, Any]] = json.loads(RESULTS.read_text())["runs"] if RESULTS.exists() else []
    for seed in given.seeds:
        for variant in given.only:
            settings = [*VARIANTS[variant], *SCHEDULE, f"iterations={given.iterations}"]
            if (seed, settings) in ((run["seed"], run["settings"]) for run in runs):
                continue
            runs.append({"variant": variant, "machine": machine(), **run_seed(seed, given.home, settings)})
            RESULTS.write_text(json.dumps({"runs": runs}, indent=1) + "\n")
    show(runs, given.iterations)


def show(runs: Sequence[Mapping[str, Any]], iterations: int) -> None:
    """A row for each variant: the mean over seeds, and the lowest and the highest of them."""
    measured = [step for step in sorted(accuracies(runs[0])) if step <= iterations]
    table = Table(title="held-out accuracy, sampled at temperature 1: mean (lowest to highest of the seeds)")
    for name in ("variant", "seeds", *(f"iteration {step}" for step in measured), "KL", "thousand tokens"):
        table.add_column(name, justify="right")
    for variant in dict.fromkeys(run["variant"] for run in runs):
        own = [run for run in runs if run["variant"] == variant]
        cells = [spread([accuracies(run)[step] for run in own]) for step in measured]
        kl = statistics.fmean([*run["kl"].values()][-1] for run in own)
        tokens = statistics.fmean(RESPONSES * sum(run["response_length"].values()) for run in own)
        table.add_row(variant, str(len(own)), *cells, f"{kl:.2f}", f"{tokens / 1000:.0f}")
    Console(width=160).print(table)


def accuracies(run: Mapping[str, Any]) -> dict[int, float]:
    """By iteration; JSON has made texts of the numbers."""
    return {int(step): value for step, value in run["accuracy"].items()}


def spread(values: Sequence[float]) -> str:
    """`mean (lowest to highest)`."""
    return f"{statistics.fmean(values):.3f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    main()
