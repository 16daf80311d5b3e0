"""The commands that learn from preferences."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from flows.cli.application import Overrides, app
from flows.cli.friendly_errors import (
    INTERRUPTED,
    REFUSED,
    command_line,
    friendly_errors,
    leave,
    say,
    set_options,
    stopping_on_sigterm,
)
from flows.starting import tell_step
from ppo_core.spec import DpoSpec, RewardModelSpec

RunName = Annotated[str | None, typer.Option(help="Name of the run. Default: the spec's name")]


@app.command()
def reward_model(
    spec: Annotated[Path, typer.Argument(help="A reward model's spec, a YAML file", show_default=False)],
    run: RunName = None,
    overrides: Overrides = None,
) -> None:
    """Train a reward model on preferences; what was done before under the same settings is not done again."""
    with friendly_errors(f"reward model {run} from {spec}" if run else f"a reward model from {spec}"):
        loaded = RewardModelSpec.from_yaml(spec, overrides or [])
        from flows.reward_model import reward_model as flow

        report = finished(flow, loaded, run, again("reward-model", spec, run, overrides))
        tell("reward model", report, "reward_model/")


@app.command()
def dpo(
    spec: Annotated[
        Path, typer.Argument(help="The spec of a training on preferences, a YAML file", show_default=False)
    ],
    run: RunName = None,
    overrides: Overrides = None,
) -> None:
    """Train a policy on preferences (DPO); what was done before under the same settings is not done again."""
    with friendly_errors(f"DPO run {run} from {spec}" if run else f"a DPO run from {spec}"):
        loaded = DpoSpec.from_yaml(spec, overrides or [])
        from flows.dpo import dpo as flow

        tell("policy", finished(flow, loaded, run, again("dpo", spec, run, overrides)))


def again(command: str, spec: Path, run: str | None, overrides: list[str] | None) -> str:
    """The command line that goes on with it."""
    return command_line(command, str(spec), *(["--run", run] if run else []), *set_options(overrides))


def finished(flow: Any, spec: RewardModelSpec | DpoSpec, run: str | None, again: str) -> Any:
    """The flow's report. Where it is interrupted, or Prefect fails, `again` is named and the command ends."""
    from tasks.checks.preferences import check_preferences
    from tasks.prefect.server import PREFECT_AWAY, shown_url

    check_preferences(spec, run or spec.name)
    tell_step("starting Prefect's server")
    try:
        with stopping_on_sigterm():
            return flow.checked(spec, run)
    except KeyboardInterrupt:
        say(f"interrupted; what was finished is kept; go on with  {again}")
        raise typer.Exit(INTERRUPTED) from None
    except PREFECT_AWAY as error:
        say(f"Prefect's server at {shown_url()} fails or does not answer ({error})")
        say(f"what was finished is kept; go on with  {again}")
        leave(REFUSED)


def tell(what: str, report: Any, prefix: str = "") -> None:
    """What came out. The names of its metrics are shown without the prefix."""
    names = {name: name.removeprefix(prefix) for name in sorted(report.metrics)}
    width = max(18, *map(len, names.values()))
    say(f"{what} of run {report.run}")
    for name, shown in names.items():
        say(f"  {shown:<{width}} {report.metrics[name]:.4f}")
    say(f"  {'folder':<{width}} {report.folder}")
    say(f"  {'registered as':<{width}} {report.version or 'nothing'}")
    for complaint in report.complaints:
        say(f"! {complaint}; the same command tries again, without training")
