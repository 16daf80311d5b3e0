"""Commands on registered policies: where one is from, how good it is, and which is the champion."""

from __future__ import annotations

from typing import Annotated

import typer

from flows.cli.application import Folder, Overrides, app
from flows.cli.friendly_errors import friendly_errors, say, stopping_on_sigterm

PANEL = "Registered policies"
NOT_PROMOTED, INCONSISTENT = 1, 1
Named = Annotated[
    str, typer.Argument(help="models:/NAME@ALIAS, models:/NAME/VERSION, RUN or RUN@ITERATION", show_default=False)
]
Model = Annotated[str, typer.Argument(help="Name of the registered model", show_default=False)]


@app.command(rich_help_panel=PANEL)
def lineage(policy: Named) -> None:
    """Show the lineage of a policy, from its version down to the prompts. Exit status 1: it is inconsistent."""
    with friendly_errors():
        from flows.cli.lineage_view import lines
        from tasks.policies.lineage import trace

        found = trace(policy)
        for line in lines(found):
            say(line)
        if found.complaints:
            say("\n".join(["the lineage is inconsistent:", *found.complaints]))
            raise typer.Exit(INCONSISTENT)


@app.command(rich_help_panel=PANEL)
def evaluate(policy: Named, overrides: Overrides = None, folder: Folder = None) -> None:
    """Evaluate a policy on the held-out prompts of its run's spec."""
    with friendly_errors():
        from tasks.policies.policy import require_policy

        require_policy(policy, overrides or [], folder)
        from flows.evaluation import evaluation

        with stopping_on_sigterm():
            report = evaluation(policy, overrides, folder)
        say(f"{report.policy}: run {report.run}, iteration {report.iteration}, {report.prompts} prompts")
        for name, value in sorted(report.evaluation.metrics.items()):
            say(f"  {name:<32} {value:.4f}")
        say(f"  {'artifact':<32} {report.evaluation.uri}")
        if report.complaint:
            say(f"! MLflow did not record this evaluation: {report.complaint}; run the same command to retry")


@app.command(rich_help_panel=PANEL)
def promote(
    candidate: Annotated[str, typer.Argument(help="models:/NAME@ALIAS or models:/NAME/VERSION", show_default=False)],
    overrides: Overrides = None,
    folder: Folder = None,
) -> None:
    """Compare a candidate with the champion, and promote it if it passes the gates. Exit status 1: it did not."""
    with friendly_errors():
        from tasks.policies.policy import require_registered

        require_registered(candidate, overrides or [], folder)
        from flows.promotion import promotion

        with stopping_on_sigterm():
            report = promotion(candidate, overrides, folder)
        if report.moved is None:
            say(f"not promoted: {report.verdict}")
            raise typer.Exit(NOT_PROMOTED)
        say(f"promoted: {report.moved}")


@app.command(rich_help_panel=PANEL)
def rollback(
    model: Model,
    alias: Annotated[str | None, typer.Option(help="Alias to move. Default: champion")] = None,
    to: Annotated[str | None, typer.Option(help="Version to point to. Default: the previous one")] = None,
    reason: Annotated[str, typer.Option(help="Reason, stored with the move")] = "",
) -> None:
    """Point a model's alias back to the previous version; recorded like any other move."""
    with friendly_errors():
        from tasks.policies.promote_policy import roll_back

        say(roll_back(model, alias, to=to, why=reason))
