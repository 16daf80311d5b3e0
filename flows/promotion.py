"""Promotion as a flow: may the candidate take the champion's place?

    where does the alias stand? ─► evaluate both on one held-out set ─► compare, prompt by prompt ─► gates
                                                                                                       │
                the alias moves, if it still stands there ◄─ a person's yes, where the spec asks for it ◄──┘

Of several promotions at once one moves the alias; the others say who has moved it meanwhile. Every move is on record.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import cast

from prefect.exceptions import FlowPauseTimeout
from prefect.flow_runs import pause_flow_run, suspend_flow_run
from prefect.runtime import flow_run
from prefect.states import Completed
from pydantic import BaseModel, ConfigDict

from flows.console import RunConsole
from infra.artifacts.manifest import sha256_of
from ppo_core.spec import PromotionSpec, RunSpec
from ppo_core.spec.promotion import fewest_pairs
from tasks.policies.compare_policies import compare_policies
from tasks.policies.gates import check_gates, passed
from tasks.policies.held_out import evaluate_held_out, open_evaluation, pinned
from tasks.policies.policy import Policy, find_policy, registered
from tasks.policies.promote_policy import Approval, Trial, alias_at, move_alias, roll_back, show_trial
from tasks.prefect.client import deployment_id, go_on_after_pause, tries
from tasks.prefect.flow_tags import also_tag, tag_run
from tasks.prefect.server import EmbeddedFlow, page_url
from tasks.runs.errors import InputError
from tasks.runs.run_state import spec_of_run
from tasks.stages.context import OnProgress, RunContext

HOUR_S = 3600
ASK_AGAIN_S = 2


class PromotionReport(BaseModel):
    """How a promotion ended: `moved` says how the alias moved, and is None where it did not."""

    model_config = ConfigDict(frozen=True)

    trial: Trial | None
    moved: str | None
    verdict: str


def promote(candidate: str, overrides: list[str] | None = None, folder: str | None = None) -> PromotionReport:
    """Compare a candidate with the champion, and let it take the champion's alias if it passes every gate.

    Args:
        candidate: The registered version, models:/NAME@ALIAS or models:/NAME/VERSION
        overrides: section.key=value over the spec of the candidate's run, for example promotion.min_gain=0.02
        folder: Where that spec's folder (data, reward functions) is now, if it has moved; a champion of the same folder
            has moved with it
    """
    policy = find_policy(candidate, folder)
    also_tag(policy.run, policy.spec.name)
    version = registered(policy)
    spec = policy.spec.with_overrides(overrides or [])
    alias, standing = alias_at(version.name, spec.promotion.alias)
    if standing.version == version.version:
        verdict = f"version {version.version} of {version.name} is {alias.name} already"
        return refused(PromotionReport(trial=None, moved=None, verdict=verdict))
    champion = None if standing.version is None else find_champion(alias.name, version.name, standing.version)
    if champion is not None and folder is not None and champion.spec.folder == spec_of_run(policy.run).folder:
        champion = find_policy(champion.name, folder)  # it has moved with the candidate's
    fewest, given = fewest_pairs(spec.promotion.confidence), spec.evaluation.num_prompts
    if champion is not None and given < fewest:
        raise InputError(
            f"evaluation.num_prompts={given} is too few to compare with promotion.confidence="
            f"{spec.promotion.confidence:g}: at least {fewest} are needed; raise it, or lower the confidence"
        )
    console = RunConsole(f"promotion of {version.name}/{version.version}", 0)
    with console, ExitStack() as kept:
        trial = held_trial(policy, champion, spec, console.progress, kept)
        console.say(trial.summary())
        if not passed(trial.gates):
            return refused(PromotionReport(trial=trial, moved=None, verdict="a gate has failed"))
        approval = None
        if spec.promotion.approval:
            console.say(f"waiting for approval in Prefect's UI: {page_url() or 'the page of this flow run'}")
            approval = ask(trial, spec.promotion)
            if approval is None:
                verdict = f"nobody answered within {spec.promotion.approval_timeout_h:g} h"
                return refused(PromotionReport(trial=trial, moved=None, verdict=verdict))
            if not approval.approve:
                verdict = f"{approval.by or 'a person'} said no: {approval.comment or 'without a comment'}"
                return refused(PromotionReport(trial=trial, moved=None, verdict=verdict))
        moved = move_alias(alias, standing, policy, trial, approval)
        return PromotionReport(trial=trial, moved=moved, verdict=moved)


def find_champion(alias: str, name: str, number: str) -> Policy:
    """What an alias points to. Raises InputError where no candidate can be compared with that, and says what helps."""
    try:
        return find_policy(f"models:/{name}/{number}")
    except InputError as error:
        raise InputError(
            f"{name}@{alias} is version {number}, which no policy can be compared with: {error}. Take the alias "
            "away in MLflow, or put it on a version of a run, then promote again"
        ) from error


def held_trial(
    candidate: Policy, champion: Policy | None, spec: RunSpec, on_progress: OnProgress, kept: ExitStack
) -> Trial:
    """Compare with engines that are gone when a person is asked.

    Until `kept` is closed the collector leaves what the move of the alias would name: a person may take days.
    """
    version = registered(candidate)
    with open_evaluation(candidate, spec, f"promotion of {version.name}/{version.version}", on_progress) as context:
        trial = try_candidate(context, candidate, champion)
        kept.enter_context(pinned(context.store.root, [*trial.artifacts(), candidate.checkpoint]))
        return trial


def try_candidate(context: RunContext, candidate: Policy, champion: Policy | None) -> Trial:
    """Evaluate both on the held-out set of the context's spec, compare, and look at the gates."""
    spec, version = context.spec.promotion, registered(candidate)
    dataset, evaluation = evaluate_held_out(context, candidate)
    other = comparison = None
    if champion is not None:
        _, other = evaluate_held_out(context, champion, candidate)
        comparison = compare_policies(context, evaluation, other, dataset)
    trial = Trial(
        model=version.name,
        alias=spec.alias,
        candidate=version.version,
        champion=None if champion is None else registered(champion).version,
        gates=check_gates(spec, candidate, comparison),
        candidate_evaluation=evaluation,
        champion_evaluation=other,
        comparison=comparison,
    )
    show_trial(context, trial)
    return trial


def ask(trial: Trial, spec: PromotionSpec) -> Approval | None:
    """Wait for a person; None where nobody answers in time; a suspended flow run is Failed by Prefect then.

    A worker is let go meanwhile: the flow run is suspended, and goes on from here when resumed; only one that is a part
    of another flow run cannot be, and waits here.

    The key, of small letters, digits and dashes, is that of the two versions: who said yes to one comparison has not
    said yes to another. And of the try: one that failed after it was answered asks anew; Prefect takes each key once.
    """
    form = Approval.with_initial_data(description=trial.page())
    key = f"{sha256_of([trial.alias, trial.champion, trial.candidate])[:16]}-{tries()}"
    timeout = int(spec.approval_timeout_h * HOUR_S)
    if deployment_id() and not flow_run.parent_flow_run_id:
        return suspend_flow_run(wait_for_input=form, timeout=timeout, key=key)
    try:
        return pause_flow_run(wait_for_input=form, timeout=timeout, poll_interval=ASK_AGAIN_S, key=key)
    except FlowPauseTimeout:
        go_on_after_pause()
        return None


def refused(report: PromotionReport) -> PromotionReport:
    """The flow has done its work, and the alias stays: Prefect's page says so. Callers of the flow get the report."""
    return cast(PromotionReport, Completed(name="NotPromoted", message=report.verdict, data=report))


def take_back(model: str, alias: str | None = None, to: str | None = None, reason: str = "", by: str = "") -> str:
    """Point an alias to the version before the present one. That is a recorded move like any other.

    Args:
        model: The registered model's name
        alias: The alias that moves; without it, champion
        to: A version to point to instead of the one before
        reason: Why; goes on record
        by: Who; goes on record
    """
    return roll_back(model, alias, to=to, why=reason, by=by)


promotion: EmbeddedFlow[[str, list[str] | None, str | None], PromotionReport] = EmbeddedFlow(
    fn=promote,
    name="promotion",
    flow_run_name="promote-{candidate}",
    description="Compare a candidate with the champion on held-out prompts; past all gates, it takes its place.",
    validate_parameters=True,
    persist_result=False,
    on_running=[tag_run],
)
rollback: EmbeddedFlow[[str, str | None, str | None, str, str], str] = EmbeddedFlow(
    fn=take_back,
    name="rollback",
    flow_run_name="rollback-{model}",
    description="Point a model's alias to the version before the present one.",
    validate_parameters=True,
    persist_result=False,
    on_running=[tag_run],
)
