"""The files of toy engines: what they read, what they sampled, and the numbers that its hashes stand for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infra.engines.protocol import EngineInput, EngineJob


def content(given: EngineInput, name: str) -> str:
    """A file of an input."""
    return (given.path / name).read_text()


def fraction(digest: str) -> float:
    """A number below 1."""
    return int(digest[:8], 16) / 2**32


def has_signal(line: str) -> bool:
    """Of the responses to about half of the prompts."""
    return fraction(line) < 0.5


def write_responses(job: EngineJob, lines: list[str], spec: Mapping[str, Any]) -> dict[str, Any]:
    """One line each."""
    assert job.output is not None
    (job.output / "rollouts.json").write_text("\n".join(lines) + "\n")
    number = len(lines) * spec["samples_per_prompt"]
    metrics = {"rollout/response_length": 10.0}
    return {"num_responses": number, "num_response_tokens": 10 * number, "metrics": metrics}
