"""What the documents name exists."""

from __future__ import annotations

import re

import pytest

from tests.architecture.source_tree import ROOT


def test_the_tests_that_pin_the_semantics_exist() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "semantics.md").read_text()))
    files = (ROOT / "tests" / "ppo_core").glob("test_*.py")
    there = {name for path in files for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)}
    assert len(named) > 15
    assert not named - there


@pytest.mark.parametrize("name", ["README.md", "docs/rewards.md", "docs/semantics.md", "docs/architecture.md"])
def test_files_that_documents_name_exist(name: str) -> None:
    text = (ROOT / name).read_text()
    paths = set(re.findall(r"`((?:ppo_core|tasks|flows|infra|examples|docs|benchmarks)/[a-z0-9_./-]+)`", text))
    links = set(re.findall(r"\]\(((?!http|#)[^)#\s]+)", text))
    places = [ROOT / path for path in paths] + [(ROOT / name).parent / link for link in links]
    assert places or name == "docs/semantics.md"
    assert not [str(place) for place in places if not place.exists()]
