"""What tasks tell the engines is what the spec says: every key of a job that a spec has by its name, off its default.

A key that a task forgets to hand on is silent where the job has a default for it. A new one is looked at by itself: as
long as no spec below sets it to something else, these tests fail.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from infra.engines.protocol import EngineJob
from ppo_core.records import (
    ComputeAdvantagesJob,
    EvaluateJob,
    EvaluateRewardModelJob,
    FinetunePolicyJob,
    GenerateJob,
    PrepareDatasetJob,
    PreparePreferencesJob,
    SamplingJob,
    ScoreJob,
    SelectJob,
    StartPolicyJob,
    TrainDpoJob,
    TrainRewardModelJob,
    UpdatePolicyJob,
)
from ppo_core.spec import DpoSpec, RewardModelSpec, RunSpec
from tasks.evaluate_policy import evaluate_policy
from tasks.finetune_policy import finetune_policy
from tasks.preferences.context import DpoContext, RewardModelContext
from tasks.preferences.evaluate_reward_model import evaluate_reward_model
from tasks.preferences.prepare_preferences import prepare_preferences
from tasks.preferences.train_dpo import train_dpo
from tasks.preferences.train_reward_model import train_reward_model
from tasks.prepare_dataset import prepare_dataset
from tasks.stages.engines import PROGRAMS
from tasks.start_policy import start_policy
from tests.tasks.run_contexts import ARITHMETIC, run_context, smoke_spec
from tests.tasks.toy_checkpoints import CARD
from tests.tasks.toy_engines import ToyEngines
from tests.tasks.toy_reward_models import MADE
from tests.tasks.toy_runs import ToyRun
from tests.tasks.toy_tracker import ToyTracker

pytestmark = pytest.mark.usefixtures("prefect_server")
HELPFUL = ARITHMETIC.parent / "helpful"
Spec = RunSpec | DpoSpec | RewardModelSpec
Told = dict[str, Mapping[str, Any]]

SAMPLING = (
    *("rollout.stop=[';']", "rollout.stop_token_ids=[7]", "rollout.temperature=0.7", "rollout.max_response_tokens=40"),
    *("engines.kv_cache_gib=0.5", "engines.tensor_parallel_size=2", "engines.deterministic=true", "seed=3"),
    *("dataset.answer_column=solution", "evaluation.pass_score=0.5", "evaluation.num_prompts=20"),
    *("sft.prompt_column=asked", "sft.completion_column=said", "model.dtype=bfloat16", "training.zero_stage=1"),
    "rollout.dtype=bfloat16",
)
PPO = (
    *("iterations=1", "evaluation.every=1", "evaluation.weights=ema", "update.ema_decay=0.9", "algorithm.kind=grpo"),
    *("rollout.prompts_per_iteration=8", "rollout.samples_per_prompt=2", "rollout.dynamic_sampling.max_batches=2"),
    *("rollout.temperature_column=heat", "rollout.max_response_tokens_column=limit", "dataset.shuffle=false"),
    *("advantages.truncated=mask", "advantages.score_clip=2", "advantages.reference={kind: ema}"),
    *("advantages.whiten=minibatch", "advantages.whiten_centred=false", "update.aggregation=fixed_length"),
    *("guards.max_skipped_steps=7", "update.max_grad_norm=0.5", "update.decay_iterations=1"),
)
ORDERED = ("dataset.curriculum={column: level, prompts: 100}", "dataset.shuffle=true")
ADAPTERS = "model.lora={rank: 2}"
FORM = ("dataset.chat=true", "dataset.system_prompt=Be brief.")

JOBS: Mapping[str, type[BaseModel]] = {
    "prepare_dataset": PrepareDatasetJob,
    "prepare_sampling": SamplingJob,
    "finetune_policy": FinetunePolicyJob,
    "start_policy": StartPolicyJob,
    "generate_rollouts": GenerateJob,
    "answer": GenerateJob,
    "answer greedily": GenerateJob,
    "score_rollouts": ScoreJob,
    "score_batch": ScoreJob,
    "select_rollouts": SelectJob,
    "compute_advantages": ComputeAdvantagesJob,
    "update_policy": UpdatePolicyJob,
    "score_evaluation": EvaluateJob,
    "prepare_preferences": PreparePreferencesJob,
    "train_dpo": TrainDpoJob,
    "train_reward_model": TrainRewardModelJob,
    "evaluate_reward_model": EvaluateRewardModelJob,
}
OTHER_NAMES = {
    "sft_data": "sft.data",
    "sft_prompt_column": "sft.prompt_column",
    "sft_completion_column": "sft.completion_column",
    "num_eval_prompts": "evaluation.num_prompts",
    "num_prompts": "rollout.prompts_per_iteration",
    "ema": "averages",
    "dtype": "model.dtype",
    "compute_dtype": "rollout.dtype",
    "optimizer": "update",
    "whitening": "advantages.minibatch_whitening",
    "score_clip": "advantages.raw_score_clip",
}
"""Where a spec has what a job calls otherwise, or what two of its sections have."""
OF_THE_WORK = {
    *("stream", "split", "position", "iteration", "decay_iterations", "trains_policy", "kl_coef", "carried", "full"),
    *("rate_factor", "num_batches", "checkpoint"),
}
"""What no spec says, whatever a section of one is called."""
HELD_OUT = {
    "num_prompts": 20,
    "shuffle": False,
    "samples_per_prompt": 1,
    "curriculum": None,
    "temperature_column": None,
    "max_response_tokens_column": None,
}
FIXED: Mapping[str, Mapping[str, Any]] = {
    "generate_rollouts": {"weights": "policy"},
    "answer": HELD_OUT,
    "answer greedily": {**HELD_OUT, "temperature": 0.0},
    "score_rollouts": {"samples_per_prompt": None, "truncated_count": True, "score_clip": None},
    "score_batch": {"truncated_count": False},
    "select_rollouts": {"truncated_count": False},
}
"""What a job says whatever the spec has by that name, by the job."""


def label_of(job: EngineJob) -> str:
    """The job's name, and what for where there are several of it."""
    if job.spec.get("stream") == "evaluation":
        return "answer" if job.spec["temperature"] else "answer greedily"
    return "score_batch" if job.name == "score_rollouts" and job.spec["samples_per_prompt"] else job.name


class Watched(ToyEngines):
    """Engines whose jobs can be looked at afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Told = {}
        done = {**self.jobs, **{job.__name__: job for job in MADE}, "train_dpo": toy_dpo}
        self.jobs = {name: partial(self.look, do) for name, do in done.items()}

    def look(self, do: Any, engines: ToyEngines, job: EngineJob) -> dict[str, Any]:
        if label_of(job) in JOBS:
            self.seen[label_of(job)] = job.spec
        result: dict[str, Any] = do(engines, job)
        return result


def toy_dpo(engines: ToyEngines, job: EngineJob) -> dict[str, Any]:
    """A policy that has seen preferences."""
    assert job.output is not None
    (job.output / "policy").mkdir()
    for name, document in CARD.items():
        (job.output / "policy" / name).write_text(json.dumps(document))
    return {"metrics": {}, "curves": {"loss": [0.5]}}


def ppo(home: Path, overrides: tuple[str, ...] = ()) -> tuple[Spec, Told]:
    """All stages of a run of one iteration."""
    engines = Watched()
    run = ToyRun(home, (*SAMPLING, *FORM, *PPO, *overrides), engines=engines)
    run.train()
    return smoke_spec(*run.overrides), engines.seen


def means(spec: Any, home: Path, engines: Watched) -> dict[str, Any]:
    """The fields of a context; to read all of the real engines' code takes longer than the stages."""
    context = run_context(spec, home, engines=engines, tracker=ToyTracker())
    context.fingerprints.update(dict.fromkeys(PROGRAMS, "toy"))
    return vars(context)


def dpo(home: Path) -> tuple[Spec, Told]:
    """Its stages but for what is reported."""
    engines = Watched()
    spec = DpoSpec.from_yaml(HELPFUL / "dpo.yaml", [*SAMPLING, *FORM, ADAPTERS])
    context = DpoContext(**means(spec, home, engines))
    dataset, preferences = prepare_dataset(context), prepare_preferences(context)
    start = start_policy(context, dataset, finetune_policy(context, dataset))
    train_dpo(context, preferences, start)
    evaluate_policy(context, start, dataset)
    return spec, engines.seen


def reward_model(home: Path) -> tuple[Spec, Told]:
    """Its stages but for what is reported."""
    engines = Watched()
    own = [key for key in SAMPLING if key.startswith(("seed", "model", "training", "engines.deterministic"))]
    spec = RewardModelSpec.from_yaml(HELPFUL / "reward_model.yaml", [*own, *FORM, "training.microbatch_tokens=999"])
    context = RewardModelContext(**means(spec, home, engines))
    preferences = prepare_preferences(context)
    evaluate_reward_model(context, train_reward_model(context, preferences), preferences)
    return spec, engines.seen


def plain(value: Any) -> Any:
    """As JSON has it."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    return list(value) if isinstance(value, tuple) else value


def at(spec: Spec, place: str) -> Any:
    """What stands at `section.key`."""
    value: Any = spec
    for name in place.split("."):
        value = getattr(value, name)
    return plain(value)


def places(spec: Spec, name: str) -> list[str]:
    """Where a spec has a key of that name: a section, or a key in one."""
    if hasattr(spec, name):
        return [name]
    sections = [(part, getattr(spec, part)) for part in type(spec).model_fields]
    return [f"{part}.{name}" for part, section in sections if name in getattr(type(section), "model_fields", {})]


def agrees(told: Any, said: Any) -> bool:
    """Whether a job's value is the spec's; of a section it may have some keys only."""
    if isinstance(told, dict) and isinstance(said, dict) and told:
        return all(key in said and agrees(value, said[key]) for key, value in told.items())
    return bool(told == said)


def complaints(spec: Spec, label: str, told: Mapping[str, Any]) -> Iterator[str]:
    """What a job does not say as the spec does."""
    names, fixed = dict(OTHER_NAMES), dict(FIXED.get(label, {}))
    if label == "prepare_preferences":
        names["dataset"] = "preferences" if isinstance(spec, DpoSpec) else "dataset.preferences"
        fixed["by_policy"] = isinstance(spec, DpoSpec)
    for name in sorted(JOBS[label].model_fields.keys() - OF_THE_WORK):
        if name in fixed:
            if told[name] != fixed[name]:
                yield f"{label}: {name} is {told[name]}, not {fixed[name]}"
            continue
        found = [names[name]] if name in names else places(spec, name)
        if len(found) != 1:
            yield f"{label}: {name} is in the spec as {found}: name the one in OTHER_NAMES, or see OF_THE_WORK"
            continue
        if not agrees(told[name], at(spec, found[0])):
            yield f"{label}: {name} is {told[name]}, and {found[0]} is {at(spec, found[0])}"


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory, prefect_server: None) -> dict[str, tuple[Spec, Told]]:
    """What engines were told, by what was run."""
    kinds = {"ppo": ppo, "in order": partial(ppo, overrides=ORDERED), "dpo": dpo, "reward model": reward_model}
    return {name: run(tmp_path_factory.mktemp("run")) for name, run in kinds.items()}


@pytest.mark.parametrize("kind", ["ppo", "in order", "dpo", "reward model"])
def test_jobs_say_what_the_spec_says(kind: str, asked: dict[str, tuple[Spec, Told]]) -> None:
    spec, jobs = asked[kind]
    assert [found for label, told in jobs.items() for found in complaints(spec, label, told)] == []


def test_what_a_job_says_by_itself_is_told_otherwise_here(asked: dict[str, tuple[Spec, Told]]) -> None:
    """Else the test above could not tell a key that is handed on from one that is forgotten."""
    told = [(label, job) for _, jobs in asked.values() for label, job in jobs.items()]
    assert {label for label, _ in told} | {"prepare_sampling"} == set(JOBS)  # beside a GPU none is prepared
    same = {
        (label, name)
        for label, kind in JOBS.items()
        for name, field in kind.model_fields.items()
        if not (field.is_required() or name in OF_THE_WORK or name in FIXED.get(label, {}))
        and all(job[name] == plain(field.get_default(call_default_factory=True)) for by, job in told if by == label)
    }
    assert same - ({("prepare_sampling", "stop")} if "prepare_sampling" not in dict(told) else set()) == set()
