"""Trying a spec's reward functions on a few rows, in the scoring engine, without a model."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infra.artifacts import open_store
from infra.engines.protocol import EngineInput, EngineJob, EngineTimeout
from infra.settings import Settings
from ppo_core.records import NOT_IN_A_TRIAL, InputError
from ppo_core.spec import RunSpec
from ppo_core.spec.flow_spec import FlowSpec
from tasks.runs.state_folder import require_writable_state
from tasks.stages.dataset_job import reward_trial
from tasks.stages.engine_programs import EnginePlan, launch
from tasks.stages.hub_names import Downloads, hub_sources, with_commits
from tasks.stages.jobs import ask


@dataclass(frozen=True)
class TrialRow:
    """One row with its trial completion and what the functions say of it.

    `spans` are the parts of scores that came in parts: start, end and score.
    """

    prompt: Any
    completion: str
    components: dict[str, float | None]
    score: float | None
    error: str | None
    spans: dict[str, list[tuple[int, int, float]]] = field(default_factory=dict)

    def cells(self) -> list[str]:
        """As a table shows it."""
        prompt = self.prompt if isinstance(self.prompt, str) else str(self.prompt[-1].get("content", ""))
        values = {**self.components, "": self.score}
        return [prompt, self.completion, *(self._cell(name, value) for name, value in values.items())]

    def _cell(self, name: str, value: float | None) -> str:
        """A score, below it its parts with the text that each is for."""
        parts = [f"{score:g} for {self.completion[start:end]!r}" for start, end, score in self.spans.get(name, ())]
        return "\n".join(["none" if value is None else f"{value:g}", *parts])


def try_reward(spec: RunSpec, completions: list[str]) -> list[TrialRow]:
    """Score five rows. Raises InputError or EngineError with the complaint for what cannot be a reward."""
    settings = Settings()
    require_writable_state(settings)
    engine = launch(EnginePlan("scoring", "reward"), settings, settings.home / "logs")
    inputs = {"sources": EngineInput(Path(spec.folder).absolute(), ""), **_downloads(spec, settings)}
    job = EngineJob("try_reward", inputs, None, reward_trial(spec, completions, new=True))
    try:
        rows = ask(engine, job, silence_s=spec.engines.reward_timeout_s).result["rows"]
    except EngineTimeout:
        raise too_slow(spec.reward.labels, spec) from None
    finally:
        engine.close()
    return [TrialRow(**row) for row in rows]


def _downloads(spec: RunSpec, settings: Settings) -> dict[str, EngineInput]:
    """The rows and reward models that are of the hub. Raises InputError for those that are not in the store."""
    needed, found = {*spec.data, *spec.reward.folders}, dict[str, EngineInput]()
    downloads = Downloads(open_store(settings.store_root))
    for name, source in hub_sources(with_commits(spec)).items():
        if name in needed:
            there = downloads.of(source)
            if there is None:
                raise InputError(f"{name} is not in the store {settings.store_root} yet: run ppoflow download first")
            found[name] = there
    return found


def complaints(rows: list[TrialRow]) -> list[str]:
    """What a user should look at before training on these scores."""
    return doubts([row.score for row in rows], [row.error for row in rows])


def too_slow(what: str, spec: FlowSpec) -> InputError:
    """The complaint about what is the user's, and silent for too long."""
    return InputError(
        f"no progress from {what} for engines.reward_timeout_s={spec.engines.reward_timeout_s:g} seconds: make them "
        "faster, or raise that limit"
    )


def require_scores(scores: list[float | None], errors: list[str | None]) -> None:
    """Raise InputError where each of these trial rows failed for a reason that is known: so would those of training."""
    reasons = [error for error in errors if error and ": " in error and not error.endswith(NOT_IN_A_TRIAL)]
    if scores and len(reasons) == len(scores) and not any(score is not None for score in scores):
        raise InputError(
            f"none of {len(scores)} rows has a score ({reasons[0]}): training would end at its first iteration; try  "
            "ppoflow reward SPEC --completion TEXT"
        )


def doubts(scores: list[float | None], errors: list[str | None]) -> list[str]:
    """What speaks against training on scores like those of these trial rows; `errors` say why there is none."""
    if all(
        score is None and (error or "").endswith(NOT_IN_A_TRIAL) for score, error in zip(scores, errors, strict=True)
    ):
        return []
    found = []
    if None in scores:
        why = next((error for error in errors if error), "None")
        if scores.count(None) == len(scores):
            return [f"no row has a score ({why}): training would end at its first iteration"]
        found.append(f"{scores.count(None)} of {len(scores)} rows have no score ({why}): training will leave them out")
    if len(scores) > 1 and len(set(scores)) == 1:
        found.append(
            f"every row has the same score ({scores[0]}): PPO learns nothing from that; try  ppoflow reward SPEC "
            "--completion TEXT"
        )
    return found
