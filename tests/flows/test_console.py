"""What a person sees of a run, in a log file and on terminals of several sizes."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from flows.console import COLUMNS, STAGE_SECONDS, RunConsole
from infra.engines.protocol import EngineProgress
from tests.flows.samples import record


def shown(*, terminal: bool, width: int = 160, height: int = 40) -> tuple[RunConsole, io.StringIO]:
    """A console that writes into a buffer."""
    buffer = io.StringIO()
    console = Console(file=buffer, force_terminal=terminal, width=width, height=height)
    return RunConsole("r", 4, console), buffer


def test_a_log_file_gets_one_clean_line_per_iteration() -> None:
    console, buffer = shown(terminal=False)
    with console:
        console.iteration(record(0, {"evaluation/accuracy": 0.25}))
        console.iteration(record(1, {"score/mean": 0.5, "seconds/outside_engines": 0.125}))
        console.progress(EngineProgress("training", "update_policy", 3, 8, "epoch 1 of 2"))
    lines = buffer.getvalue().splitlines()
    assert len(lines) == 3  # a heading and two rows; progress only after a while
    assert lines[1].split()[:2] == ["0/4", "0.250"]
    assert lines[2].split()[:3] == ["1/4", "0.500", "30.0"]
    assert lines[2].endswith("about 1.5 min to go")
    assert "\x1b" not in buffer.getvalue()


def test_tokens_per_second_are_those_of_the_whole_iteration() -> None:
    console, buffer = shown(terminal=False)
    with console:
        console.iteration(
            record(1, {"throughput/tokens_per_second": 1234.4, "throughput/rollout_tokens_per_second": 9876.0})
        )
    heading, row = buffer.getvalue().splitlines()
    end = heading.index("tokens/s") + len("tokens/s")
    assert row[:end].split()[-1] == "1234"
    assert "9876" not in row


def test_a_terminal_gets_a_table_and_the_stage_under_way() -> None:
    console, buffer = shown(terminal=True)
    with console:
        console.iteration(record(1, {"score/mean": 0.5, "seconds/update_policy": 3.0}))
        console.progress(EngineProgress("training", "update_policy", 3, 8, "epoch 1 of 2"))
        console.console.print(console.render())
    text = buffer.getvalue()
    assert "update_policy 3/8, epoch 1 of 2" in text
    assert "outside" in text  # wide enough for the seconds of each stage


def test_an_engine_that_has_not_answered_yet_is_told_as_starting() -> None:
    console, _ = shown(terminal=True)
    told = []
    for engine, job, done, total in (
        ("scoring", "prepare_dataset", 0, 0),
        ("rollout", "generate_rollouts", 0, 0),
        ("rollout", "generate_rollouts", 4, 8),
        ("rollout", "generate_rollouts", 0, 0),
        ("scoring", "score_rollouts", 0, 0),
    ):
        console.progress(EngineProgress(engine, job, done, total, ""))
        told.append(console.stage)
    assert told == [
        "prepare_dataset, the scoring engine is starting",
        "generate_rollouts, the rollout engine is starting",
        "generate_rollouts 4/8",
        "generate_rollouts",
        "score_rollouts",
    ]


def test_an_engine_that_never_counts_has_started_once_an_iteration_is_committed() -> None:
    console, _ = shown(terminal=True)
    console.progress(EngineProgress("rollout", "generate_rollouts", 0, 0, ""))
    console.iteration(record(1, {}))
    console.progress(EngineProgress("rollout", "generate_rollouts", 0, 0, ""))
    assert console.stage == "generate_rollouts"


def test_after_the_last_iteration_no_other_one_is_announced() -> None:
    console, _ = shown(terminal=True)
    told = []
    for iteration in (3, 4):
        console.iteration(record(iteration, {}))
        told.append(console.stage)
    assert told == ["next iteration", "registering the best policy"]


def test_a_narrow_terminal_leaves_out_the_stages() -> None:
    console, buffer = shown(terminal=True, width=100)
    with console:
        console.iteration(record(1, {"score/mean": 0.5, "seconds/update_policy": 3.0}))
    assert "outside" not in buffer.getvalue()
    assert "0.500" in buffer.getvalue()


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120, 160])
def test_a_table_fits_and_cuts_no_number(width: int) -> None:
    numbers = {metric: 1234.5678 for metric, _ in {**COLUMNS, **STAGE_SECONDS}.values()}
    console, buffer = shown(terminal=True, width=width)
    with console:
        console.iteration(record(10, numbers))
    lines = buffer.getvalue().splitlines()
    assert all(len(re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line).rstrip()) <= width for line in lines)
    assert "…" not in buffer.getvalue()
    assert "1234.568" in buffer.getvalue()  # the score


@pytest.mark.parametrize("width", [80, 120])
def test_a_line_of_a_log_file_fits_too(width: int) -> None:
    console, buffer = shown(terminal=False, width=width)
    with console:
        console.iteration(record(1, {"score/mean": 0.5}))
        console.iteration(record(2, {"score/mean": 0.5}))
    assert all(len(line) <= width for line in buffer.getvalue().splitlines())
    assert "about" in buffer.getvalue()


def test_samples_are_the_prompts_that_the_start_answered_worst() -> None:
    console, buffer = shown(terminal=False)
    start = [
        {"prompt": f"q{i}", "response": f"before{i}", "score": score} for i, score in enumerate([1.0, 0.0, None, 0.5])
    ]
    after = [{**sample, "response": f"after{i}", "score": 1.0} for i, sample in enumerate(start)]
    console.samples("after", record(4, {}, after), record(0, {}, start), count=2)
    text = buffer.getvalue()
    assert "q1 after1" in text
    assert "q2 after2" in text
    assert "q0" not in text


@pytest.mark.parametrize(
    ("prompts", "shown_prompts"),
    [(["q0", "q1"], ["q1", "q0"]), (["q0", "other"], ["q0"]), (["x0", "x1", "x2", "x3"], ["x0", "x1"])],
)
def test_samples_of_a_fork_that_is_evaluated_with_fewer_or_other_prompts(
    prompts: list[str], shown_prompts: list[str]
) -> None:
    console, buffer = shown(terminal=False, width=80)
    start = [{"prompt": f"q{i}", "response": "before", "score": score} for i, score in enumerate([1.0, 0.5, 0.0])]
    after = [{"prompt": prompt, "response": "after", "score": 1.0} for prompt in prompts]
    console.samples("after", record(4, {}, after), record(0, {}, start), count=2)
    assert [line.split()[0] for line in buffer.getvalue().splitlines() if "score" in line] == shown_prompts


def test_a_text_is_shown_as_it_is() -> None:
    console, buffer = shown(terminal=False)
    console.say("a[1:x:2], [bold] and 3:100:4")
    assert buffer.getvalue() == "a[1:x:2], [bold] and 3:100:4\n"


def test_nothing_is_said_twice() -> None:
    console, buffer = shown(terminal=False)
    console.say_once("a")
    console.say_once("a")
    assert buffer.getvalue() == "a\n"
