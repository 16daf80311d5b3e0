"""A spec that goes to the command of another kind: the refusal says which one takes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ppo_core.spec import DpoSpec, RewardModelSpec, RlhfSpec, RunSpec, SpecError
from ppo_core.spec.kinds import load_as

HELPFUL = Path(__file__).parents[3] / "examples" / "helpful"
FILES = {
    RunSpec: ("ppo.yaml", "train"),
    RewardModelSpec: ("reward_model.yaml", "reward-model"),
    DpoSpec: ("dpo.yaml", "dpo"),
    RlhfSpec: ("rlhf.yaml", "rlhf"),
}


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("given", FILES)
def test_a_spec_of_another_kind_is_told_from_one_with_a_mistake(kind: type[RunSpec], given: type[RunSpec]) -> None:
    file, command = HELPFUL / FILES[given][0], FILES[given][1]
    with pytest.raises(SpecError) as refusal:
        load_as(kind, file, ["name=/"])
    if given is kind:
        assert str(refusal.value).startswith(f"{file}: name='/': must match ")
        assert "another command" not in str(refusal.value)
    else:
        assert str(refusal.value) == f"{file} is a spec for another command: ppoflow {command} {file}"


@pytest.mark.parametrize("more", ["", "rolout: {}", "training: {num_ranks: 0}", "reward: {function: f}", "fit: 4"])
def test_a_mistake_in_a_section_or_one_that_is_missing_names_no_other_command(tmp_path: Path, more: str) -> None:
    (tmp_path / "spec.yaml").write_text(f"dataset: {{train: a}}\nmodel: {{path: b}}\nadvantages: {{}}\n{more}\n")
    with pytest.raises(SpecError) as refusal:
        load_as(RunSpec, tmp_path / "spec.yaml")
    assert "another command" not in str(refusal.value)


def test_a_file_that_cannot_be_read_is_of_no_kind(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"none.yaml: cannot be read"):
        load_as(DpoSpec, tmp_path / "none.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"name: \xe9t\xe9")
    with pytest.raises(SpecError, match=r"latin.yaml: byte 7 is not UTF-8: save the file as text in UTF-8$"):
        load_as(DpoSpec, tmp_path / "latin.yaml")
