"""The whole way from preferences to a promoted policy as a flow, of flows that can also be called by themselves:

    SFT ─► reward-model ─► ppo-training ─► evaluation ─► promotion
     └─ where the reward model starts from it; else it is the first stage of ppo-training

What a spec gives is not made. Each part finds its finished stages in the store, and PPO its records: killed anywhere
and started again by the same command, the flow goes on where it stopped.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from prefect.exceptions import MissingResult
from pydantic import BaseModel, ConfigDict

from flows.console import RunConsole
from flows.evaluation import EvaluationReport, evaluation
from flows.learning import PreferenceReport
from flows.ppo import RunReport, ppo_training
from flows.promotion import PromotionReport, promotion
from flows.recovery import IN_RESULTS, close_dead_pages
from flows.reward_model import reward_model
from flows.supervised import supervised
from ppo_core.spec import RlhfSpec, RunSpec
from ppo_core.spec.hub import is_hub_name
from ppo_core.spec.rlhf import REGISTERED
from tasks.checks.rlhf import check_rlhf
from tasks.prefect.crashed_runs import holder_note, page_is_open
from tasks.prefect.deployment_params import is_deployed, requested, shown_name
from tasks.prefect.flow_tags import tag_run
from tasks.prefect.server import EmbeddedFlow, page_url
from tasks.prefect.store_outages import report_outages
from tasks.preferences.given import fetch_given, pin_start, places_of, start_is_there, with_commits_of_parts
from tasks.runs.progress import announced
from tasks.runs.run_state import spec_of_run
from tasks.stages.holding import RLHF, alone


class RlhfReport(BaseModel):
    """What the whole way leaves; None for parts that were skipped, or could not be done: `complaints` say why.

    In place of its folder a reward model of the hub has its name.
    """

    model_config = ConfigDict(frozen=True)

    run: str
    reward_model: PreferenceReport | None
    reward_model_folder: Path | str | None
    training: RunReport | None
    evaluation: EvaluationReport | None
    promotion: PromotionReport | None
    complaints: list[str]


def train(spec: RlhfSpec, run: str | None = None, wait: bool = False, overrides: list[str] | None = None) -> RlhfReport:
    """From preferences to a promoted policy: SFT, reward model, PPO, evaluation and promotion; each goes on by itself.

    Args:
        spec: The specs of its parts, and what is there already
        run: Name of the run, of all its parts; a known one goes on. Without it, the spec's name, under a deployment
            with its start time
        wait: Wait while another process has the run, instead of refusing
        overrides: section.key=value over the spec, for example run.iterations=10
    """
    spec, run = requested(spec, run, overrides)
    console = RunConsole(run, 0)
    with report_outages(console.say):
        for note in check_rlhf(spec, run, wait=wait).notes if is_deployed() else []:
            console.say(note)
    held = alone(RLHF, run, note=holder_note(), wait=wait, keep=lambda: not page_is_open())
    with report_outages(console.say), held as lease:
        close_dead_pages(lease, console)
        console.step(f"run {run}: {', '.join(spec.stages)}; Prefect page {page_url()} (flow rlhf)")
        if spec.given.trained_policy is not None:
            return finish(spec, run, spec.given.trained_policy)
        fetch_given(spec, run)
        spec = with_commits_of_parts(spec, run)
        places = places_of(spec, run)
        if spec.learns_from_policy and spec.given.policy is None:
            if not start_is_there(run):
                called(supervised, spec.run_before(None), run, wait)
            pin_start(lease, run)
        model = None
        if spec.trained is not None:
            model = called(reward_model, spec.reward_model_from(places.policy), run, wait)
        asked = spec.run_with(places.reward_model, places.policy)
        training = called(ppo_training, asked, run, wait)
        policy, folder = training.policy, places.reward_model
        best = f"{run}@{training.best_iteration}" if policy is None else f"models:/{policy.name}/{policy.version}"
        report = finish(spec, run, best, as_now(asked, run), [] if model is None else model.complaints)
        made = {"reward_model": model, "training": training}
        return report.model_copy(
            update={**made, "reward_model_folder": folder if is_hub_name(folder) else Path(folder)}
        )


def as_now(asked: RunSpec, run: str) -> tuple[list[str], str | None]:
    """Overrides and folder with which the run's policy is evaluated and promoted under the gates given now, on the
    engines of now and with the sources where they are now: its records, which may be finished, tell of earlier ones."""
    engines = asked.engines.model_dump(mode="json", exclude=set(IN_RESULTS))
    changes = {f"engines.{key}": value for key, value in engines.items()}
    changes["promotion"] = asked.promotion.model_dump(mode="json")
    moved = asked.folder != spec_of_run(run).folder
    return [f"{key}={json.dumps(value)}" for key, value in changes.items()], asked.folder if moved else None


def finish(
    spec: RlhfSpec,
    run: str,
    policy: str,
    now: tuple[list[str] | None, str | None] = (None, None),
    complaints: Sequence[str] = (),
) -> RlhfReport:
    """Evaluate a policy and have it compared with the champion, as far as the spec asks for it. `now`: see `as_now`;
    a policy that was given is tried as the records of its own run say."""
    evaluated = promoted = None
    if spec.evaluate:
        with announced(run, f"evaluating {policy}"):
            evaluated = called(evaluation, policy, *now)
    registered = policy.startswith(REGISTERED)
    if spec.promote and registered:
        with announced(run, f"comparing {policy} with the champion"):
            promoted = called(promotion, policy, *now)
    left = [f"{policy} is not promoted: it is not registered"] if spec.promote and not registered else []
    return RlhfReport(
        run=run,
        reward_model=None,
        reward_model_folder=None,
        training=None,
        evaluation=evaluated,
        promotion=promoted,
        complaints=[*complaints, *left],
    )


def called(flow: EmbeddedFlow[..., Any], *arguments: Any) -> Any:
    """What a flow gives that was checked before. When this flow run was started again, Prefect knows those below it
    that have ended, but not what they gave: such a one is called once more, and takes everything from the store."""
    while True:
        try:
            return flow.checked(*arguments)
        except MissingResult:
            continue


def check_called(
    spec: RlhfSpec, run: str | None = None, wait: bool = False, overrides: list[str] | None = None
) -> None:
    """What calling the flow does before a Prefect server starts; raises what `check_rlhf` raises, and SpecError."""
    spec, run = requested(spec, run, overrides)
    check_rlhf(spec, run, wait=wait)


rlhf: EmbeddedFlow[[RlhfSpec, str | None, bool, list[str] | None], RlhfReport] = EmbeddedFlow(
    fn=train,
    check=check_called,
    name=RLHF,
    flow_run_name=partial(shown_name, RlhfSpec),
    description="From preferences to a promoted policy, over SFT, a reward model and PPO; resumes by run name.",
    validate_parameters=True,
    persist_result=False,
    on_running=[tag_run],
)
