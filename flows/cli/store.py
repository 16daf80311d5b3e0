"""Commands on the store: whether everything in it is as it was written, and what nobody needs of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from flows.cli.application import Folder, app
from flows.cli.friendly_errors import friendly_errors, say

if TYPE_CHECKING:
    from tasks.runs.findings import Findings

PANEL = "The store"
DAMAGED = 1
MIB, GIB = 2**20, 2**30


@app.command(rich_help_panel=PANEL)
def fsck(
    run: Annotated[str | None, typer.Argument(help="Name of a run. Default: everything in the store")] = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Restore, remove or recompute what is damaged, as the remedies say")
    ] = False,
    folder: Folder = None,
) -> None:
    """Read every record and every byte, and report damage with its remedy. Exit status 1: something is damaged.

    Safe while runs are writing. `verify` checks that results follow from their inputs; this, that they are intact.
    """
    with friendly_errors():
        from tasks.runs.run_state import require_store

        if run is None:
            require_store()
        left = look(run)
        if left and repair:
            from flows.fsck import repair as repaired

            for found in left:
                for line in repaired(found, folder):
                    say(line)
            say("checking everything again")
            left = look(run)
        if left:
            raise typer.Exit(DAMAGED)


def look(run: str | None) -> list[Findings]:
    """Read, and report what was found; those findings in which something is damaged."""
    from tasks.runs.fsck import check_run, check_store

    console = Console()
    left = []
    with console.status("reading") as status:
        for found in [check_run(run, status.update)] if run is not None else check_store(status.update):
            whose = f"run {found.run}: {found.records} records, " if found.run else "not in any run: "
            amount = f"{whose}{found.artifacts} artifacts, {found.bytes / MIB:.1f} MiB read"
            verdict = f"{len(found.damages)} damaged" if found.damages else "all intact"
            say(f"{amount}: {verdict}")
            for damage in found.damages:
                say(f"! {damage.what}: {damage.complaint}")
                if damage.remedy and damage.remedy not in damage.complaint:
                    say(f"    {damage.remedy}")
            if found.damages:
                left.append(found)
    return left


@app.command(rich_help_panel=PANEL)
def gc(
    yes: Annotated[bool, typer.Option("--yes", help="Remove without asking")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed")] = False,
    damaged: Annotated[bool, typer.Option("--damaged", help="Also remove what was set aside as damaged")] = False,
) -> None:
    """Remove what no run needs any more; safe while runs are writing. Lists it first."""
    with friendly_errors():
        from tasks.runs.retention import find_garbage, remove_garbage
        from tasks.runs.run_state import require_store

        garbage = find_garbage(damaged=damaged)
        for whose, complaint in garbage.unreadable.items():
            say(f"! what {whose} needs cannot be read, so every artifact is kept: {complaint}")
        if not garbage.rows():
            require_store()
            say("nothing to remove: everything in the store is needed")
            return
        table = Table("what", "MiB", "why", title="to be removed", title_justify="left")
        for what, size, why in garbage.rows():
            table.add_row(what, f"{size / 2**20:.1f}", why)
        Console(markup=False, emoji=False).print(table)
        say(f"{len(garbage.rows())} items, {garbage.bytes / GIB:.2f} GiB")
        if dry_run or not (yes or typer.confirm("Remove them?")):
            say("nothing was removed")
            return
        say(f"removed {remove_garbage(garbage) / GIB:.2f} GiB")
