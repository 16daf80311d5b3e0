"""Rewards of the arithmetic task, called as TRL's GRPO calls a reward function: texts in, one score each out."""

from __future__ import annotations

import re
from typing import Any

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
STEP = re.compile(r"([0-9])([-+*])([0-9])=([0-9])")
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


def right_steps(prompts: list[str], completions: list[str], **columns: Any) -> list[Any]:
    """1.0 for each step up to the first wrong one: in parts, each for the characters that earn it, so that the policy
    is told at which step it went wrong."""
    found = [_right_steps(prompt, text) for prompt, text in zip(prompts, completions, strict=True)]
    return [[{"start": start, "end": end, "score": 1.0} for start, end in steps] or 0.0 for steps in found]


def _right_steps(prompt: str, text: str) -> list[tuple[int, int]]:
    """Where the text has the steps of the prompt, one after the other, modulo 10."""
    value, found = prompt[0], []
    for step, (sign, operand) in zip(STEP.finditer(text), re.findall(r"([-+*])([0-9])", prompt), strict=False):
        left, right = int(value), int(operand)
        value = str({"+": left + right, "-": left - right, "*": left * right}[sign] % 10)
        if step.groups() != (str(left), sign, operand, value):
            break
        found.append(step.span())
    return found


def _answers(text: str) -> list[str]:
    return [found.strip() for found in ANSWER.findall(text)]
