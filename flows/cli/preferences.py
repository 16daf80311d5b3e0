"""The commands that begin with preferences: a reward model, a policy (DPO), and the whole way to a promoted policy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from flows.cli.application import Overrides, Wait, app
from flows.cli.friendly_errors import command_line, ending_well, friendly_errors, say, set_options, with_set
from flows.cli.run_training import pass_check, tell_server
from ppo_core.spec import DpoSpec, RewardModelSpec, RlhfSpec
from ppo_core.spec.kinds import load_as

Run = Annotated[str | None, typer.Option(help="Name of the run; one that exists is resumed. Default: the spec's name")]


@app.command()
def reward_model(
    spec: Annotated[Path, typer.Argument(help="Spec of the reward model, a YAML file", show_default=False)],
    run: Run = None,
    overrides: Overrides = None,
    wait: Wait = False,
) -> None:
    """Train a reward model on preferences; finished stages with the same settings are reused."""
    with friendly_errors(f"reward model {run} from {spec}" if run else f"a reward model from {spec}"):
        loaded = load_as(RewardModelSpec, spec, overrides or [])
        with started(loaded, run, "flows.reward_model", goes_on_by("reward-model", spec, run, overrides), wait=wait):
            from flows.reward_model import reward_model as flow

            report = flow.checked(loaded, run, wait)
        tell("reward model", report)


@app.command()
def dpo(
    spec: Annotated[Path, typer.Argument(help="Spec of the DPO run, a YAML file", show_default=False)],
    run: Run = None,
    overrides: Overrides = None,
    wait: Wait = False,
) -> None:
    """Train a policy on preferences (DPO); finished stages with the same settings are reused."""
    with friendly_errors(f"DPO run {run} from {spec}" if run else f"a DPO run from {spec}"):
        loaded = load_as(DpoSpec, spec, overrides or [])
        with started(loaded, run, "flows.dpo", goes_on_by("dpo", spec, run, overrides), wait=wait):
            from flows.dpo import dpo as flow

            report = flow.checked(loaded, run, wait)
        tell("policy", report)


@contextmanager
def started(spec: RewardModelSpec | DpoSpec, run: str | None, module: str, again: str, *, wait: bool) -> Iterator[None]:
    """Check a spec and its data, and have engines start for its flow, which the caller calls inside and `module` holds.

    Where that is cut off, `again` is named and the command ends.
    """
    from tasks.checks.preferences import checking_preferences, flow_of, is_trained
    from tasks.checks.run import keeping_check_engine
    from tasks.runs.progress import announced
    from tasks.stages.early_engines import SCORING_ALONE, started_early
    from tasks.stages.holding import lease_name

    name = run or spec.name
    with keeping_check_engine() as kept:
        pass_check(checking_preferences(spec, name, wait=wait, starts=True), name, module)
        tell_server()
        only = SCORING_ALONE if is_trained(spec, name) else None
        # Whoever waits keeps no memory from others.
        early = nullcontext() if wait else started_early(spec, lease_name(flow_of(spec), name), kept.engine, only=only)
        with ending_well(again), announced(name, "starting"), early:
            kept.closing.close()
            yield


def tell(what: str, report: Any) -> None:
    """What came out. The names of a reward model's metrics are shown without the prefix."""
    names = {name: name.removeprefix("reward_model/") for name in sorted(report.metrics)}
    width = max(18, *map(len, names.values()))
    say(f"{what} of run {report.run}")
    for name, shown in names.items():
        say(f"  {shown:<{width}} {report.metrics[name]:.4f}")
    say(f"  {'folder':<{width}} {report.folder}")
    say(f"  {'registered as':<{width}} {report.version or 'none'}")
    for complaint in report.complaints:
        say(f"! {complaint}; run the same command to retry, without training again")


@app.command()
def rlhf(
    spec: Annotated[Path, typer.Argument(help="Spec of the pipeline, a YAML file", show_default=False)],
    run: Run = None,
    overrides: Overrides = None,
    wait: Wait = False,
) -> None:
    """Run the full pipeline, or resume it: SFT, reward model, PPO, evaluation, promotion."""
    with friendly_errors(f"run {run} from {spec}" if run else f"a run from {spec}"):
        loaded = load_as(RlhfSpec, spec, overrides or [])
        from tasks.checks.rlhf import checking_rlhf

        pass_check(checking_rlhf(loaded, run, wait=wait), run or loaded.name, "flows.rlhf")
        from flows.rlhf import rlhf as flow
        from tasks.reports.summary import run_summary

        tell_server()
        same = goes_on_by("rlhf", spec, run, overrides)
        with ending_well(same):
            report = flow.checked(loaded, run, wait)
        if report.training is not None:
            say(run_summary(report.training, with_set(same, f"run.iterations={report.training.iterations + 10}")))
            say(f"  {'reward model':<18} {report.reward_model_folder}")
        if report.reward_model is not None:
            accuracy = report.reward_model.metrics.get("reward_model/accuracy")
            say(f"  {'':<18} {report.reward_model.version or 'not registered'}, held-out accuracy {accuracy:.3f}")
        if report.evaluation is not None:
            say(f"  {'evaluated':<18} {report.evaluation.policy}: {report.evaluation.evaluation.in_words()}")
        if report.promotion is not None:
            say(f"  {'promoted' if report.promotion.moved else 'not promoted':<18} {report.promotion.verdict}")
        for complaint in report.complaints:
            say(f"! {complaint}; run the same command to retry, without training again")


def goes_on_by(command: str, spec: Path, run: str | None, overrides: list[str] | None) -> str:
    """The command that goes on with this run."""
    return command_line(command, str(spec), *(["--run", run] if run else []), *set_options(overrides))
