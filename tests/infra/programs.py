"""Small programs as child processes: a line in, a line out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class Program:
    """A child process that runs a Python text in the repository's root; killed on the way out."""

    def __init__(self, text: str, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", text, *arguments],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.communicate()

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def hear(self) -> list[str]:
        """The words of its next line; none when it has ended."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().split()
