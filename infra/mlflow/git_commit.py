"""Which commit a folder is at, where it lies in a git checkout."""

from __future__ import annotations

import subprocess
from pathlib import Path

ANSWER_S = 5.0


def git_commit(folder: Path) -> str | None:
    """The commit's hash; None outside of a checkout, or where there is no git."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), "rev-parse", "--verify", "HEAD"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=ANSWER_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
