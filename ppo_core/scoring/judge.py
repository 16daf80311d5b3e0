"""The reward `judge`: a language model reads a rubric with prompt and response, and ends its answer with a score."""

from __future__ import annotations

import re
from collections.abc import Sequence
from string import Formatter
from typing import Any

from ppo_core.records import InputError, PromptRow
from ppo_core.scoring.endpoint import Endpoint, Unclear
from ppo_core.scoring.reward import Progress, Sample, Score, content_of, require_answers, shorten
from ppo_core.spec.reward.kinds import JudgeSpec

MARKUP = str.maketrans("", "", "*`_#")
LAST_LINE = re.compile(r"score\s*:\s*(-?\d+(?:\.\d+)?)\s*(?:/\s*(\d+(?:\.\d+)?))?\s*\.?", re.IGNORECASE)


class JudgeReward:
    """One request for each sample."""

    def __init__(self, spec: JudgeSpec, answer_column: str, progress: Progress) -> None:
        self.spec = spec
        self.answer_column = answer_column
        self.endpoint = Endpoint(spec, f"{spec.url.rstrip('/')}/chat/completions", progress)

    def check_rows(self, rows: Sequence[PromptRow], first: int = 1) -> None:
        """A rubric with {answer} needs one in each row."""
        if any(name == "answer" for _, name, _, _ in Formatter().parse(self.spec.rubric)):
            require_answers(self.spec.component, rows, self.answer_column, first)

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        """An answer without a score in its last line is asked for again, and in the end is none."""
        return self.endpoint.ask([self.body_of([one]) for one in samples], lambda _, answer: self._read(answer))

    def go_on(self, answered: int, scored: Sample | None) -> None:
        """Where it gave scores before, a few samples without an answer do not mean that the server is down."""
        self.endpoint.answered = answered
        self.endpoint.known = None if scored is None else self.body_of([scored])

    def body_of(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """The request for a sample alone."""
        (sample,) = samples
        given = {
            "prompt": as_text(sample.row.prompt),
            "response": sample.response,
            "answer": sample.row.reference_answer,
        }
        return {
            "model": self.spec.model,
            "messages": [{"role": "user", "content": self.spec.rubric.format(**given)}],
            "temperature": self.spec.temperature,
            "max_tokens": self.spec.max_tokens,
        }

    def _read(self, answer: Any) -> float:
        try:
            choice = answer["choices"][0]
            text, cut = choice["message"]["content"] or "", choice.get("finish_reason") == "length"
            if not isinstance(text, str):
                raise TypeError
        except (KeyError, IndexError, TypeError, AttributeError):
            raise InputError(
                f"{self.endpoint.url} (the reward {self.spec.component}) answered {shorten(answer)}: not a chat "
                "completion: give the base address of an OpenAI-compatible API, for example http://127.0.0.1:8000/v1"
            ) from None
        if cut:
            raise Unclear(f"the judge's answer was cut at max_tokens={self.spec.max_tokens}")
        return self._number(text)

    def _number(self, text: str) -> float:
        lines = text.strip().splitlines()
        found = LAST_LINE.fullmatch(lines[-1].translate(MARKUP).strip()) if lines else None
        if found is None:
            raise Unclear(f"the judge's last line is not `Score: NUMBER`: {shorten(lines[-1] if lines else '')}")
        number, of = float(found.group(1)), found.group(2)
        if of is not None and float(of) != self.spec.highest:
            raise Unclear(f"the judge gave {number:g} of {of}, but the highest score is {self.spec.highest:g}")
        if not self.spec.lowest <= number <= self.spec.highest:
            raise Unclear(f"the judge gave {number:g}, outside {self.spec.lowest:g} to {self.spec.highest:g}")
        return number


def as_text(prompt: Any) -> str:
    """Text as it is; messages each with its role."""
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(f"{message['role']}: {content_of(message)}" for message in prompt)
