"""Columns that a spec names and no row has: refused by name, for they would be left out without a word."""

from __future__ import annotations

from pathlib import Path

import pytest

from ppo_core.records import InputError
from ppo_core.spec import RunSpec
from tasks.checks.run import check_run
from tests.experience.project import write_rows

pytestmark = pytest.mark.usefixtures("shared_engine")


@pytest.fixture(autouse=True)
def _state(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PPOFLOW_HOME", str(project / "state"))


def check(project: Path, *overrides: str) -> None:
    """What `ppoflow check` does with the spec."""
    check_run(RunSpec.from_yaml(project / "spec.yaml", overrides))


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        (
            "dataset.answer_column=solution",
            r"^dataset.answer_column=solution: no row has it \(columns: answer, prompt\): name one of these, or leave",
        ),
        ("dataset.answer_column=answer.gold", r"^dataset.answer_column=answer.gold: no row has it"),
        (
            "dataset.drop_columns=[imag]",
            r"^dataset.drop_columns has 'imag': no row has it \(columns: answer, prompt\): name one .*, or remove",
        ),
    ],
)
def test_columns_that_no_row_has(project: Path, override: str, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        check(project, override)


def test_columns_that_a_row_has_and_answers_that_are_not_needed(project: Path) -> None:
    (project / "rewards.py").write_text("def correct(prompts, completions): return [1.0 for _ in prompts]\n")
    rows: list[dict[str, object]] = [{"prompt": "1+1="}] * 8
    write_rows(project / "prompts.jsonl", rows)
    write_rows(project / "held_out.jsonl", [*rows, {"prompt": "2+1=", "image": "a", "gold": {"is": "3"}}])
    check(project)
    check(project, "dataset.drop_columns=[image]", "dataset.answer_column=gold.is")
