"""What the documents name exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import AliasChoices

from infra.settings import Settings, StackSettings
from ppo_core.spec import PreferencesSpec, RunSpec, Section
from ppo_core.spec.explaining import OTHER_NAMES
from ppo_core.spec.reward_model import RewardDataSpec
from tests.architecture.source_tree import ROOT


def test_the_tests_that_pin_the_semantics_exist() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "semantics.md").read_text()))
    files = (ROOT / "tests" / "ppo_core").rglob("test_*.py")
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


def test_every_key_of_the_spec_is_explained_beside_its_section() -> None:
    """In one part of a document both stand as code; docs/rewards.md is about the section `reward` as a whole."""
    texts = {path.name: path.read_text() for path in (ROOT / "docs").glob("*.md")}
    parts = [names_in(part) for text in texts.values() for part in re.split(r"\n\n|\n(?=#)", text)]
    parts.append(names_in(texts["rewards.md"]) | {"reward"})
    keys = sorted(keys_of(RunSpec) | {("dataset", *key) for key in keys_of(RewardDataSpec)})
    keys += sorted(("preferences", *key) for key in keys_of(PreferencesSpec))
    assert len(keys) > 200
    missing = [key for key in keys if not any({key[0], key[-1]} <= part for part in parts)]
    assert not missing, [".".join(key) for key in missing]


def test_every_key_of_what_learns_is_among_the_hyperparameters() -> None:
    named = names_in((ROOT / "docs" / "hyperparameters.md").read_text())
    keys = [key for key in keys_of(RunSpec) if key[0] in ("algorithm", "rollout", "advantages", "update")]
    fixed_or_shown_by_the_rest = {"kind", "top_p", "top_k", "iterations"}
    assert not {key[-1] for key in keys} - named - fixed_or_shown_by_the_rest


def test_the_names_of_other_trainers_are_those_that_a_spec_is_answered_with() -> None:
    text = (ROOT / "docs" / "hyperparameters.md").read_text()
    table = text.partition("| here | TRL | verl | OpenRLHF and others |")[2].partition("\n\n")[0]
    shown: dict[str, set[str]] = {}
    for row in table.splitlines()[2:]:
        here, *others = (re.findall("`([^`]+)`", cell) for cell in row.split("|")[1:-1])
        for name in (name for cell in others for name in cell):
            shown[name] = shown.get(name, set()) | set(here)
    assert shown == {name: set(keys) for name, keys in OTHER_NAMES.items()}
    assert set().union(*shown.values()) <= {".".join(key) for key in keys_of(RunSpec)}


def test_a_metric_is_no_key() -> None:
    assert names_in("score `update.eps`, `b: {c: 1}` and `kl/coef`") == {"update", "eps", "b", "c"}


def keys_of(section: Any) -> set[tuple[str, ...]]:
    """The keys of a section, with those of all that each may hold."""
    found = set()
    for name, field in section.model_fields.items():
        found |= {(name,)} | {(name, *key) for inner in sections_in(field.annotation) for key in keys_of(inner)}
    return found


def names_in(text: str) -> set[str]:
    """The names of keys in the code of a text; `kl/coef` is a metric."""
    code = " ".join(re.findall(r"```.*?```|`[^`\n]+`", text, re.DOTALL))
    return set(re.findall(r"(?<![\w/])[a-z_]+[a-z0-9_]*(?![\w/])", code))


def test_every_environment_variable_is_documented_with_its_description() -> None:
    rows = (ROOT / "docs" / "environment.md").read_text().splitlines()
    for name, setting in Settings.model_fields.items():
        alias = setting.validation_alias
        variables = alias.choices if isinstance(alias, AliasChoices) else [f"PPOFLOW_{name.upper()}"]
        wanted = f"| {', '.join(f'`{variable}`' for variable in variables)} |"
        assert [row for row in rows if row.startswith(wanted) and row.endswith(f"| {setting.description} |")], name
    for name, setting in StackSettings.model_fields.items():
        wanted = f"| `PPOFLOW_STACK_{name.upper()}` |"
        assert [row for row in rows if row.startswith(wanted) and row.endswith(f"| {setting.description} |")], name


def sections_in(annotation: Any) -> list[Any]:
    """The sections that a field may hold."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [section for part in get_args(annotation) for section in sections_in(part)]


FOLDERS = (".ci", "ppo_core", "tasks", "flows", "infra", "examples", "docs", "benchmarks", "tests")
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md"))])


def test_documents_of_all_folders_name_something() -> None:
    assert {ROOT / name for name in ("README.md", "docs/data.md", "examples/helpful/README.md")} <= set(DOCUMENTS)
    names = (
        "algorithms",
        "architecture",
        "dpo",
        "hyperparameters",
        "performance",
        "resuming",
        "reward-models",
        "rewards",
    )
    for name in (*names, "rlhf", "team", "training"):
        text = (ROOT / "docs" / f"{name}.md").read_text()
        assert paths_in(text) | links_in(text), name
    for name in ("README.md", "CONTRIBUTING.md", "docs/architecture.md"):
        assert len(paths_in((ROOT / name).read_text())) > 3, name


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_what_documents_name_exists(document: Path) -> None:
    text = document.read_text()
    assert not [path for path in paths_in(text) if not (ROOT / path).exists()]
    for link in links_in(text):
        name, _, heading = link.partition("#")
        place = document.parent / name if name else document
        assert place.exists(), link
        assert not heading or heading in headings_of(place.read_text()), link


def paths_in(text: str) -> set[str]:
    """The files and folders of ours that a text names; where NAME is in them, it stands for any."""
    paths = re.findall(rf"`((?:{'|'.join(FOLDERS)})/[A-Za-z0-9_./-]+)`", text)
    return {path for path in paths if "NAME" not in path}


def links_in(text: str) -> set[str]:
    """What a text links in the repository, with the heading where one is named."""
    return set(re.findall(r"\]\(((?!http)[^)\s]+)\)", text))


def headings_of(text: str) -> set[str]:
    """As links name them: in small letters, without marks, with hyphens between words."""
    lines = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line).lower().replace(" ", "-") for line in lines}
