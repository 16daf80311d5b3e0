"""What the documents name exists."""

from __future__ import annotations

import re
from typing import Any, get_args

import pytest

from ppo_core.spec import RunSpec, Section
from tests.architecture.source_tree import ROOT


def test_the_tests_that_pin_the_semantics_exist() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "semantics.md").read_text()))
    files = (ROOT / "tests" / "ppo_core").glob("test_*.py")
    there = {name for path in files for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)}
    assert len(named) > 15
    assert not named - there


def test_the_settings_that_the_hyperparameters_name_exist() -> None:
    text = (ROOT / "docs" / "hyperparameters.md").read_text()
    named = set(re.findall(r"`((?:rollout|advantages|update)\.[a-z_.]+)`", text))
    assert len(named) > 25
    for name in named:
        sections: list[Any] = [RunSpec]
        for part in name.split("."):
            fields = [section.model_fields[part] for section in sections if part in section.model_fields]
            assert fields, name
            sections = [section for field in fields for section in sections_in(field.annotation)]


def sections_in(annotation: Any) -> list[Any]:
    """The sections that a field may hold."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [section for part in get_args(annotation) for section in sections_in(part)]


@pytest.mark.parametrize(
    "name",
    [
        "README.md",
        *(
            f"docs/{page}.md"
            for page in ("architecture", "dpo", "hyperparameters", "reward-models", "rewards", "rlhf", "semantics")
        ),
    ],
)
def test_files_that_documents_name_exist(name: str) -> None:
    text = (ROOT / name).read_text()
    paths = set(re.findall(r"`((?:ppo_core|tasks|flows|infra|examples|docs|benchmarks)/[a-z0-9_./-]+)`", text))
    links = set(re.findall(r"\]\(((?!http|#)[^)#\s]+)", text))
    places = [ROOT / path for path in paths] + [(ROOT / name).parent / link for link in links]
    assert places or name == "docs/semantics.md"
    assert not [str(place) for place in places if not place.exists()]
