"""The reward of the arithmetic task, called as TRL's GRPO calls a reward function: texts in, one number each out."""

from __future__ import annotations

import re
from typing import Any

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
WELL_FORMED = re.compile(r"(<think>[^<>]*</think>)?<answer>[0-9]</answer>")


def correct(prompts: list[str], completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """1.0 for the right answer, plus 0.1 for a completion in the expected form; nothing is asked of the reasoning."""
    right = answered_right(prompts, completions, answer, **columns)
    formed = well_formed(prompts, completions, **columns)
    return [1.0 * is_right + 0.1 * is_formed for is_right, is_formed in zip(right, formed, strict=True)]


def answered_right(prompts: list[str], completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """1.0 where the one `<answer>…</answer>` holds the right digit; naming several answers earns nothing."""
    return [float(_answers(text) == [str(right)]) for text, right in zip(completions, answer, strict=True)]


def well_formed(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """1.0 where the completion is an answer of one digit, after some reasoning or none, and nothing else."""
    return [float(WELL_FORMED.fullmatch(text) is not None) for text in completions]


def _answers(text: str) -> list[str]:
    return [found.strip() for found in ANSWER.findall(text)]
