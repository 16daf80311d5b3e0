"""Which tags the flow runs get by their parameters."""

from __future__ import annotations

import pytest

from tasks.prefect.flow_tags import tags_of


@pytest.mark.parametrize(
    ("parameters", "tags"),
    [
        ({"spec": {"name": "arithmetic"}, "run": None}, {"ppoflow", "arithmetic", "its-name"}),
        ({"spec": {"name": "arithmetic"}, "run": "demo"}, {"ppoflow", "arithmetic", "demo", "its-name"}),
        ({"run": "demo", "iterations": None}, {"ppoflow", "demo"}),
        ({"model": "models:/arithmetic@candidate"}, {"ppoflow", "models:/arithmetic@candidate"}),
        ({"candidate": "models:/arithmetic/3"}, {"ppoflow", "models:/arithmetic/3"}),
        ({"remove": True}, {"ppoflow"}),
    ],
)
def test_parameters_name_what_a_flow_run_works_on(parameters: dict[str, object], tags: set[str]) -> None:
    assert tags_of(parameters, "its-name") == tags
