"""Which prompts a job answers, read from the files of a dataset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ppo_core.engines.drawing import drawn, sampling_of
from ppo_core.records import GenerateJob, InputError, PromptRow
from tests.ppo_core.engines.engine_jobs import generate_spec
from tests.ppo_core.written_tables import write_prompts

LEVELS = [3, "1", 2.0, 1, 3, "2"]


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    rows = [PromptRow(f"p{n}", "?", [5], None, {"level": level}) for n, level in enumerate(LEVELS)]
    for split in ("train", "eval"):
        write_prompts(tmp_path / f"{split}.parquet", rows)
    return tmp_path


def asked(dataset: Path, **changes: Any) -> list[str]:
    """The ids of the prompts, in the order of their draws."""
    prompts, wanted = drawn(dataset, GenerateJob.model_validate(generate_spec(**changes)))
    return [prompts[draw.row].prompt_id for draw in wanted]


def test_of_the_first_prompts_the_easy_ones_come_first(dataset: Path) -> None:
    assert asked(dataset, num_prompts=6) == ["p0", "p1", "p2", "p3", "p4", "p5"]
    four = {"column": "level", "prompts": 4}
    assert asked(dataset, num_prompts=7, curriculum=four) == ["p1", "p3", "p2", "p0", "p4", "p5", "p0"]
    assert asked(dataset, position=2, num_prompts=3, curriculum=four) == ["p2", "p0", "p4"]
    assert asked(dataset, position=4, num_prompts=3, curriculum=four) == ["p4", "p5", "p0"]


def test_a_prompt_may_have_a_temperature_and_a_limit_of_its_own() -> None:
    spec = GenerateJob.model_validate(
        generate_spec(temperature_column="heat", max_response_tokens_column="most", max_response_tokens=16)
    )

    def sampled(**metadata: Any) -> tuple[float, int]:
        return sampling_of(PromptRow("p", "?", [5], None, metadata), spec)

    assert sampled() == (1.0, 16)
    assert sampled(heat="0.5", most=4) == (0.5, 4)
    assert sampled(heat=None, most="") == (1.0, 16)
    without = spec.model_copy(update={"temperature_column": None, "max_response_tokens_column": None})
    assert sampling_of(PromptRow("p", "?", [5], None, {"heat": 2, "most": 4}), without) == (1.0, 16)


def test_an_evaluation_of_more_prompts_than_there_are_is_refused(dataset: Path) -> None:
    with pytest.raises(InputError, match=r"evaluation.num_prompts=7, but only 6 rows are held out: lower it"):
        drawn(dataset, GenerateJob.model_validate(generate_spec(split="eval", num_prompts=7)))
