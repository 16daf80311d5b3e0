"""The `dataset` section: where prompts lie, what their columns mean, and which of them count."""

from __future__ import annotations

from typing import Self

from pydantic import Field, PositiveInt, model_validator

from ppo_core.spec.paths import UserPath
from ppo_core.spec.section import Section


class DatasetSpec(Section):
    """Prompts: files of rows, or Python functions that yield them; docs/data.md shows each form."""

    train: UserPath = Field(
        description="File (JSONL, JSON, CSV, TSV, Parquet, Arrow), folder saved by `datasets`, or "
        "path/to/file.py:function, relative to the spec"
    )
    evaluation: UserPath | None = Field(
        None, description="Held-out prompts in the same form; none: `evaluation` is off"
    )
    prompt_column: str = Field("prompt", min_length=1, description="Column with the prompt: a text or messages")
    answer_column: str = Field("answer", description="Column with the reference answer; missing is allowed")
    chat: bool = Field(
        False, description="Texts go through the chat template, each as one message of a user; messages always do"
    )
    system_prompt: str | None = Field(
        None, min_length=1, description="First message of every prompt that has no system message of its own"
    )
    max_prompt_tokens: PositiveInt = Field(512, description="Longer prompts are an error, never cut")
    shuffle: bool = Field(True, description="Draw prompts in a new seeded order every epoch")

    @model_validator(mode="after")
    def _two_columns(self) -> Self:
        if self.prompt_column == self.answer_column:
            raise ValueError(
                f"prompt_column and answer_column are both {self.prompt_column!r}: name the column of each"
            )
        return self
