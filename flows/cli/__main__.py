"""`python -m flows.cli` is `ppoflow`."""

from __future__ import annotations

from flows.cli import run

if __name__ == "__main__":
    run()
