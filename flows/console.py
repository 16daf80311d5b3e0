"""What a person sees of a run: a table that grows by a line per iteration, and the progress of the stage under way.

On a terminal the table is live; in a log file there is a clean line per iteration and now and then one of progress.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from flows.pace import LEAST_S, Pace, span
from flows.starting import began, timed
from tasks.runs.iteration_record import IterationRecord
from tasks.runs.progress import ProgressFile

COLUMNS: dict[str, tuple[str, str]] = {
    "score": ("score/mean", ".3f"),
    "held-out": ("evaluation/accuracy", ".3f"),
    "greedy": ("evaluation/greedy_accuracy", ".3f"),
    "KL": ("kl/reference", ".3f"),
    "length": ("rollout/response_length", ".1f"),
    "clipped": ("policy/clip_fraction", ".4f"),
    "expl.var": ("critic/explained_variance", ".2f"),
    "tokens/s": ("throughput/tokens_per_second", ".0f"),
    "seconds": ("seconds/iteration", ".1f"),
}
STAGE_SECONDS: dict[str, tuple[str, str]] = {
    "sample": ("seconds/generate_rollouts", ".1f"),
    "scoring": ("seconds/score_rollouts", ".1f"),
    "advant.": ("seconds/compute_advantages", ".1f"),
    "update": ("seconds/update_policy", ".1f"),
    "eval.": ("seconds/evaluate_policy", ".1f"),
    "outside": ("seconds/outside_engines", ".2f"),
}
RANKED = ("score", "held-out", "KL", "length", "seconds", "greedy", "tokens/s", "expl.var", "clipped")
"""Which columns a narrow place keeps: the first ones. A number is never cut."""
CELL, ITERATION, REMAINING = 8, 10, 24
"""Characters of a cell, of the iteration and of the time to go in a line of a log file."""
GAP, EDGES = 2, 3
QUIET_PROGRESS_S = 15.0
RECENT = 5


class RunConsole:
    """Shows one run; use it as a context manager around the run. `file`: what the run does now, for other shells."""

    def __init__(
        self, run: str, iterations: int, console: Console | None = None, file: ProgressFile | None = None
    ) -> None:
        self.run, self.iterations = run, iterations
        self.console = console or Console()
        self.records: list[IterationRecord] = []
        self.stage = "starting"
        self.complaint: str | None = None
        self._said: set[str] = set()
        self._heard: set[str] = set()
        self._asked: dict[str, str] = {}
        self._began = self._last_line = began()
        self._file, self._pace, self._starting = file, Pace(), False
        self._live = Live(console=self.console, refresh_per_second=4, transient=True, get_renderable=self.render)

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.remove()
        if self.console.is_terminal:
            self._live.stop()
            if self.records:
                self.console.print(records_table(self.run, self.records, self.iterations, self.console.width))

    def say(self, text: str) -> None:
        """A line of its own."""
        self.console.print(text, highlight=False, markup=False, emoji=False, soft_wrap=True)

    def step(self, text: str) -> None:
        """A line of the start, with the seconds since the command began."""
        self.stage, self._starting = text, True
        self.say(timed(text, self._began))
        if self._file is not None:
            self._file.write(text, at_once=True)

    def greet(self, record: IterationRecord | None, *, done: bool) -> None:
        """Where the run starts, or goes on after a record. Engines start, unless all iterations are `done`."""
        if record is None:
            self.step(f"a new run of {self.iterations} iterations; engines are starting")
        elif done:
            self.step(f"all {self.iterations} iterations are done")
        else:
            where = f"iteration {record.iteration} of {self.iterations}, data at {record.cursor}"
            self.step(f"continuing after {where}; engines are starting")

    def say_once(self, text: str) -> None:
        """The same, unless it was said before."""
        if text not in self._said:
            self._said.add(text)
            self.say(text)

    def progress(self, progress: Any) -> None:
        """Take an engine's progress (EngineProgress)."""
        note = f", {progress.note}" if progress.note else ""
        count = f" {progress.done}/{progress.total}" if progress.total else ""
        starting = f", the {progress.engine} engine is starting" if self._is_starting(progress) else ""
        self.stage = f"{progress.job}{count}{note}{starting}"
        new_stage = self._pace.take(progress.job, progress.done, progress.total)
        if self._file is not None:
            ended = 0 < progress.total == progress.done
            self._file.write(self.stage, self._remaining().strip(), at_once=new_stage or ended)
        if self.console.is_terminal:
            return
        if new_stage and self._starting:
            self._last_line = time.monotonic()
            self.say(timed(self.stage, self._began))
        elif time.monotonic() - self._last_line > QUIET_PROGRESS_S:
            self._last_line = time.monotonic()
            self.say(f"  … {self.stage}{self._remaining()}")

    def iteration(self, record: IterationRecord) -> None:
        """Add a committed iteration."""
        self.records.append(record)
        done = record.iteration >= self.iterations
        self.stage, self._starting = "registering the best policy" if done else "next iteration", False
        self._pace.restart()
        self._heard |= self._asked.keys()  # all that were asked have answered, be it without a count
        if self._file is not None:
            self._file.write(self.stage, self._remaining().strip(), at_once=True)
        if not self.console.is_terminal:
            self._last_line = time.monotonic()
            columns = fitting((self.console.width - ITERATION - REMAINING) // (CELL + 1), lambda name: 1)
            if len(self.records) == 1:
                self.say(" ".join(["iteration", *(f"{name:>{CELL}}" for name in columns)]))
            cells = " ".join(f"{cell:>{CELL}}" for cell in _cells(record, columns))
            self.say(f"{record.iteration:>4}/{self.iterations:<4} {cells}{self._remaining()}")

    def samples(self, title: str, record: IterationRecord, start: IterationRecord, count: int = 3) -> None:
        """Show answers of an evaluated iteration to the prompts that the start policy answered worst; a fork may be
        evaluated with fewer or other prompts than its start."""
        if record.evaluation is None or start.evaluation is None:
            return
        self.say(f"\n{title}:")
        both = zip(record.evaluation.samples, start.evaluation.samples, strict=False)
        alike = [(sample, first) for sample, first in both if sample["prompt"] == first["prompt"]]
        worst = [sample for sample, _ in sorted(alike, key=lambda pair: pair[1]["score"] or 0.0)]
        for sample in (worst or record.evaluation.samples)[:count]:
            prompt = sample["prompt"] if isinstance(sample["prompt"], str) else sample["prompt"][-1].get("content", "")
            score = "–" if sample["score"] is None else f"{sample['score']:.2f}"
            self.console.print(Text(f"  {prompt} {sample['response']}   (score {score})"), soft_wrap=True)
        self.say("")

    def render(self) -> Group:
        """The table so far and the stage under way."""
        recent = self.records[-max(self.console.size.height - 8, 3) :]
        stage = timed(self.stage, self._began) if self._starting else self.stage
        progress = Text(f"{stage}{self._remaining()}", style="dim")
        return Group(records_table(self.run, recent, self.iterations, self.console.width), progress)

    def _is_starting(self, progress: Any) -> bool:
        """Whether an engine was asked for its first job, and has said nothing of it yet."""
        name = progress.engine
        if progress.total or progress.note or self._asked.setdefault(name, progress.job) != progress.job:
            self._heard.add(name)
        return name not in self._heard

    def _remaining(self) -> str:
        """Of the run, by its last iterations; as long as there are none, of the stage, by its own count."""
        recent = [r.metrics["seconds/iteration"] for r in self.records[-RECENT:] if r.iteration > 0]
        if not recent:
            text = self._pace.to_go()
            return f"   {text}" if text else ""
        seconds = (self.iterations - self.records[-1].iteration) * sum(recent) / len(recent)
        return f"   about {span(seconds)} to go" if seconds >= LEAST_S else ""


def fitting(width: int, size: Callable[[str], int]) -> dict[str, tuple[str, str]]:
    """The columns for a place of this width; `size` is what one takes. Where all fit, also those of the stages."""
    every = {**COLUMNS, **STAGE_SECONDS}
    if sum(map(size, every)) <= width:
        return every
    chosen: set[str] = set()
    for name in RANKED:
        width -= size(name)
        if width < 0:
            break
        chosen.add(name)
    return {name: column for name, column in COLUMNS.items() if name in chosen}


def records_table(run: str, records: list[IterationRecord], iterations: int, width: int) -> Table:
    """A line per iteration, with as many columns as fit; where all do, also the seconds of each stage."""

    def size(name: str) -> int:
        column = {name: {**COLUMNS, **STAGE_SECONDS}[name]}
        return max(len(name), *(len(cell) for record in records for cell in _cells(record, column)), 0) + GAP

    columns = fitting(width - len("iteration ") - EDGES, size)
    table = Table(title=f"run {run}", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("iteration", *columns):
        table.add_column(name, justify="right", no_wrap=True)
    for record in records:
        table.add_row(f"{record.iteration}/{iterations}", *_cells(record, columns))
    return table


def _cells(record: IterationRecord, columns: Mapping[str, tuple[str, str]]) -> list[str]:
    return [format(record.metrics[m], form) if m in record.metrics else "" for m, form in columns.values()]
