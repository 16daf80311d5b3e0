"""The `dataset` section: where prompts lie, what their columns mean, and which of them count."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    Discriminator,
    Field,
    PositiveFloat,
    PositiveInt,
    Tag,
    ValidationInfo,
    model_validator,
)

from ppo_core.spec.paths import UserPath
from ppo_core.spec.section import Section


class SourceSpec(Section):
    """One of several sources of prompts, or of preferences."""

    path: UserPath = Field(description="Rows, in any of the forms of a single train")
    weight: PositiveFloat | None = Field(
        None,
        description="Share of the draws, relative to the sum of all weights; none anywhere: every row counts the same",
    )


class CurriculumSpec(Section):
    """Easy prompts first."""

    column: str = Field(min_length=1, description="Column with a number for each prompt, larger where it is harder")
    prompts: PositiveInt = Field(
        description="Order by difficulty this many prompts at the start of the run, each epoch by itself"
    )


def _form(train: Any) -> str:
    """Named after types, as the members of other unions are: messages leave such names out."""
    return "list" if isinstance(train, list | tuple) else "str"


def _weighed_alike(train: str | tuple[SourceSpec, ...]) -> str | tuple[SourceSpec, ...]:
    if isinstance(train, str):
        return train
    if not train:
        raise ValueError("the list of sources is empty: name at least one, as in [{path: rows.jsonl}]")
    bare = [source.path for source in train if source.weight is None]
    if bare and len(bare) < len(train):
        raise ValueError(f"{', '.join(bare)} has no weight, but other sources do: give every source a weight, or none")
    return train


Train = Annotated[
    Annotated[UserPath, Tag("str")] | Annotated[tuple[SourceSpec, ...], Tag("list")],
    Discriminator(_form),
    AfterValidator(_weighed_alike),
]
KeepOrDrop = Literal["keep", "drop"]
ErrorOrDrop = Literal["error", "drop"]


class SourcesSpec(Section):
    """Where rows come from and which of them count, be they prompts or preferences: a subclass adds the fields."""

    if TYPE_CHECKING:  # each says in its own words what they are
        train: Train
        evaluation: UserPath | None
        duplicates: KeepOrDrop
        too_long: ErrorOrDrop

    @property
    def sources(self) -> tuple[SourceSpec, ...]:
        """What `train` names, one or several."""
        return (SourceSpec(path=self.train),) if isinstance(self.train, str) else self.train

    @property
    def weights(self) -> list[float]:
        """Of all sources, or none."""
        return [source.weight for source in self.sources if source.weight is not None]

    @property
    def drops(self) -> bool:
        """Whether rows may be left out."""
        return self.duplicates == "drop" or self.too_long == "drop"

    @property
    def paths(self) -> tuple[str, ...]:
        """All places that rows are read from."""
        return tuple(source.path for source in self.sources) + ((self.evaluation,) if self.evaluation else ())

    @property
    def label(self) -> str:
        """The rows to train on as people know them, in a few words."""
        first, *others = (source.path for source in self.sources)
        return f"{first} and {len(others)} more" if others else first


class DatasetSpec(SourcesSpec):
    """Prompts: files of rows, or Python functions that yield them; docs/data.md shows each form."""

    train: Train = Field(
        description="File (JSONL, JSON, CSV, TSV, Parquet, Arrow), folder saved by `datasets`, or "
        "path/to/file.py:function, relative to the spec; or hf://OWNER/NAME:FILE of the Hugging Face Hub; or a "
        "list of several, each with `path` and `weight`"
    )
    evaluation: UserPath | None = Field(None, description="Held-out prompts, in the same forms; none: no evaluation")
    evaluation_fraction: float = Field(
        0.0,
        ge=0.0,
        le=0.5,
        description="Instead of `evaluation`: hold out about this fraction of the prompts, by a hash of their text",
    )
    prompt_column: str = Field("prompt", min_length=1, description="Column with the prompt: a text or messages")
    answer_column: str = Field(
        "answer",
        description="Column with the reference answer, if there is one; outer.inner for one in a column of objects, "
        "such as reward_model.ground_truth",
    )
    id_column: str | None = Field(None, description="Column with a unique id of each prompt; none: a hash of the row")
    drop_columns: tuple[str, ...] = Field(
        (),
        description="Columns to leave out, such as images and times, which JSON has not; rewards do not see them",
    )
    chat: bool = Field(
        False,
        description="Apply the chat template to text prompts too, each as one user message; messages always use it",
    )
    system_prompt: str | None = Field(
        None, min_length=1, description="First message of every prompt that has no system message of its own"
    )
    duplicates: KeepOrDrop = Field(
        "keep",
        description="drop: keep the first of rows with the same prompt (of SFT examples, and completion), and never "
        "train on a held-out one",
    )
    max_prompt_tokens: PositiveInt = Field(512, description="Longer prompts are not truncated: see `too_long`")
    too_long: ErrorOrDrop = Field(
        "error", description="Rows with too many tokens: error refuses the run, drop leaves them out"
    )
    shuffle: bool = Field(True, description="Draw prompts in a new seeded order every epoch")
    curriculum: CurriculumSpec | None = Field(
        None, description="Easy prompts first, by a column with their difficulty; none: no curriculum"
    )

    @property
    def evaluates(self) -> bool:
        """Whether there are held-out prompts."""
        return self.evaluation is not None or self.evaluation_fraction > 0

    @property
    def selects(self) -> bool:
        """Whether rows may be left out, or held out."""
        return self.evaluation_fraction > 0 or self.drops

    @model_validator(mode="after")
    def _held_out_once(self) -> Self:
        if self.evaluation is not None and self.evaluation_fraction:
            raise ValueError(
                f"evaluation={self.evaluation} and evaluation_fraction={self.evaluation_fraction:g} both define the "
                "held-out prompts: remove one of them"
            )
        return self

    @model_validator(mode="after")
    def _nothing_held_out_is_trained_on(self, info: ValidationInfo) -> Self:
        if info.context and self.evaluation in [source.path for source in self.sources]:
            raise ValueError(
                f"evaluation={self.evaluation} is in train too, so that nothing would be held out: give another file, "
                "or evaluation_fraction in place of it"
            )
        return self

    @model_validator(mode="after")
    def _two_columns(self) -> Self:
        if self.prompt_column == self.answer_column:
            raise ValueError(
                f"prompt_column and answer_column are both {self.prompt_column!r}: give each its own column"
            )
        return self

    @model_validator(mode="after")
    def _columns_are_read(self, info: ValidationInfo) -> Self:
        if not info.context:
            return self  # of a run's record, which may be older than this rule
        curriculum = self.curriculum.column if self.curriculum else None
        read = {"answer_column": self.answer_column, "id_column": self.id_column, "curriculum.column": curriculum}
        for key, name in read.items() if self.prompt_column != "prompt" else ():
            if name == "prompt":
                raise ValueError(
                    f"{key}=prompt is the column that prompt_column={self.prompt_column} takes the place of: rename "
                    "the column prompt in the data"
                )
        keys = {self.prompt_column: "prompt_column", self.answer_column: "answer_column"}
        if self.id_column is not None and self.id_column in keys:
            raise ValueError(
                f"id_column={self.id_column} is {keys[self.id_column]} too: name a column of ids, or leave the key out"
            )
        return self

    @model_validator(mode="after")
    def _curriculum_has_a_column_of_numbers(self, info: ValidationInfo) -> Self:
        keys = {self.prompt_column: "prompt_column", self.answer_column: "answer_column"}
        column = self.curriculum.column if self.curriculum else ""
        if column in keys and info.context:  # a run's record may be older than this rule
            raise ValueError(
                f"curriculum.column={column} is {keys[column]} too, which is not kept with the other columns, "
                "where the curriculum reads: copy it to a column of its own, with a number for each prompt"
            )
        return self

    @model_validator(mode="after")
    def _drop_what_is_not_read(self) -> Self:
        read = {self.prompt_column, self.answer_column, self.answer_column.partition(".")[0], self.id_column}
        read |= {self.curriculum.column} if self.curriculum else set()
        for name in self.drop_columns:
            if name in read:
                raise ValueError(f"drop_columns has {name!r}, which another key of the dataset names: remove one")
        return self
