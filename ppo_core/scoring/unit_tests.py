"""The reward `unit_tests`: code that the policy wrote is run against the tests of its row; the fraction that passes."""

from __future__ import annotations

import ast
import json
import os
import platform
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO

from ppo_core.processes.plugins import Sources
from ppo_core.records import InputError, PromptRow
from ppo_core.scoring import run_unit_tests
from ppo_core.scoring.functions import columns_of
from ppo_core.scoring.reward import NotScored, Progress, RewardFailed, Sample, Score, shorten
from ppo_core.scoring.rules import in_time, selected
from ppo_core.spec.reward.rules import UnitTestsSpec

BLOCK = re.compile(
    r"(?ms)^(?P<indent>[ \t]*)(?P<fence>`{3,}|~{3,})[ \t]*(?P<language>\w*)[^\n`]*\n(?P<code>.*?)^[ \t]*(?P=fence)"
)
PYTHON = ("python", "python3", "py")
ALONE = ("-P", "-s", "-S", "-B")
"""Without what lies beside the program or in site-packages, and without writing bytecode."""
ACT_NOT = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Pass)
"""Statements that try nothing."""
SOLUTION = "solution"
"""How tests import the code by its name."""
ENVIRONMENT = {"PYTHONHASHSEED": "0"}
"""Nothing of ours; and sets have the same order each time."""
LOOK_EVERY_S, MOST_BYTES, MOST_FILES = 0.1, 64 * run_unit_tests.MIB, 10_000
"""How often the folder of code that is still running is looked at, and what it may hold."""
LEAST_FREE = 4 * run_unit_tests.MIB


def last_block(response: str) -> str:
    """The code of the last block between fences that is marked as Python; else of the last one without a mark, else of
    the last one, else all of the response.

    >>> last_block("So:\\n```python\\nx = 1\\n```\\nRun it:\\n```bash\\npython x.py\\n```")
    'x = 1\\n'
    """
    blocks = list(BLOCK.finditer(response))
    for wanted in (PYTHON, ("",)):
        if marked := [block for block in blocks if block["language"].lower() in wanted]:
            return _inside(marked[-1])
    return _inside(blocks[-1]) if blocks else response


def _inside(block: re.Match[str]) -> str:
    """What is between the fences, without the indentation of the first one."""
    return re.sub(rf"(?m)^[ \t]{{1,{len(block['indent'])}}}", "", block["code"]) if block["indent"] else block["code"]


@dataclass(frozen=True)
class UnitTests:
    """A process for each response, as many at a time as there are cores."""

    spec: UnitTestsSpec
    sources: Sources
    answer_column: str
    progress: Progress

    def __post_init__(self) -> None:
        name = self.spec.component
        if not self.sources.run_generated_code:
            raise InputError(
                f"the reward {name} runs code that models write, which the owner of this machine has not allowed: set "
                "PPOFLOW_RUN_GENERATED_CODE=1 on the machine itself; no spec can (docs/rewards.md says what such code "
                "can still do)"
            )
        if sys.platform != "linux" or platform.machine() not in run_unit_tests.MACHINES:
            raise InputError(
                f"the reward {name} can confine code on Linux on {' and '.join(run_unit_tests.MACHINES)} only; this "
                f"is {sys.platform} on {platform.machine()}: score on another machine, through a reward of kind http"
            )

    def check_rows(self, rows: Sequence[PromptRow], first: int = 1) -> None:
        """Each row needs tests that can be read as Python, and that do more than define something."""
        for number, row in enumerate(rows, first):
            for test in self._tests(row, f"row {number} ({shorten(row.prompt)})"):
                try:
                    statements = ast.parse(test).body
                except (SyntaxError, ValueError) as error:
                    raise InputError(
                        f"the reward {self.spec.component} cannot read a test of row {number} ({shorten(test)}) as "
                        f"Python: {error}: correct the column {self.spec.column!r}"
                    ) from None
                if not any(map(_acts, statements)):
                    raise InputError(
                        f"the reward {self.spec.component} would pass any code in a test of row {number} "
                        f"({shorten(test)}), which calls nothing: add the call, such as check(f) or "
                        "test_f(), or an assert (and give a list as a list, not as JSON text), in the column "
                        f"{self.spec.column!r}"
                    )

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        """Code that raises, ends the process, or takes too long or too much, fails the tests that are left."""
        scores: list[Score] = []
        codes = in_time(self.spec, samples, lambda one: self._code(one.response), self.progress)
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            for score in pool.map(self._score, samples, codes):
                scores.append(score)
                self.progress(len(scores), len(samples), f"responses tested by {self.spec.component}")
        return scores

    def _tests(self, row: PromptRow, whose: str) -> list[str]:
        given = columns_of(row, self.answer_column).get(self.spec.column)
        tests = [given] if isinstance(given, str) else given
        if not isinstance(tests, list) or not tests or not all(isinstance(one, str) and one.strip() for one in tests):
            raise InputError(
                f"the reward {self.spec.component} runs the tests in the column {self.spec.column!r}, which is "
                f"{shorten(given)} in {whose}: give Python statements, as a text or a list of texts, or name another "
                "column in the reward's `column`"
            )
        return tests

    def _score(self, sample: Sample, code: str | NotScored | None) -> Score:
        tests = self._tests(sample.row, shorten(sample.row.prompt))
        if not isinstance(code, str):
            return code or 0.0
        secret = secrets.token_hex(16)
        output, status = self._run(
            {
                "secret": secret,
                "code": code,
                "tests": tests,
                "seconds": self.spec.timeout_s,
                "memory_mib": self.spec.memory_mib,
            }
        )
        if f"{secret} ready" not in output:
            if status is None:
                return NotScored(f"its process was not ready after timeout_s={self.spec.timeout_s:g}")
            raise RewardFailed(
                f"the reward {self.spec.component} cannot confine code here, so it ran none (exit status {status}): "
                "the log of the scoring engine says why; containers must let processes set a seccomp filter"
            )
        passed = sum(f"{secret} {number}" in output for number in range(len(tests)))
        if passed < len(tests) and (free := shutil.disk_usage(tempfile.gettempdir()).free) < LEAST_FREE:
            return NotScored(f"the disk of {tempfile.gettempdir()} has only {free} bytes free for what tests write")
        return passed / len(tests)

    def _code(self, response: str) -> str | None:
        if self.spec.pattern is not None:
            return selected(self.spec.pattern, response)
        return last_block(response)

    def _run(self, job: dict[str, object]) -> tuple[set[str], int | None]:
        """The lines that the process wrote, and its exit status; None where it was ended at the deadline."""
        with (
            _folder() as folder,
            _in_memory(json.dumps(job)) as given,  # no pipes: the process may take the job when it comes to it,
            tempfile.TemporaryFile() as results,  # and whatever is written, nobody has to keep reading
            subprocess.Popen(
                [sys.executable, *ALONE, run_unit_tests.__file__],
                stdin=given,
                stdout=results,
                cwd=folder,
                env=ENVIRONMENT,
                start_new_session=True,
            ) as process,
        ):
            try:
                status = self._wait(process, folder)
            finally:
                process.kill()  # it can have no children
            process.wait()
            results.seek(0)
            return set(results.read().decode(errors="replace").splitlines()), status

    def _wait(self, process: subprocess.Popen[bytes], folder: str) -> int | None:
        """The exit status; None where the time was over, or the code's folder full, before it ended."""
        deadline = time.monotonic() + self.spec.timeout_s
        while (left := deadline - time.monotonic()) > 0:
            with suppress(subprocess.TimeoutExpired):
                return process.wait(min(left, LOOK_EVERY_S))
            if _is_full(folder):
                return None
        return None


@contextmanager
def _in_memory(text: str) -> Iterator[IO[bytes]]:
    """A file that holds the text, on no disk, at its beginning."""
    with os.fdopen(os.memfd_create("job"), "w+b") as file:
        file.write(text.encode())
        file.seek(0)
        yield file


@contextmanager
def _folder() -> Iterator[str]:
    """A folder for the code, and nothing of it left, however deep the code has nested folders in it."""
    folder = tempfile.mkdtemp(prefix="unit-tests-")
    try:
        yield folder
    finally:
        with suppress(RecursionError):
            shutil.rmtree(folder, ignore_errors=True)
        if os.path.lexists(folder):
            subprocess.run(["rm", "-rf", "--", folder], stderr=subprocess.DEVNULL, check=False)


def _is_full(folder: str) -> bool:
    """Whether the code has written more than it may there."""
    size, count, waiting = 0, 0, [folder]
    while waiting:
        with suppress(OSError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                else:
                    size += entry.stat(follow_symlinks=False).st_size
                count += 1
                if size > MOST_BYTES or count > MOST_FILES:
                    return True
    return False


def _acts(statement: ast.stmt) -> bool:
    """Whether a statement may raise by what the code does. What is for `__main__` alone is not run."""
    if isinstance(statement, ast.ImportFrom):
        return statement.module == SOLUTION
    if isinstance(statement, ast.Import):
        return SOLUTION in (alias.name for alias in statement.names)
    if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
        return any(isinstance(part, ast.Call) for part in ast.walk(statement))
    if isinstance(statement, ast.If):
        return not any(isinstance(part, ast.Name) and part.id == "__name__" for part in ast.walk(statement.test))
    return not isinstance(statement, ACT_NOT) and not (isinstance(statement, ast.Expr) and _is_literal(statement.value))


def _is_literal(value: ast.expr) -> bool:
    """Whether it is a text, a number, or a list or dict of such."""
    try:
        ast.literal_eval(value)
    except (ValueError, TypeError):
        return False
    return True
