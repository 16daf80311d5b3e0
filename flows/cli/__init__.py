"""The command line `ppoflow`: one file per group of commands, and how they talk to people."""

from flows.cli.main import again, app, run

__all__ = ["again", "app", "run"]
