"""Engines without models: what a job writes is a hash of its spec and of what it reads, and is there in no time.

They keep no state between jobs: a policy-only checkpoint is always replayed from the last full one.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

from infra.engines.protocol import EngineJob, EngineProgress, EngineReply
from ppo_core.records import WITH_SIGNAL, Replay, UpdatePolicyJob, content_digest
from ppo_core.spec import KlPenaltyPpoSpec, RunSpec
from ppo_core.training.state import derivation, identity_after, read_state
from tasks.stages.engines import LocalHandle, Turns
from tests.tasks.toy_checkpoints import PARTS, Weights, write_checkpoint
from tests.tasks.toy_files import content, fraction, has_signal, write_responses
from tests.tasks.toy_updates import hold, refusal, update

LOSSES = [2.5, 1.25, 0.5]
"""Of the three steps of a supervised start."""
HELD_OUT = "answer_held_out"
ASIDE = ("describe_dataset", "prepare_sampling")
Measures = Callable[[int, float], Mapping[str, float]]


def healthy(iteration: int, rate_factor: float) -> Mapping[str, float]:
    """Nothing special to measure."""
    return {}


class ToyEngines:
    """The three engines of a run; stands where `tasks.stages.engines.Engines` stands.

    `reward` is the user's scoring code, which describe_sources tells of; `salts` make a job give other bytes although
    nothing tells of it, as another machine might; `measures(iteration, rate_factor)` are metrics of an iteration
    (counted from 1) on top of the usual ones, or raises. `done` names the jobs done, in order, but those that make
    nothing (ASIDE); `notes` is progress. `ranks` are those of each training engine that there was, one after the other;
    it refuses a job for another number, as a real one does.
    """

    def __init__(self, measures: Measures = healthy, *, rollout_engines: int = 1, **salts: str) -> None:
        self.reward = "as it was"
        self.salts = salts
        self.measures = measures
        self.done: list[str] = []
        self.notes: list[str] = []
        self.ranks: list[int] = []
        self.under_way: list[str] = []
        self.scoring = ToyEngine("scoring", self)
        self.rollout_names = [
            f"rollout-{number}" if number > 1 else "rollout" for number in range(1, rollout_engines + 1)
        ]
        others = (ToyEngine(name, self) for name in ("training", *self.rollout_names))
        self.handles = {engine.name: LocalHandle(engine) for engine in (self.scoring, *others)}
        self.turns = Turns({})
        self.asked: Counter[str] = Counter()
        self.planned: dict[tuple[str, int], Callable[[], None]] = {}
        self.jobs = dict(JOBS)

    def start(self, only: Collection[str] | None = None) -> None:
        """They are there."""

    def serve(self, spec: RunSpec) -> None:
        """Have as many training ranks as the spec says; nobody may be waiting for a job then."""
        if self.ranks[-1:] != [spec.training.num_ranks]:
            assert self.under_way == []
            self.ranks.append(spec.training.num_ranks)

    def close(self) -> None:
        """Nothing runs."""

    def before(self, job: str, number: int, act: Callable[[], None]) -> None:
        """Do something (damage a file, raise) before the `number`-th such job from now on, once."""
        self.planned[job, self.asked[job] + number] = act

    def count(self, job: str) -> int:
        """How often a job was done."""
        return self.done.count(job)


class ToyEngine:
    """One of them: an `Engine` in this process."""

    def __init__(self, name: str, engines: ToyEngines) -> None:
        self.name = name
        self._all = engines

    def start(self) -> None:
        """Nothing to start."""

    def close(self) -> None:
        """Nothing to end."""

    def run(
        self, job: EngineJob, *, timeout_s: float, on_progress: Callable[[EngineProgress], None] | None = None
    ) -> EngineReply:
        """Do a job; first, what was planned before it."""
        label = HELD_OUT if job.spec.get("stream") == "evaluation" else job.name
        if job.name == "generate_shard":
            label = f"generate_shard by {self.name}"
        self._all.asked[label] += 1
        self._all.under_way.append(label)
        try:
            self._all.planned.pop((label, self._all.asked[label]), lambda: None)()
            result = self._all.jobs[job.name](self._all, job)
        finally:
            self._all.under_way.remove(label)
        if job.name not in ASIDE:
            self._all.done.append(label)
        return EngineReply(result, 0.0)


def write(engines: ToyEngines, job: EngineJob, name: str, *read: str) -> str:
    """The one file of an artifact, and its hash."""
    digest = content_digest([job.name, engines.salts.get(job.name), dict(job.spec), *read])
    assert job.output is not None
    (job.output / name).write_text(digest)
    return digest


def describe_sources(engines: ToyEngines, job: EngineJob) -> dict[str, Any]:
    """Digests of the user's code."""
    return {name: content_digest([name, engines.reward]) for name in job.spec["functions"]}


def prepare_dataset(engines: ToyEngines, job: EngineJob) -> dict[str, Any]:
    """Fifty prompts to train on."""
    write(engines, job, "dataset.json")
    return {"counts": {"train": 50, "eval": job.spec["num_eval_prompts"]}, "context_length": 128}


def describe_dataset(engines: ToyEngines, job: EngineJob) -> dict[str, Any]:
    """Fifty prompts of three tokens."""
    content(job.inputs["dataset"], "dataset.json")
    train = {"rows": 50, "mean": 3.0, "median": 3.0, "longest": 3, "histogram": [[1, 1, 0], [2, 2, 0], [3, 3, 50]]}
    return {"splits": {"train": train}, "sources": [], "on_both_sides": None}


def finetune_policy(engines: ToyEngines, job: EngineJob) -> dict[str, Any]:
    """A model that has seen examples."""
    require_ranks(engines, job)
    write(engines, job, "model.json", content(job.inputs["dataset"], "dataset.json"))
    return {"losses": LOSSES}


def start_policy(engines: ToyEngines, job: EngineJob) -> dict[str, Any]:
    """Checkpoint 0."""
    read = [content(job.inputs["dataset"], "dataset.json")]
    if "model" in job.inputs:  # what was fine-tuned, or the user's own
        tuned = (job.inputs["model"].path / "model.json").exists()
        read.append(content(job.inputs["model"], "model.json" if tuned else "model.safetensors"))
    read += [content(job.inputs["critic"], "model.safetensors")] if "critic" in job.inputs else []
    seed = write(engines, job, "start.json", *read)
    write_checkpoint(job, Weights.of(seed), seed, ())
    return {}


def generate_rollouts(engines: ToyEngines, job: EngineJob) -> dict[str, Any]:
    """A response of ten tokens to each prompt."""
    return write_responses(job, responses(engines, job, job.spec, range(job.spec["num_prompts"])), job.spec)


def generate_shard(engines: ToyEngines, job: EngineJob) -> dict[str, Any]:
    """Some of them."""
    whole, first = job.spec["whole"], job.spec["first"]
    return write_responses(job, responses(engines, job, whole, range(first, first + job.spec["count"])), whole)


def merge_rollouts(engines: ToyEngines, job: EngineJob) -> dict[str, Any]:
    """All of them."""
    shards = [content(job.inputs[f"shard_{number}"], "rollouts.json") for number in range(len(job.inputs))]
    return write_responses(job, [line for shard in shards for line in shard.splitlines()], {"samples_per_prompt": 1})


def responses(engines: ToyEngines, job: EngineJob, spec: Mapping[str, Any], numbers: range) -> list[str]:
    """Those to the prompts of these numbers."""
    weights, dataset = f"{spec['weights']}/model.safetensors", content(job.inputs["dataset"], "dataset.json")
    policy = content(job.inputs["checkpoint"], weights)
    read = ["generate_rollouts", engines.salts.get("generate_rollouts"), dict(spec), policy, dataset]
    return [content_digest([*read, number]) for number in numbers]


def score_rollouts(engines: ToyEngines, job: EngineJob) -> dict[str, Any]:
    """A mean score."""
    rollouts = content(job.inputs["rollouts"], "rollouts.json")
    digest = write(engines, job, "scores.json", engines.reward, rollouts)
    counted = {WITH_SIGNAL: float(sum(map(has_signal, rollouts.splitlines())))}
    return {"metrics": {"score/mean": fraction(digest), **(counted if job.spec["samples_per_prompt"] else {})}}


def select_rollouts(engines: ToyEngines, job: EngineJob) -> dict[str, Any]:
    """Those with a signal, and no more than asked for."""
    batches = [content(job.inputs[f"rollouts_{number}"], "rollouts.json") for number in range(job.spec["num_batches"])]
    lines = sorted("".join(batches).splitlines(), key=lambda line: not has_signal(line))[: job.spec["num_prompts"]]
    facts = write_responses(job, lines, job.spec)
    return {**facts, "metrics": {**facts["metrics"], "rollout/batches": float(len(batches))}}


def compute_advantages(engines: ToyEngines, job: EngineJob) -> dict[str, Any]:
    """Reads the critic too, so that it needs what the update needs; the KL coefficient moves."""
    require_ranks(engines, job)
    held = hold(engines, job.inputs)
    read = [content(job.inputs[name], f"{name}.json") for name in ("rollouts", "scores")]
    reference = content(job.inputs["reference"], PARTS["policy"])
    digest = write(engines, job, "experience.json", held.policy, held.critic, reference, *read)
    metrics = {"kl/reference": fraction(digest), "sampler/logprob_difference_mean": 0.001}
    carried = {"iterations": job.spec["carried"].get("iterations", 0.0) + 1}
    next_kl_coef = job.spec["kl_coef"] * (1 + fraction(digest))
    return {"metrics": metrics, "next_kl_coef": next_kl_coef, "carried": carried, "num_tokens": 100}


def require_ranks(engines: ToyEngines, job: EngineJob) -> None:
    """Raise what a real training engine raises, which has another number of ranks than the job says."""
    if engines.ranks and job.spec["training"]["num_ranks"] != engines.ranks[-1]:
        raise refusal(f"training.num_ranks={job.spec['training']['num_ranks']}, and here are {engines.ranks[-1]}")


def update_policy(engines: ToyEngines, job: EngineJob) -> dict[str, Any]:
    """The next checkpoint, full or policy-only."""
    require_ranks(engines, job)
    spec, experience = UpdatePolicyJob.model_validate(job.spec), job.inputs["experience"]
    metrics = {"policy/entropy": 0.5, "policy/clip_fraction": 0.01}
    metrics |= engines.measures(spec.iteration + 1, spec.rate_factor)
    after = update(engines, hold(engines, job.inputs), spec, experience)
    before = read_state(job.inputs["checkpoint"].path)
    replay = () if spec.full else (*before.replay, Replay(spec=derivation(spec), experience=experience.digest))
    write_checkpoint(job, after, identity_after(spec, before.identity, experience.digest), replay)
    carried = {"coef": 2 * spec.algorithm.coef} if isinstance(spec.algorithm, KlPenaltyPpoSpec) else {}
    return {"metrics": metrics, "full": spec.full, "carried": carried}


def score_evaluation(engines: ToyEngines, job: EngineJob) -> dict[str, Any]:
    """How good the answers to held-out prompts are."""
    read = [content(job.inputs[name], "rollouts.json") for name in ("sampled", "greedy")]
    score = fraction(write(engines, job, "metrics.json", engines.reward, *read))
    samples = [{"prompt": "1+1=", "response": "2", "score": score}]
    return {"metrics": {"evaluation/score": score, "evaluation/accuracy": score}, "samples": samples}


def better_each_time() -> Callable[[ToyEngines, EngineJob], dict[str, Any]]:
    """In place of `score_evaluation`: every evaluation is better than those before, so that the last policy is best."""
    numbers = itertools.count(1)

    def score(engines: ToyEngines, job: EngineJob) -> dict[str, Any]:
        accuracy = 1 - 1 / next(numbers)
        made = score_evaluation(engines, job)
        return {**made, "metrics": {"evaluation/score": accuracy, "evaluation/accuracy": accuracy}}

    return score


def compare_evaluations(engines: ToyEngines, job: EngineJob) -> dict[str, Any]:
    """As if there were one prompt, and no doubt."""
    read = [content(job.inputs[name], "metrics.json") for name in ("candidate", "champion")]
    write(engines, job, "comparison.json", *read)
    gain = fraction(read[0]) - fraction(read[1])
    metrics = {f"promotion/{name}": gain for name in ("gain", "gain_low", "gain_high")}
    lengths = {f"promotion/{side}_length": 10.0 for side in ("candidate", "champion")}
    return {"metrics": {**metrics, **lengths}, "pairs": 1, "unscored": 0, "better": 1, "worse": 0, "setbacks": []}


FIRST = (describe_sources, prepare_dataset, describe_dataset, finetune_policy, start_policy)
SAMPLING = (generate_rollouts, generate_shard, merge_rollouts)
AFTER = (score_rollouts, select_rollouts, compute_advantages, update_policy, score_evaluation, compare_evaluations)
JOBS: Mapping[str, Callable[[ToyEngines, EngineJob], dict[str, Any]]] = {
    "prepare_sampling": lambda *_: {},
    **{job.__name__: job for job in (*FIRST, *SAMPLING, *AFTER)},
}
