"""Where a run goes on, and which changes of its spec are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.backend import acquire_lease, open_records, open_runs
from infra.runs.records import RunRecords
from ppo_core.records import InputError, content_digest
from ppo_core.spec import RunSpec, SpecError
from tasks.runs.record_chain import made_with
from tasks.runs.run_state import changed_values, committed, effective_spec, last_record, spec_of_run, with_changes
from tests.tasks.run_contexts import smoke_spec


def recorded(root: Path, *overrides: str) -> RunRecords:
    """A run that was started with the smoke spec."""
    records = open_records(root, "known", lease=acquire_lease(root, "known"))
    records.create_spec(effective_spec(smoke_spec(*overrides), open_records(root, "other")).document())
    return records


def test_a_new_run_fixes_the_end_of_its_learning_rate_decay(tmp_path: Path) -> None:
    assert effective_spec(smoke_spec(), open_records(tmp_path, "new")).update.decay_iterations == 4


def test_a_longer_run_keeps_the_schedule_it_began_with(tmp_path: Path) -> None:
    spec = effective_spec(smoke_spec("iterations=9"), recorded(tmp_path))
    assert (spec.iterations, spec.update.decay_iterations) == (9, 4)


def test_timeouts_and_registry_may_change(tmp_path: Path) -> None:
    spec = effective_spec(smoke_spec("engines.timeout_s=7", "registry.alias=other"), recorded(tmp_path))
    assert spec.engines.timeout_s == 7


def test_every_other_difference_is_listed(tmp_path: Path) -> None:
    with pytest.raises(InputError) as refusal:
        effective_spec(smoke_spec("seed=3", "advantages.kl.coef=0.5", "iterations=9"), recorded(tmp_path))
    message = str(refusal.value)
    assert "advantages.kl.coef: 0.01 -> 0.5" in message
    assert "seed: 0 -> 3" in message
    assert "iterations:" not in message
    assert "choose another --run name" in message


def test_the_folder_of_the_spec_is_no_part_of_a_run(tmp_path: Path) -> None:
    records = recorded(tmp_path)
    moved = smoke_spec().model_copy(update={"folder": "/somewhere/else"})
    assert effective_spec(moved, records).folder == "/somewhere/else"


def test_a_recorded_spec_that_this_version_refuses_is_told_with_what_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PPOFLOW_STORE", str(tmp_path))
    document = smoke_spec().document()
    document["rollout"] |= {"temperature": -1.0, "warmth": 2}
    open_runs(tmp_path).create("old", document, {})
    with pytest.raises(SpecError) as refusal:
        spec_of_run("old")
    first, *problems = str(refusal.value).splitlines()
    assert "run old was started with is refused by this version: use the version of ppoflow that started it" in first
    assert [line.partition(":")[0] for line in problems] == ["rollout.temperature=-1.0", "rollout.warmth"]
    with pytest.raises(SpecError, match="run old"):
        effective_spec(smoke_spec(), open_records(tmp_path, "old"))


def test_a_run_without_records_has_no_last_one(tmp_path: Path) -> None:
    assert last_record(open_records(tmp_path, "new")) is None


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"GPU": 1, "pool": 1}, {"GPU": 1}),
        ({"GPU": 1, "pool": 1}, {"node:10.0.0.5": 1}),
        ({"node:10.0.0.5": 1}, {"node:10.0.0.6": 0.5}),
    ],
)
def test_a_mapping_of_the_users_is_one_value(before: dict[str, float], after: dict[str, float]) -> None:
    """Whose keys may hold dots, and may go."""

    def with_resources(resources: dict[str, float]) -> RunSpec:
        document = smoke_spec("engines.backend=ray").model_dump(mode="json")
        document["engines"]["rollout_resources"] = resources
        return RunSpec.model_validate(document)

    recorded, now = with_resources(before), with_resources(after)
    changed = changed_values(recorded, now)
    assert changed == {"engines.rollout_resources": after}
    assert with_changes(recorded, changed) == now
    assert made_with(recorded.model_dump(mode="json"), changed) == content_digest(now.document())


def test_a_run_that_has_no_iteration_yet_is_told_from_one_that_never_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PPOFLOW_STORE", str(tmp_path))
    recorded(tmp_path)
    with pytest.raises(InputError, match=r"known has no committed iteration .* yet: .*ppoflow resume known"):
        committed("known")
    with pytest.raises(InputError, match=r"there is no run other in .*: check the name"):
        committed("other")
