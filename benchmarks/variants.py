"""Every algorithm, and the switches that matter, on the demo's task: as many responses as the demo, the same seeds.

    python -m benchmarks.variants [--only NAME ...] [--seeds 0 1 2] [--iterations 10] [--home .ppoflow/benchmarks]

Each row is examples/arithmetic/demo.yaml with a few other settings, of which the rates fall as they do in 30
iterations. The supervised start of a seed is made once. Prints held-out accuracy, the last iteration's KL per response
and the response tokens that were learned from, and writes `benchmarks/results/variants.json` after each run: what that
has of a row, on such a processor as this one, is not run again. Compare rows of one kind of processor.

DPO learns from preferences: a run whose policy stays what it was samples as many responses, and `ppoflow preferences`
makes pairs of them, from which `ppoflow dpo` teaches the same start.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from benchmarks.learning import SPEC, run_seed
from benchmarks.report import machine, ppoflow, processor

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
    "rates that stay": ("update.final_lr_fraction=1",),
    "sum over responses": ("update.aggregation=sequence_mean_token_sum",),
    "sum over the longest response": ("update.aggregation=fixed_length",),
    "importance correction of tokens": ("update.importance_correction=token",),
    "importance correction of responses": ("update.importance_correction=sequence",),
    "importance mask": ("update.importance_correction=mask",),
    "k3 in the loss": ("advantages.kl.coef=0", "update.kl_loss_coef=0.01", "update.kl_loss_estimator=k3"),
    "whole KL in the loss": ("advantages.kl.coef=0", "update.kl_loss_coef=0.01", "update.kl_loss_estimator=full"),
    "KL by length": ("advantages.kl={coef: 0.1, length_normalised: true}",),
    "KL that falls to 0": ("advantages.kl={coef: 0.01, schedule: linear}",),
    "grpo, scores not scaled": (
        *("algorithm.kind=grpo", "algorithm.scale=none", *GROUPS),
        "advantages.whiten=false",
    ),
    "lambda by length": ("advantages.gae_lambda_alpha=0.05",),
    "critic's lambda 1": ("advantages.critic_gae_lambda=1",),
    "cut responses masked": ("advantages.truncated=mask",),
    "cut responses bootstrapped": ("advantages.truncated=bootstrap",),
    "rewards whitened": ("advantages.whiten_rewards=true",),
    "scores less their mean": ("advantages.score_norm=mean_std",),
    "scores clipped at 0.5": ("advantages.score_clip=0.5",),
    "penalty without EOS": ("advantages.missing_eos_penalty=0.5",),
    "penalty near the limit": ("advantages.overlong={buffer: 10, penalty: 0.5}",),
    "epochs end at KL 0.01": ("update.max_kl=0.01",),
    "entropy bonus that falls": ("update.entropy_coef=0.01", "update.entropy_schedule=linear"),
    "reference as an average": ("advantages.reference={kind: ema, decay: 0.5}",),
    # Steps of 1e-30 change no weight in fp32; a rate of 0 is refused.
    "dpo": (
        *("algorithm.kind=reinforce", *GROUPS, "update.learning_rate=1e-30"),
        *("update.num_ppo_epochs=1", "update.num_minibatches=1", "evaluation.every=10"),
    ),
}
DPO = ("dpo.beta=0.1", "dpo.num_steps=60", "dpo.learning_rate=1.5e-4")
"""What the row of that name learns with."""
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
    known = [(run["seed"], run["settings"]) for run in runs if processor_of(run) == processor()]
    for seed in given.seeds:
        for variant in given.only:
            pairs = DPO if variant == "dpo" else ()
            settings = [*VARIANTS[variant], *(() if pairs else SCHEDULE), f"iterations={given.iterations}"]
            if (seed, [*settings, *pairs]) in known:
                continue
            run = run_seed(seed, given.home, settings)
            runs.append({"variant": variant, "machine": machine(), **(dpo(run, given.home, pairs) if pairs else run)})
            RESULTS.write_text(json.dumps({"runs": runs}, indent=1) + "\n")
    show(runs, given.iterations)


def dpo(run: Mapping[str, Any], home: Path, settings: Sequence[str]) -> dict[str, Any]:
    """What DPO makes of the start and the samples of a run, measured as at its end; nobody measures KL."""
    name, demo = run["run"], yaml.safe_load(SPEC.read_text())
    start = json.loads((home / f"store/runs/{name}/iterations/000000.json").read_text())["reference"]["uri"]
    pairs, spec = home.absolute() / f"{name}.jsonl", home.absolute() / f"{name}.yaml"
    same = {section: demo[section] for section in ("name", "dataset", "reward", "engines")}
    others = {
        "folder": str(SPEC.parent.absolute()),
        "preferences": {"train": str(pairs), "evaluation_fraction": 0.1, "max_tokens": 64},
        "model": {"path": f"{start.removeprefix('file://')}/policy"},
        "rollout": {"max_response_tokens": demo["rollout"]["max_response_tokens"]},
        "evaluation": {"num_prompts": demo["evaluation"]["num_prompts"]},
    }
    spec.write_text(json.dumps({**same, **others, "seed": run["seed"]}))
    said = command(home, "preferences", name, "--output", str(pairs))
    said += command(home, "dpo", str(spec), "--run", name, *(part for one in settings for part in ("--set", one)))
    words = [line.split() for line in said.splitlines()]
    found = {line[0]: float(line[1]) for line in words if len(line) == 2 and "evaluation/" in line[0]}
    ends = {0: "before/evaluation", len(run["score"]): "evaluation"}
    measured = {
        name: {step: found[f"{place}/{name}"] for step, place in ends.items()}
        for name in ("accuracy", "greedy_accuracy")
    }
    counted = said.splitlines()[0].partition(": ")[2]
    return {**run, **measured, "kl": {}, "pairs": counted, "settings": [*run["settings"], *settings]}


def command(home: Path, *words: str) -> str:
    """What a command of ppoflow says."""
    return subprocess.run(ppoflow(home, *words), check=True, stdout=subprocess.PIPE, text=True).stdout


def show(runs: Sequence[Mapping[str, Any]], iterations: int) -> None:
    """A table for each kind of processor."""
    for kind in dict.fromkeys(map(processor_of, runs)):
        show_rows([run for run in runs if processor_of(run) == kind], iterations, kind)


def show_rows(runs: Sequence[Mapping[str, Any]], iterations: int, kind: str) -> None:
    """A row for each variant: the mean over seeds, and the lowest and the highest of them."""
    measured = [step for step in sorted({step for run in runs for step in accuracies(run)}) if step <= iterations]
    title = f"held-out accuracy, sampled at temperature 1: mean (lowest to highest of the seeds), on {kind}"
    table = Table(title=title)
    for name in ("variant", "seeds", *(f"iteration {step}" for step in measured), "KL", "thousand tokens"):
        table.add_column(name, justify="right")
    for variant in dict.fromkeys(run["variant"] for run in runs):
        own = [run for run in runs if run["variant"] == variant]
        cells = [spread([accuracies(run)[step] for run in own if step in accuracies(run)]) for step in measured]
        kl = [[*run["kl"].values()][-1] for run in own if run["kl"]]
        tokens = statistics.fmean(RESPONSES * sum(run["response_length"].values()) for run in own)
        table.add_row(
            variant, str(len(own)), *cells, f"{statistics.fmean(kl):.2f}" if kl else "", f"{tokens / 1000:.0f}"
        )
    Console(width=160).print(table)


def processor_of(run: Mapping[str, Any]) -> str:
    """What the run was measured on; runs of before that was noted have no name of it."""
    return str((run.get("machine") or {}).get("processor", "processors that were not noted"))


def accuracies(run: Mapping[str, Any]) -> dict[int, float]:
    """By iteration; JSON has made texts of the numbers."""
    return {int(step): value for step, value in run["accuracy"].items()}


def spread(values: Sequence[float]) -> str:
    """`mean (lowest to highest)`; empty where nothing was measured."""
    return "" if not values else f"{statistics.fmean(values):.3f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    main()
