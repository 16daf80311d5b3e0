"""What a spec names of the rows and does not find: columns that no row has, prompts to hold out or to train on."""

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
    check_run(RunSpec.from_yaml(project / "spec.yaml", list(overrides)))


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


def test_rows_that_are_too_long_are_not_laid_to_the_fraction(project: Path) -> None:
    rows: list[dict[str, object]] = [{"prompt": f"{'1+' * 9}{n}=", "answer": "2"} for n in range(8)]
    write_rows(project / "prompts.jsonl", [{"prompt": "1+1=", "answer": "2"}, *rows])
    few = ("dataset.evaluation=null", "dataset.evaluation_fraction=0.5", "evaluation.num_prompts=1")
    with pytest.raises(
        InputError, match=r"no rows are left .*too long.* held out\): see dataset.duplicates, too_long and"
    ):
        check(project, *few, "dataset.too_long=drop", "dataset.max_prompt_tokens=8")


@pytest.mark.parametrize(
    ("fraction", "complaint"),
    [
        (
            0.1,
            r"evaluation_fraction=0.1 holds out none of the rows of prompts.jsonl: raise dataset.evaluation_fraction",
        ),
        (0.5, r"no rows are left \(prompts.jsonl: 8 rows, 8 held out\): lower dataset.evaluation_fraction"),
    ],
)
def test_a_fraction_that_holds_out_none_or_all(project: Path, fraction: float, complaint: str) -> None:
    """The hash of this prompt is behind 13 of 100."""
    rows: list[dict[str, object]] = [{"prompt": "1+1=", "answer": "2"}] * 8
    write_rows(project / "prompts.jsonl", rows)
    with pytest.raises(InputError, match=complaint):
        check(project, "dataset.evaluation=null", f"dataset.evaluation_fraction={fraction}")
