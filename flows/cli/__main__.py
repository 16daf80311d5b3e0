"""`python -m flows.cli` is `ppoflow`."""

from __future__ import annotations

from flows.cli.main import app

if __name__ == "__main__":
    app()
