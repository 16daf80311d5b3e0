"""Promotion and rollback: what moves the champion's alias, on what evidence, and what people read of it."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from prefect.artifacts import create_markdown_artifact
from prefect.input import RunInput
from pydantic import BaseModel, ConfigDict, Field

from infra.artifacts import ArtifactError, open_store
from infra.mlflow.alias import Alias, Reason, Standing, describe_move
from infra.mlflow.alias_journal import Journals
from infra.mlflow.current_user import current_user
from infra.mlflow.registry import MODEL_URI, InvalidModelName, Version, aliases_of, describe
from infra.settings import Settings
from ppo_core.records import InputError
from ppo_core.spec import PromotionSpec, registered_name
from tasks.policies.compare_policies import ComparisonRef
from tasks.policies.gates import Gate
from tasks.policies.policy import Policy, checkpoint_of, registered, require_no_reward_model
from tasks.reports.prefect import as_code, page_key, prompt_text, tell_prefect
from tasks.stages.context import RunContext
from tasks.stages.references import EvaluationRef
from tasks.stages.stage import stage

DEFAULT_ALIAS = PromotionSpec.model_fields["alias"].default


class Approval(RunInput):
    """What a person answers in Prefect's UI."""

    approve: bool = Field(False, description="Move the alias to the candidate?")
    by: str = Field("", description="Who answers; goes on record", max_length=200)
    comment: str = Field("", description="Why; goes on record", max_length=2000)


class Trial(BaseModel):
    """What a promotion rests on: the candidate against the champion (none: there is none yet), and the gates."""

    model_config = ConfigDict(frozen=True)

    model: str
    alias: str
    candidate: str
    champion: str | None
    gates: list[Gate]
    candidate_evaluation: EvaluationRef
    champion_evaluation: EvaluationRef | None = None
    comparison: ComparisonRef | None = None

    def artifacts(self) -> list[EvaluationRef | ComparisonRef]:
        """All that it consists of."""
        parts = (self.candidate_evaluation, self.champion_evaluation, self.comparison)
        return [part for part in parts if part is not None]

    def summary(self) -> str:
        """The gates, in a few lines."""
        against = "no champion yet" if self.champion is None else f"champion version {self.champion}"
        lines = [f"{self.model}: candidate version {self.candidate} against {against}"]
        return "\n".join([*lines, *(f"  {gate.name:<18} {gate.sign:<12} {gate.text}" for gate in self.gates)])

    def page(self) -> str:
        """The same for Prefect's pages, with the prompts on which the candidate loses most."""
        against = "no champion yet" if self.champion is None else f"version {self.champion}"
        rows = [f"| {gate.name} | {gate.sign} | {gate.text} |" for gate in self.gates]
        parts = [
            f"# {self.model}: version {self.candidate} for `{self.alias}`, against {against}",
            "\n".join(["| gate | | |", "|---|---|---|", *rows]),
        ]
        if self.comparison is not None:
            lost = [
                f"- {as_code(prompt_text(item['prompt']))} candidate {as_code(item['candidate'])}, champion "
                f"{as_code(item['champion'])} ({item['difference']:+.3f})"
                for item in self.comparison.setbacks
            ]
            counted = f"better on {self.comparison.better}, worse on {self.comparison.worse} of {self.comparison.pairs}"
            parts += [f"The candidate is {counted} prompts.", *(["Worst:\n" + "\n".join(lost)] if lost else [])]
        return "\n\n".join(parts)


def alias_at(model: str, alias: str) -> tuple[Alias, Standing]:
    """An alias of a registered model, with its journal in our store; and where it stands."""
    settings = Settings()
    handle = Alias(settings.tracking_uri, Journals(open_store(settings.store_root).root).of(model), alias)
    return handle, handle.standing()


def require_model(model: str) -> str:
    """A registered model's name, as it is given; raises InvalidModelName for what cannot be one."""
    if parts := MODEL_URI.fullmatch(model):
        raise InvalidModelName(
            f"{model!r} names a version: give the model's name alone, {parts['name']}; --alias says which alias goes "
            "back, and --to VERSION where to"
        )
    try:
        return registered_name(model)
    except ValueError as error:
        raise InvalidModelName(
            f"{model!r} does not name a registered model: give its name, for example arithmetic ({error})"
        ) from None


@stage("show_trial", retries=0)
def show_trial(context: RunContext, trial: Trial) -> None:
    """Put the gates, and the prompts that got worse, on Prefect's page."""
    text, key = trial.page(), page_key(trial.model, "promotion")
    tell_prefect(context, "the comparison", lambda: create_markdown_artifact(text, key=key))


@stage("move_alias", retries=0)
def move_alias(alias: Alias, standing: Standing, candidate: Policy, trial: Trial, approval: Approval | None) -> str:
    """Make the candidate the champion, if the alias still stands where the trial began. Returns what was recorded."""
    reason = promotion_reason(candidate, trial, approval)
    return describe_move(alias.move(standing, registered(candidate).version, "promote", reason))


def promotion_reason(candidate: Policy, trial: Trial, approval: Approval | None) -> Reason:
    """Who, why, and the evidence, for the journal."""
    evidence: dict[str, Any] = {
        "candidate": lineage_of(candidate),
        "champion": trial.champion,
        "gates": [gate.model_dump() for gate in trial.gates],
        "metrics": dict(trial.comparison.metrics) if trial.comparison else dict(trial.candidate_evaluation.metrics),
    }
    if approval is not None:
        evidence["approval"] = {"by": approval.by, "comment": approval.comment}
    by = f"{approval.by}, through {current_user()}" if approval is not None and approval.by else current_user()
    artifacts = [candidate.checkpoint.bare(), *(part.bare() for part in trial.artifacts())]
    return Reason(by, approval.comment if approval is not None else "", evidence, artifacts)


def lineage_of(policy: Policy) -> Mapping[str, Any]:
    """Where a policy is from, in a few words."""
    return {
        "run": policy.run,
        "iteration": policy.iteration,
        "checkpoint": policy.checkpoint.digest,
        "spec": policy.record.spec_digest,
        "dataset": policy.record.dataset.digest,
    }


def roll_back(model: str, alias: str | None = None, *, to: str | None = None, why: str = "", by: str = "") -> str:
    """Point an alias to the version before the present one, or to another; that is a recorded move like any other."""
    settings, name = Settings(), require_model(model)
    if to is not None:
        describe(settings.tracking_uri, f"models:/{name}/{to}")  # before anything is written down
    require_alias(settings, name, alias or DEFAULT_ALIAS)
    handle, standing = alias_at(name, alias or DEFAULT_ALIAS)
    version = describe(settings.tracking_uri, f"models:/{handle.model}/{to or handle.before()}")
    if version.version == standing.version:
        raise InputError(f"{handle.name} of {handle.model!r} points to version {version.version} already")
    require_stored(version, settings)
    moved = handle.move(standing, version.version, "rollback", Reason(by or current_user(), why))
    return f"{handle.name} of {handle.model}: {describe_move(moved)}"


def require_alias(settings: Settings, model: str, alias: str) -> None:
    """Raise InputError for one that never was: a rollback would make it, and leave the one that is meant."""
    now = aliases_of(settings.tracking_uri, model)
    journal = Journals(open_store(settings.store_root).root).of(model)
    known = sorted({*now, *(page.alias for page in journal.moves())})
    if alias not in known:
        close = get_close_matches(alias, known, n=1)
        hint = f"did you mean {close[0]}?" if close else "promote makes the first move of an alias"
        there = ", ".join(known) or "none"
        raise InputError(f"{model} has no alias {alias} (its aliases, now or before: {there}); {hint}")


def require_stored(version: Version, settings: Settings) -> None:
    """Raise InputError where the weights of a version are gone: an alias must lead to something.

    They stay whatever becomes of the run that made them, and so does the way back to them.
    """
    name = f"models:/{version.name}/{version.version}"
    require_no_reward_model(version, name)
    checkpoint = checkpoint_of(version, name)
    try:
        stored = open_store(settings.store_root).find(checkpoint.kind, checkpoint.key)
    except ArtifactError as error:
        raise InputError(f"{name} cannot take the alias, its checkpoint is damaged: {error}") from None
    if stored is None:
        raise InputError(f"{name} cannot take the alias: its checkpoint {checkpoint.key} is not in the store any more")


def history(model: str) -> list[str]:
    """Every move of the model's aliases, a line each."""
    moves = Journals(open_store(Settings().store_root).root).of(model).moves()
    return [f"{move.number:>3}  {move.alias:<10} {describe_move(move)}" for move in moves]
