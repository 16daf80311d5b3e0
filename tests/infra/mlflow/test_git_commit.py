"""The commit of a checkout, asked from a folder in it."""

from __future__ import annotations

import subprocess
from pathlib import Path

from infra.mlflow.git_commit import git_commit


def git(folder: Path, *arguments: str) -> str:
    """A command of git's, as somebody."""
    command = ["git", "-C", str(folder), "-c", "user.name=n", "-c", "user.email=e@x", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_a_folder_in_a_checkout_has_its_commit_and_others_have_none(tmp_path: Path) -> None:
    folder = tmp_path / "checkout" / "specs"
    folder.mkdir(parents=True)
    assert git_commit(folder) is None
    git(folder, "init", "-q")
    assert git_commit(folder) is None  # nothing is committed yet
    git(folder, "commit", "-q", "--allow-empty", "-m", "m")
    assert git_commit(folder) == git(folder, "rev-parse", "HEAD")
    assert git_commit(tmp_path / "nowhere") is None
