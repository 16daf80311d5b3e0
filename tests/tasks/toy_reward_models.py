"""Toy engines that also train reward models, and check specs; they stand for all engines that flows start."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from infra.engines.protocol import EngineJob
from tasks.stages.engine_programs import EnginePlan
from tests.tasks.toy_checkpoints import CARD
from tests.tasks.toy_engines import JOBS, LOSSES, ToyEngine, ToyEngines, write
from tests.tasks.toy_files import content, fraction

FACTS = {"model_type": "toy", "parameters": 1000, "context_length": 128, "recomputes": True}
CLASSIFIER = {**CARD, "config.json": {"architectures": ["ToyForSequenceClassification"]}}


def check_run(engines: ToyEngines, job: EngineJob) -> dict[str, Any]:
    """Nothing is wrong."""
    counts = {"train": 50, "eval": 20, "sft": 30}
    found = {
        "counts": counts,
        "left_out": {},
        "longest_prompt": 3,
        "short_rewards": {},
        "scores": [0.0, 1.0],
        "errors": [None, None],
    }
    return {**found, **FACTS, "sequences": None, "learned_held_out": 0}


def check_preferences(engines: ToyEngines, job: EngineJob) -> dict[str, Any]:
    """Nor here."""
    numbers = {"train": 40, "eval": 10}
    return {
        "counts": numbers,
        "pairs": numbers,
        "longest": 9,
        "held_out_trained": 0,
        "left_out": {},
        "learned": "",
        **FACTS,
    }


def try_reward(engines: ToyEngines, job: EngineJob) -> dict[str, Any]:
    """It scores."""
    return {"rows": []}


def prepare_dataset(engines: ToyEngines, job: EngineJob) -> dict[str, Any]:
    """As real ones: the rewards are tried on the rows, and leave no trace in them."""
    rows = {name: value for name, value in job.spec.items() if name != "reward"}
    return JOBS["prepare_dataset"](engines, replace(job, spec=rows))


def prepare_preferences(engines: ToyEngines, job: EngineJob) -> dict[str, Any]:
    """Forty pairs to train on."""
    write(engines, job, "preferences.json")
    numbers = {"train": 40, "eval": 10}
    described = {"splits": {}, "sources": [], "on_both_sides": None, "held_out_trained": 0}
    return {"counts": numbers, "pairs": numbers, "context_length": 128, "described": described}


def train_reward_model(engines: ToyEngines, job: EngineJob) -> dict[str, Any]:
    """A classifier that has seen preferences, and the folder that it starts from."""
    read = [content(job.inputs["dataset"], "preferences.json")]
    if "model" in job.inputs:
        read.append(content(job.inputs["model"], "model.safetensors"))
    assert job.output is not None
    (job.output / "model").mkdir()
    write(engines, job, "model/model.safetensors", *read)
    for name, document in CLASSIFIER.items():
        (job.output / "model" / name).write_text(json.dumps(document))
    return {"metrics": {"reward_model/loss": LOSSES[-1]}, "losses": LOSSES}


def evaluate_reward_model(engines: ToyEngines, job: EngineJob) -> dict[str, Any]:
    """What it says of held-out pairs."""
    digest = write(engines, job, "evaluation.json", content(job.inputs["model"], "model/model.safetensors"))
    names = ("accuracy", "log_loss", "calibration_error")
    return {
        "metrics": {f"reward_model/{name}": fraction(digest) for name in names},
        "calibration": [{"confidence": 0.75, "accuracy": 1.0, "count": 10}],
        "distribution": {"edges": [0.0, 1.0], "best": [10], "others": [10]},
    }


MADE = (prepare_preferences, train_reward_model, evaluate_reward_model)
CHECKED = (check_run, check_preferences, try_reward)


def toy_engines(patch: pytest.MonkeyPatch) -> ToyEngines:
    """Engines that all flows and checks get from now on."""
    toys = ToyEngines()
    toys.jobs |= {job.__name__: job for job in (*CHECKED, *MADE, prepare_dataset)}

    def launch(plan: EnginePlan, *_: object, **__: object) -> ToyEngine:
        return ToyEngine(plan.role, toys)

    for place in ("tasks.stages.engines", "tasks.checks.run"):
        patch.setattr(f"{place}.launch", launch)
    # To read all of the real engines' code takes longer than a toy run.
    patch.setattr("tasks.stages.context.code_fingerprint", lambda program, root: f"toy {program}")
    return toys
