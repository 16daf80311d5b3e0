"""A checkpoint that cannot be used is refused with what is wrong, before anything is computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ppo_core.records import InputError
from ppo_core.training.state import read_state
from tests.ppo_core.training.bad_checkpoints import DAMAGES, SAID
from tests.ppo_core.training.update_cases import update_job

STEPS = {"num_steps": {"policy": 3, "critic": 4}, "skipped_steps": {"policy": 0, "critic": 2}}
STATE = {"format": 3, "identity": "abc", "full": True, "replay": [], **STEPS}
UPDATE = {"spec": update_job().model_dump(mode="json"), "experience": "d1"}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_is_wrong_is_said_before_anything_is_computed(replayed: Path, name: str) -> None:
    fact = json.loads((replayed / "damaged-1.json").read_text())[name]
    for words in SAID[name]:
        assert words in fact["said"]
    assert not fact["computed"]


def written(folder: Path, text: str, manifest: Any = None) -> Path:
    (folder / "state.json").write_text(text)
    if manifest is not None:
        (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def test_a_state_with_settings_of_another_version_is_not_called_damaged(tmp_path: Path) -> None:
    update = {**UPDATE, "spec": {**UPDATE["spec"], "gone": 1}}
    text = json.dumps({**STATE, "full": False, "replay": [update]})
    with pytest.raises(
        InputError, match=r"settings that this ppoflow does not know \(replay.0..spec.gone: .*use the one"
    ):
        read_state(written(tmp_path, text, {"libraries": {"ppoflow": "0.0.9"}}))


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ("{", "is damaged (JSONDecodeError"),
        ("[1]", "is damaged (TypeError"),
        ({"identity": "abc"}, "is damaged (KeyError: 'format'"),
        ({**STATE, "format": "new"}, "is damaged (ValueError"),
        ({key: value for key, value in STATE.items() if key != "identity"}, "identity: is required but missing"),
        ({key: value for key, value in STATE.items() if key != "full"}, "full: is required but missing"),
        ({**STATE, "num_steps": {"policy": -1}}, "num_steps.policy=-1"),
        ({**STATE, "num_steps": {"policy": 3}}, "num_steps is of policy, skipped_steps of policy and critic"),
        ({**STATE, "num_steps": {"policy": 3, "critic": None}}, "num_steps.critic=None"),
        ({**STATE, "full": False}, "full=False does not go with 0 updates in replay"),
        ({**STATE, "replay": [UPDATE]}, "full=True does not go with 1 updates in replay"),
        ({**STATE, "full": False, "replay": [{"spec": {}, "experience": "d1"}]}, "replay[0].spec.seed: is required"),
    ],
)
def test_a_damaged_state_is_refused(tmp_path: Path, document: Any, words: str) -> None:
    text = document if isinstance(document, str) else json.dumps(document)
    with pytest.raises(InputError) as refusal:
        read_state(written(tmp_path, text))
    assert words in str(refusal.value)
    assert "state.json is damaged" in str(refusal.value)


@pytest.mark.parametrize("number", [1, 2, 4])
@pytest.mark.parametrize(
    ("manifest", "writer"),
    [
        ({"libraries": {"ppoflow": "0.9.0"}}, "that wrote it (0.9.0)"),
        ({"libraries": {"torch": "2.13.0"}}, "that wrote it"),
        (["no manifest"], "that wrote it"),
        (None, "that wrote it"),
    ],
)
def test_another_format_names_who_can_read_it(tmp_path: Path, number: int, manifest: Any, writer: str) -> None:
    folder = written(tmp_path, json.dumps({**STATE, "format": number}), manifest)
    with pytest.raises(InputError) as refusal:
        read_state(folder)
    assert str(refusal.value) == (
        f"{folder} has checkpoint format {number}, and this ppoflow reads format 3 alone: use the ppoflow {writer}"
    )


def test_full_and_thin_states_are_read(tmp_path: Path) -> None:
    full = read_state(written(tmp_path, json.dumps(STATE)))
    assert (full.full, full.num_steps, full.replay) == (True, {"policy": 3, "critic": 4}, ())
    assert full.skipped_steps == {"policy": 0, "critic": 2}
    thin = read_state(written(tmp_path, json.dumps({**STATE, "full": False, "replay": [UPDATE]})))
    assert (thin.full, thin.replay[0].experience, thin.replay[0].spec.iteration) == (False, "d1", 0)
