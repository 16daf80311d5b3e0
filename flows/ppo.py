"""PPO training as a flow. One iteration:

    checkpoint k ─► generate_rollouts ─► score_rollouts ─► compute_advantages ─► update_policy ─► checkpoint k+1
                                                                                      │
              report ◄─ commit_iteration (the record: the truth of the run) ◄─ evaluate_policy

Every stage is a task over stored artifacts. Killed anywhere and started again under the same run name, the flow goes on
after its last record, and finds the finished stages of the broken iteration in the store.
"""

from __future__ import annotations

from pathlib import Path

from prefect.runtime import flow_run
from pydantic import BaseModel, ConfigDict

from flows.console import RunConsole
from ppo_core.spec import RunSpec
from tasks.commit_iteration import IterationRecord, commit_iteration
from tasks.compute_advantages import compute_advantages
from tasks.errors import RegistryError
from tasks.evaluate_policy import evaluate_policy
from tasks.generate_rollouts import generate_rollouts
from tasks.open_run import effective_spec, first_record, last_record
from tasks.prefect_api import EmbeddedFlow, page_url
from tasks.prepare_dataset import prepare_dataset
from tasks.references import DatasetRef
from tasks.register_policy import RegisteredPolicy, export_best, register_policy
from tasks.report import report, report_end
from tasks.score_rollouts import score_rollouts
from tasks.start_policy import start_policy
from tasks.update_policy import update_policy
from tasks.workbench import Workbench, open_workbench


class RunReport(BaseModel):
    """What a finished run leaves."""

    model_config = ConfigDict(frozen=True)

    run: str
    iterations: int
    best_iteration: int
    best_value: float | None
    policy: RegisteredPolicy | None
    policy_folder: Path
    metrics: dict[str, float]


def train(spec: RunSpec, run: str | None = None) -> RunReport:
    """Train a policy with PPO, or go on where the run of this name stopped."""
    console = RunConsole(run or spec.name, spec.iterations)
    with console, open_workbench(spec, run, console.progress, effective_spec) as bench:
        console.say(f"run {bench.run}; Prefect page {page_url()} (flow ppo-training)")
        record = last_record(bench.records)
        greet(console, bench, record)
        try:
            dataset = prepare_dataset(bench)
            if record is None:
                record = begin(bench, dataset)
                show(bench, console, record)
                console.samples("answers before PPO", record, record)
            while record.iteration < bench.spec.iterations:
                record = iterate(bench, dataset, record)
                show(bench, console, record)
            return finish(bench, console, record)
        except BaseException:
            leave_best(bench)
            raise


def begin(bench: Workbench, dataset: DatasetRef) -> IterationRecord:
    """Record 0: the policy that PPO starts from, and how good it is."""
    checkpoint = start_policy(bench, dataset)
    evaluation = evaluate_policy(bench, checkpoint, dataset) if bench.spec.dataset.evaluation else None
    return commit_iteration(
        bench, iteration=0, previous=None, dataset=dataset, checkpoint=checkpoint, evaluation=evaluation
    )


def iterate(bench: Workbench, dataset: DatasetRef, previous: IterationRecord) -> IterationRecord:
    """One iteration, from the record before to its own."""
    number = previous.iteration + 1
    rollouts = generate_rollouts(bench, previous.checkpoint, dataset, iteration=number, position=previous.position)
    scores = score_rollouts(bench, rollouts, dataset)
    experience = compute_advantages(
        bench, previous.checkpoint, previous.reference, rollouts, scores, kl_coef=previous.next_kl_coef
    )
    checkpoint = update_policy(bench, previous.checkpoint, experience, dataset, iteration=number)
    evaluation = evaluate_policy(bench, checkpoint, dataset) if evaluates_at(bench.spec, number) else None
    return commit_iteration(
        bench,
        iteration=number,
        previous=previous,
        dataset=dataset,
        checkpoint=checkpoint,
        rollouts=rollouts,
        scores=scores,
        experience=experience,
        evaluation=evaluation,
    )


def finish(bench: Workbench, console: RunConsole, record: IterationRecord) -> RunReport:
    """Register the best policy and say where everything is. Without a registry the run is done all the same."""
    try:
        registered = register_policy(bench, record)
    except RegistryError as error:
        registered = None
        console.say(f"the policy is not registered: {error}; the same command tries again, without training")
    tell(console, report_end(bench))
    folder = export_best(bench, record.best)
    console.samples("answers after PPO", record, first_record(bench.records))
    return RunReport(
        run=bench.run,
        iterations=record.iteration,
        best_iteration=record.best.iteration,
        best_value=record.best.value,
        policy=registered,
        policy_folder=folder,
        metrics=record.metrics,
    )


def show(bench: Workbench, console: RunConsole, record: IterationRecord) -> None:
    """Tell people, Prefect and MLflow of a committed iteration."""
    console.iteration(record)
    if record.cached_stages:
        console.say(f"iteration {record.iteration}: from the store came {', '.join(record.cached_stages)}")
    tell(console, report(bench, record))
    if record.best.iteration == record.iteration:
        export_best(bench, record.best)


def leave_best(bench: Workbench) -> None:
    """However a run ends, the best policy that was committed lies in its folder."""
    last = last_record(bench.records)
    if last is not None:
        export_best(bench, last.best)


def tell(console: RunConsole, complaint: str | None) -> None:
    """Say once that tracking is away: nothing is lost, the records have it all."""
    if complaint and complaint != console.complaint:
        console.say(f"MLflow did not take this report: {complaint}; it comes later, from the records")
    console.complaint = complaint


def greet(console: RunConsole, bench: Workbench, record: IterationRecord | None) -> None:
    """Say where the run starts, or goes on."""
    if record is None:
        console.say(f"a new run of {bench.spec.iterations} iterations; engines are starting")
    else:
        console.say(f"going on after iteration {record.iteration} of {bench.spec.iterations}, data at {record.cursor}")


def evaluates_at(spec: RunSpec, iteration: int) -> bool:
    """Whether an iteration ends with an evaluation: every so often, and at the end."""
    due = iteration % spec.evaluation.every == 0 or iteration == spec.iterations
    return due and spec.dataset.evaluation is not None


def run_name() -> str:
    """A flow run is called as the training run."""
    run, spec = flow_run.parameters.get("run"), flow_run.parameters["spec"]
    return str(run or (spec.name if isinstance(spec, RunSpec) else spec.get("name", "ppo")))


ppo_training: EmbeddedFlow[[RunSpec, str | None], RunReport] = EmbeddedFlow(
    fn=train,
    name="ppo-training",
    flow_run_name=run_name,
    description="Train a language-model policy with PPO, from prompts to a registered model; resumes by run name.",
    validate_parameters=True,
    persist_result=False,
)
