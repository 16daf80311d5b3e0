"""The table of stages against the tasks: a stage is added in one place, and nothing is forgotten."""

from __future__ import annotations

import inspect
from typing import get_args

import pytest

from flows.iteration import StageName
from flows.stages import TASKS
from tasks.stages.table import BY_NAME, ITERATION, PREPARE_DATASET, PREVIOUS, REFERENCE, SAMPLER, START, StageDefinition


@pytest.mark.parametrize("stage", BY_NAME.values(), ids=list(BY_NAME))
def test_a_task_is_given_just_what_the_table_says(stage: StageDefinition) -> None:
    arguments = list(inspect.signature(TASKS[stage.name].fn).parameters)
    assert arguments == ["context", *stage.inputs, *stage.facts]


@pytest.mark.parametrize(("stages", "before"), [(START, set()), (ITERATION, {PREVIOUS, SAMPLER, REFERENCE})])
def test_what_a_stage_needs_is_made_before_it(stages: tuple[StageDefinition, ...], before: set[str]) -> None:
    there = {PREPARE_DATASET.kind, *before}
    for stage in stages:
        assert set(stage.inputs.values()) <= there
        assert stage.kind not in there
        there.add(stage.kind)


def test_every_task_of_a_run_is_in_the_table() -> None:
    assert set(TASKS) == set(BY_NAME)


def test_the_form_of_a_deployment_offers_the_stages_of_an_iteration() -> None:
    assert get_args(StageName) == tuple(stage.label for stage in ITERATION)


def test_a_stage_is_tried_again_after_pauses_that_grow() -> None:
    """Which its tests on toy engines do not wait for: see `soon` of tests/conftest.py."""
    assert {tuple(vars(task)["retry_delay_seconds"]) for task in TASKS.values()} == {(1.0, 5.0)}
