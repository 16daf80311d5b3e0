"""What compute_advantages and update_policy say to the iteration after; what training_program runs as carried/NAME."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from ppo_core.data.tables import write_rollouts, write_scores
from ppo_core.processes.ranks import Ranks
from ppo_core.records import ComputeAdvantagesJob, OptimizerSettings, RolloutRow, ScoreRow
from ppo_core.spec import AdaptiveKl, AdvantageSpec, FixedKl, KlPenaltyPpoSpec
from ppo_core.training.service import TrainingEngine
from tests.ppo_core.plain_torch import FIXED_LENGTH
from tests.ppo_core.tiny_models import ragged_sequences, tiny_folder
from tests.ppo_core.training.programs.deepspeed_program import Facts, make_start
from tests.ppo_core.training.programs.replay_program import do, given
from tests.ppo_core.training.update_cases import update_job

SEQUENCES = ragged_sequences(6)
TEMPERATURES = [0.5, 0.8, 1.0, 1.2, 1.5, 2.0]
SCORES = [3.0, 1.0, None, 9.0, 4.0, 2.0]
FINISHED = [True, True, True, False, True, True]
"""Row 2 has no score, and row 3 is cut."""
KL_COEF, PENALTY_COEF, HORIZON, TARGET = 0.2, 1.5, 50.0, 5.8
SCHEDULED = {"coef": KL_COEF, "schedule": "linear", "final_fraction": 0.0}
BEFORE = {"seen": 2.0, "mean": 6.0, "deviations": 8.0}
"""Scores 4 and 8, of an iteration before."""


def write_iteration(folder: Path, scores: list[float | None], finished: list[bool]) -> Path:
    folder.mkdir()
    rows = [
        RolloutRow(f"p{i}", 0, prompt, response, "", [-1.0] * len(response), "stop" if ended else "length", own)
        for i, ((prompt, response), ended, own) in enumerate(zip(SEQUENCES, finished, TEMPERATURES, strict=True))
    ]
    write_rollouts(folder / "rollouts.parquet", rows)
    said = [ScoreRow(f"p{i}", 0, score, {"f": score}, False, score and None) for i, score in enumerate(scores)]
    write_scores(folder / "scores.parquet", said)
    return folder


def jobs() -> dict[str, ComputeAdvantagesJob]:
    """By what they show; the second goes on with what the first said."""
    shared: dict[str, Any] = {"truncated": "mask", "score_norm": "std", "whiten": False, "score_clip": None}
    adaptive = AdvantageSpec(kl=AdaptiveKl(target=TARGET, horizon=HORIZON), **shared)
    update = update_job()
    first = ComputeAdvantagesJob(
        model=update.model,
        temperature=3.0,
        advantages=adaptive,
        max_response_tokens=FIXED_LENGTH,
        training=update.training,
        optimizer=OptimizerSettings.of(update.update),
        kl_coef=KL_COEF,
        carried=BEFORE,
    )
    scheduled = AdvantageSpec(kl=FixedKl.model_validate(SCHEDULED), **shared)
    falling = {"advantages": scheduled, "iteration": 1, "decay_iterations": 4}
    return {
        "adaptive": first,
        "scheduled": first.model_copy(update=falling),
        "critic alone": first.model_copy(update={"trains_policy": False}),
        "all cut": first,
        "none scored": first,
    }


def runs(root: Path, ranks: Ranks) -> Facts:
    """Three iterations' advantages against another policy as the reference; two without any; and updates, one of which
    the policy takes no step of."""
    start, engine, facts = make_start(root, "llama-tied", "float32", ranks), TrainingEngine(ranks), dict[str, Any]()
    tiny_folder(root / "reference/policy", "llama-tied", seed=1)
    made = write_iteration(root / "rollouts", SCORES, FINISHED)
    others = {
        "all cut": write_iteration(root / "cut", SCORES, [False] * len(SCORES)),
        "none scored": write_iteration(root / "unscored", [None] * len(SCORES), FINISHED),
    }
    for name, job in jobs().items():
        rows = others.get(name, made)
        if name == "scheduled":
            job = job.model_copy(update={"carried": facts["adaptive"].get("carried", {})})
        inputs = given(checkpoint=start, reference=root / "reference", rollouts=rows, scores=rows)
        facts[name] = do(engine, "compute_advantages", inputs, root / name, job, [])
    for name, target in {"near": 1e9, "far": 1e-9}.items():
        algorithm = KlPenaltyPpoSpec(coef=PENALTY_COEF, target=target)
        update = update_job().model_copy(update={"algorithm": algorithm, "full": False})
        inputs = given(checkpoint=start, experience=root / "adaptive")
        facts[name] = do(engine, "update_policy", inputs, root / name, update, [])
    poisoned = load_file(root / "adaptive/experience.safetensors")
    (root / "poisoned").mkdir()
    poisoned["advantages"] = torch.full_like(poisoned["advantages"], torch.inf)
    save_file(poisoned, root / "poisoned/experience.safetensors")
    inputs = given(checkpoint=start, experience=root / "poisoned")
    facts["no step"] = do(engine, "update_policy", inputs, root / "no step", update, [])
    held = engine.learner.offload_reference()
    engine.learner.free_all()
    facts["reference"] = {"held": held, "left": engine.learner.offload_reference()}
    return facts


SCENARIOS: dict[str, Callable[[Path, Ranks], Facts]] = {"runs": runs}
