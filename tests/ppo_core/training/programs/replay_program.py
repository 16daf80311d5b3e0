"""Checkpoints made by the training engine's handlers, by one rank; what training_program runs as replayed/NAME.

Below each folder `full1` to `full4` are those of a warm engine that writes everything, `thin2`, `thin3` and `full4-…`
those of a run that wrote nothing but `full1` in full before the end.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from ppo_core.data.tables import write_rollouts, write_scores
from ppo_core.processes.protocol import Job, JobInput
from ppo_core.processes.ranks import Ranks
from ppo_core.records import InputError, RolloutRow, ScoreRow, UpdatePolicyJob
from ppo_core.training.service import TrainingEngine
from tests.ppo_core.training.bad_checkpoints import DAMAGES
from tests.ppo_core.training.programs.deepspeed_program import Facts, make_start
from tests.ppo_core.training.programs.skip_program import spoiled
from tests.ppo_core.training.update_cases import BF16, FP32, make_experience, save_experience, update_job

NOWHERE = Path("/nowhere")
Notes = list[str]
EXACT = {"kl_loss_coef": 0.5, "kl_loss_estimator": "full"}


def given(**paths: Path) -> dict[str, JobInput]:
    """Inputs whose digest is the folder's name."""
    return {name: JobInput(path, path.name) for name, path in paths.items()}


def do(engine: TrainingEngine, name: str, inputs: Mapping[str, JobInput], end: Path, spec: Any, notes: Notes) -> Facts:
    """One job through its handler, or what it says against its inputs."""
    end.mkdir(parents=True, exist_ok=engine.ranks.world_size > 1)  # whichever rank is first

    def tick(done: int, total: int, note: str) -> None:
        notes.append(note if torch.are_deterministic_algorithms_enabled() is spec.deterministic else "wrong mode")

    try:
        return engine.handlers[name](Job(name, inputs, end, spec.model_dump(mode="json"), tick))
    except InputError as error:
        return {"said": str(error)}


class Run:
    """The updates of one run: jobs[i] with experiences[i] make checkpoint i + 1 of checkpoint i, below `root`."""

    def __init__(self, root: Path, ranks: Ranks, start: Path, jobs: list[UpdatePolicyJob], given: list[Any]) -> None:
        self.root, self.ranks, self.jobs = root, ranks, jobs
        self.folders = [start]
        self.experiences = [root / f"experience{number}" for number in range(len(jobs))]
        for folder, experience in zip(self.experiences, given, strict=True):
            save_experience(experience, folder)

    def full(self, name: str, number: int) -> Path:
        """Checkpoint `number` of the run that writes everything."""
        return self.root / f"{name}{number}" if number else self.folders[0]

    def update(
        self, engine: TrainingEngine, number: int, end: str, *, start: Path, full: bool, notes: Notes, **more: Path
    ) -> Facts:
        """Make checkpoint `number` in the folder `end`."""
        spec = self.jobs[number - 1].model_copy(update={"full": full})
        if spec.update.exact_kl_loss:
            more["reference"] = self.folders[0]
        inputs = given(checkpoint=start, experience=self.experiences[number - 1], **more)
        return do(engine, "update_policy", inputs, self.root / end, spec, notes)

    def warm(self) -> Facts:
        """Every checkpoint in full."""
        engine, facts = TrainingEngine(self.ranks), {}
        for number in range(1, len(self.jobs) + 1):
            start = self.full("full", number - 1)
            facts[f"full{number}"] = self.update(engine, number, f"full{number}", start=start, full=True, notes=[])
        engine.learner.forget()
        return facts

    def sparse(self, cold: str) -> Facts:
        """Checkpoint 1 in full, then policy-only ones by a warm engine, with garbage where it needs nothing; 4 in full.

        And 4 again by a `cold` engine, which has to replay updates 2 and 3.
        """
        engine, facts, notes = TrainingEngine(self.ranks), {}, []
        garbage = {"base": NOWHERE, "replay_0": NOWHERE}
        start = self.root / "full1"
        for number in (2, 3):
            facts[f"thin{number}"] = self.update(
                engine, number, f"thin{number}", start=start, full=False, notes=[], **garbage
            )
            start = self.root / f"thin{number}"
        facts["full4-warm"] = self.update(engine, 4, "full4-warm", start=start, full=True, notes=[], **garbage)
        engine.learner.forget()
        engine = TrainingEngine(self.ranks)
        facts[cold] = self.update(engine, 4, cold, start=start, full=True, notes=notes, **self.origin())
        engine.learner.forget()
        return facts | {"notes": notes}

    def origin(self) -> dict[str, Path]:
        """What the training state of `thin3` is made of."""
        return {"base": self.root / "full1", "replay_0": self.experiences[1], "replay_1": self.experiences[2]}


def jobs_like(*changes: Mapping[str, Any], **shared: Any) -> list[UpdatePolicyJob]:
    return [update_job(iteration=number, **{**shared, **change}) for number, change in enumerate(changes)]


def experiences(count: int = 4) -> list[Any]:
    return [make_experience(noise=0.1 + 0.1 * number) for number in range(count)]


def stages(root: Path, ranks: Ranks) -> Facts:
    """The same four updates in every stage, once in deterministic mode too."""
    facts: Facts = {}
    for stage, dtype in FP32 + BF16:
        start = make_start(root, "gpt2" if stage == 1 else "llama-tied", dtype, ranks)
        jobs = jobs_like({}, {}, {}, {}, zero_stage=stage, dtype=dtype, num_minibatches=2)
        run = Run(root / f"stage{stage}-{dtype}", ranks, start, jobs, experiences())
        facts[run.root.name] = {**run.warm(), **run.sparse("full4-cold")}
        run.jobs[0] = jobs[0].model_copy(update={"deterministic": True})
        engine, notes = TrainingEngine(ranks), []
        run.update(engine, 1, "deterministic1", start=start, full=True, notes=notes)
        engine.learner.forget()
        facts[run.root.name]["modes"] = notes
        facts[run.root.name]["off again"] = not torch.are_deterministic_algorithms_enabled()
    return facts


def paths(root: Path, ranks: Ranks) -> Facts:
    """Updates that stop early or skip a step, learn at another rate, and go on in another stage."""
    start = make_start(root, "llama-tied", "float32", ranks)
    cases = {
        "adaptive": (
            jobs_like({}, {"num_ppo_epochs": 5, "max_kl": 1e-6}, {}, {}),
            [make_experience(), make_experience(noise=0.0), spoiled("advantage"), make_experience()],
        ),
        "warmed": (jobs_like({}, {}, {}, {}, critic_warmup_iterations=2), experiences()),
        "moved": (jobs_like({}, {}, {"zero_stage": 2}, {"zero_stage": 3}), experiences()),
        "exact": (jobs_like({}, {"zero_stage": 2}, {}, {"zero_stage": 3}, **EXACT), experiences()),
    }
    cases["adaptive"][0][1] = cases["adaptive"][0][1].model_copy(update={"rate_factor": 0.25})
    facts: Facts = {}
    for name, (jobs, given_) in cases.items():
        run = Run(root / name, ranks, start, jobs, given_)
        facts[name] = {**run.warm(), **run.sparse("full4-cold")}
    return facts


def factor(root: Path, ranks: Ranks) -> Facts:
    """One update with half the rates by factor, and by the rates themselves."""
    start = make_start(root, "llama-tied", "float32", ranks)
    whole, half = update_job(), update_job(learning_rate=5e-4, critic_learning_rate=1e-3)
    jobs = {"factor": whole.model_copy(update={"rate_factor": 0.5}), "halved": half}
    facts: Facts = {}
    for name, job in jobs.items():
        run, engine = Run(root / name, ranks, start, [job], experiences(1)), TrainingEngine(ranks)
        facts[name] = run.update(engine, 1, "end", start=start, full=True, notes=[])
        engine.learner.forget()
    return facts


def advantages(root: Path, ranks: Ranks) -> Facts:
    """compute_advantages from a policy-only checkpoint by a cold engine, and from the full one of the same update."""
    from ppo_core.records import ComputeAdvantagesJob, OptimizerSettings
    from ppo_core.spec import AdvantageSpec

    run = Run(root / "adaptive", ranks, root, [], [])
    start, job = make_start(root, "llama-tied", "float32", ranks), update_job()
    run.experiences = [run.root / f"experience{number}" for number in range(4)]
    rows = [RolloutRow(f"p{i}", 0, [3, 4 + i], [5, 6, 1], "w5", [-1.0] * 3, "stop") for i in range(4)]
    write_rollouts(root / "rollouts.parquet", rows)
    write_scores(root / "scores.parquet", [ScoreRow(f"p{i}", 0, float(i), {"f": 1.0}, False, None) for i in range(4)])
    spec = ComputeAdvantagesJob(
        model=job.model,
        temperature=1.0,
        advantages=AdvantageSpec(),
        max_response_tokens=3,
        training=job.training,
        optimizer=OptimizerSettings.of(job.update),
        kl_coef=0.1,
    )
    facts: Facts = {}
    for name, origin in {"full3": {}, "thin3": run.origin()}.items():
        engine = TrainingEngine(ranks)
        inputs = given(checkpoint=run.root / name, reference=start, rollouts=root, scores=root, **origin)
        facts[name] = do(engine, "compute_advantages", inputs, root / f"advantages-{name}", spec, [])
        engine.learner.forget()
    return facts


def refusals(root: Path, ranks: Ranks) -> Facts:
    """Inputs other than those that the policy-only checkpoint was made of; the good ones last, by the same engine."""
    run = Run(
        root / "refused", ranks, make_start(root, "llama-tied", "float32", ranks), jobs_like(*[{}] * 4), experiences()
    )
    run.warm()
    run.sparse("full4-cold")
    good, thin3, tampered, earlier = run.origin(), run.root / "thin3", run.root / "tampered", run.root / "earlier"
    shutil.copytree(thin3, tampered)
    shutil.copytree(thin3, earlier)
    state = json.loads((earlier / "state.json").read_text())
    for update in state["replay"]:
        del update["spec"]["whitening"], update["spec"]["update"]["aggregation"]
    (earlier / "state.json").write_text(json.dumps({**state, "identity": "as that code said"}))
    weights = load_file(tampered / "policy/model.safetensors")
    weights["model.norm.weight"].view(torch.int32)[0] ^= 1
    save_file(weights, tampered / "policy/model.safetensors", {"format": "pt"})
    cases: dict[str, tuple[Path, dict[str, Path]]] = {
        "nothing": (thin3, {}),
        "one missing": (thin3, {name: path for name, path in good.items() if name != "replay_1"}),
        "thin base": (thin3, {**good, "base": run.root / "thin2"}),
        "other base": (thin3, {**good, "base": run.root / "full2"}),
        "other experience": (thin3, {**good, "replay_1": run.experiences[0]}),
        "tampered": (tampered, good),
        "of earlier code": (earlier, good),
        "good": (thin3, good),
    }
    engine, facts = TrainingEngine(ranks), {}
    for name, (start, origin) in cases.items():
        facts[name] = run.update(engine, 4, f"end-{name}", start=start, full=True, notes=[], **origin)
        facts[name]["held"] = engine.learner.identity is not None
    engine.learner.forget()
    shared = run.jobs[3].training.model_copy(update={"num_ranks": 2})
    run.jobs[3] = run.jobs[3].model_copy(update={"training": shared})
    engine.learner.ranks.world_size = 2  # as if there were another, which nothing asks before the refusal
    facts["other ranks"] = run.update(engine, 4, "end-ranks", start=thin3, full=True, notes=[], **good)
    engine.learner.ranks.world_size = 1
    return facts


def damaged(root: Path, ranks: Ranks) -> Facts:
    """What a fresh engine says of damaged copies of a full checkpoint, and of a policy-only one without its policy."""
    run = Run(root / "refused", ranks, root, [], [])
    run.experiences, run.jobs = [run.root / f"experience{number}" for number in range(4)], jobs_like(*[{}] * 4)
    facts: Facts = {}
    for name, damage in DAMAGES.items():
        start = root / "damaged" / name
        shutil.copytree(run.root / ("thin3" if name.startswith("thin") else "full3"), start)
        damage(start)
        notes: Notes = []
        facts[name] = run.update(
            TrainingEngine(ranks), 4, f"from {name}", start=start, full=True, notes=notes, **run.origin()
        )
        facts[name]["computed"] = bool(notes)
    return facts


SCENARIOS: dict[str, Callable[[Path, Ranks], Facts]] = {
    scenario.__name__: scenario for scenario in (stages, paths, factor, advantages, refusals, damaged)
}
