"""The commands that learn from preferences."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

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
from ppo_core.spec import RewardModelSpec


@app.command()
def reward_model(
    spec: Annotated[Path, typer.Argument(help="A reward model's spec, a YAML file", show_default=False)],
    run: Annotated[str | None, typer.Option(help="Name of the run. Default: the spec's name")] = None,
    overrides: Overrides = None,
) -> None:
    """Train a reward model on preferences; what was done before under the same settings is not done again."""
    with friendly_errors(f"reward model {run} from {spec}" if run else f"a reward model from {spec}"):
        loaded = RewardModelSpec.from_yaml(spec, overrides or [])
        again = command_line("reward-model", str(spec), *(["--run", run] if run else []), *set_options(overrides))
        from flows.reward_model import reward_model as flow
        from tasks.checks.preflight import preflight
        from tasks.prefect.server import PREFECT_AWAY, shown_url

        preflight(loaded)
        tell_step("starting Prefect's server")
        try:
            with stopping_on_sigterm():
                report = flow.checked(loaded, run)
        except KeyboardInterrupt:
            say(f"interrupted; what was finished is kept; go on with  {again}")
            raise typer.Exit(INTERRUPTED) from None
        except PREFECT_AWAY as error:
            say(f"Prefect's server at {shown_url()} fails or does not answer ({error})")
            say(f"what was finished is kept; go on with  {again}")
            leave(REFUSED)
        say(f"reward model of run {report.run}")
        for name, value in sorted(report.metrics.items()):
            say(f"  {name.removeprefix('reward_model/'):<18} {value:.4f}")
        say(f"  {'folder':<18} {report.folder}")
        say(f"  {'registered as':<18} {report.version or 'nothing'}")
        for complaint in report.complaints:
            say(f"! {complaint}; the same command tries again, without training")
