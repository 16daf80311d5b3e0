"""What Prefect's pages show of a run: the table of its iterations and sample answers."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from contextvars import copy_context
from typing import Any, TypeVar, cast
from uuid import UUID

from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.client.orchestration import get_client
from prefect.logging import get_run_logger

from tasks.runs.iteration_record import IterationRecord
from tasks.stages.context import RunContext
from tasks.stages.references import StageRef

T = TypeVar("T")
PAGE_TIMEOUT_S = 6.0
MOST_ROWS = 1000
HEADLINES = ("score/mean", "evaluation/accuracy", "kl/reference", "rollout/response_length", "seconds/iteration")


def show_iterations(context: RunContext) -> None:
    """The table of iterations, under one key. Renewed where it is: a new one each time would pile up."""
    metrics = context.reporting.metrics
    rows = iteration_rows({number: metrics[number] for number in sorted(metrics)[-MOST_ROWS:]})
    key, which = page_key(context.run, "iterations"), "All" if len(metrics) <= MOST_ROWS else f"The last {MOST_ROWS:,}"
    description = f"{which} iterations of run {context.run}{see_mlflow(context)}"

    def create() -> UUID:
        return cast(UUID, create_table_artifact(rows, key=key, description=description))

    def renew(table: UUID) -> UUID:
        with get_client(sync_client=True) as client:
            changes = {"data": json.dumps(rows), "description": description}
            client.request("PATCH", "/artifacts/{id}", json=changes, path_params={"id": table})
        return table

    known = context.reporting.table
    made = tell_prefect(context, "the table of iterations", create if known is None else lambda: renew(known))
    context.reporting.table = made or known


def iteration_rows(metrics: Mapping[int, Mapping[str, float]]) -> list[dict[str, float | None]]:
    """A row per iteration, each with every column: first those that people look for, then the rest by name."""
    names = {name for measured in metrics.values() for name in measured}
    columns = [*(name for name in HEADLINES if name in names), *sorted(names - set(HEADLINES))]
    return [
        {"iteration": number, **{name: shown(metrics[number].get(name)) for name in columns}}
        for number in sorted(metrics)
    ]


def shown(value: float | None) -> float | None:
    """A number as a table shows it; JSON has no nan."""
    return None if value is None or not math.isfinite(value) else round(value, 4)


def show_samples(context: RunContext, record: IterationRecord) -> None:
    """A few answers to held-out prompts."""
    assert record.evaluation is not None
    lines = [answer_line(sample) for sample in record.evaluation.samples]
    text = f"# {context.run}, iteration {record.iteration}\n\n" + "\n".join(lines)
    headlines = "".join(f", {name} {record.metrics[name]:.3f}" for name in HEADLINES[:2] if name in record.metrics)
    description = (
        f"Answers to held-out prompts by the policy of iteration {record.iteration} of run {context.run}{headlines}"
        f"{see_mlflow(context)}"
    )
    key = page_key(context.run, "samples")
    tell_prefect(
        context, "the sample answers", lambda: create_markdown_artifact(text, key=key, description=description)
    )


def show_data(context: RunContext, name: str, data: StageRef, page: str) -> None:
    """What the run's `dataset` or `preferences` are."""
    key, about = page_key(context.run, name), f"Data of run {context.run}: {data.in_words()}"
    tell_prefect(context, "what the data is", lambda: create_markdown_artifact(page, key=key, description=about))


def see_mlflow(context: RunContext) -> str:
    """The way to the MLflow run, in markdown; nothing as long as that is not open."""
    return f". See also [the run in MLflow]({context.tracker.page})" if context.tracker.run_id is not None else ""


def tell_prefect(context: RunContext, what: str, create: Callable[[], T]) -> T | None:
    """Reports never stop training, nor hold it up: a server that is away costs a page, and a line in the log.

    Prefect's own client would try for a minute, at every report anew.
    """
    variables = copy_context()
    made = context.prefect_breaker.call(lambda: variables.run(create), PAGE_TIMEOUT_S)
    if made is None:
        get_run_logger().warning("Prefect did not get %s: %s", what, context.prefect_breaker.last_error)
    return made


def prompt_text(prompt: Any) -> str:
    """A prompt as one text; the messages of a chat in turn."""
    return prompt if isinstance(prompt, str) else " / ".join(str(message.get("content")) for message in prompt)


def answer_line(sample: Mapping[str, Any]) -> str:
    """A prompt and its answer as an item of a list in markdown."""
    return f"- {as_code(prompt_text(sample['prompt']))} → {as_code(sample['response'])} (score {sample['score']})"


def as_code(text: str) -> str:
    """A text as it is, in a line of markdown: its own backticks and line breaks must not end the code.

    Source: CommonMark 0.31.2, section 6.1 (code spans).
    """
    line = "↵".join(text.splitlines()) + ("↵" if text.endswith("\n") else "") if text.strip() else repr(text)
    fence = "`" * (max((len(run) for run in re.findall("`+", line)), default=0) + 1)
    space = " " if "`" in line else ""
    return f"{fence}{space}{line}{space}{fence}"


def page_key(run: str, name: str) -> str:
    """A key that Prefect takes for what it shows of a run."""
    return "".join(c if c.isalnum() else "-" for c in f"{run}-{name}".lower())
