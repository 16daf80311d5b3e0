"""What is refused before anything starts: models whose files would run code. Told in a second, and in our words."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ppo_core.records import InputError
from tasks.checks.preflight import check_model_folder, preflight, transformers_may_know
from tests.e2e.launch import SMOKE, train
from tests.tasks.benches import smoke_spec

NAMED = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
Folder = Callable[..., Path]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """A model's folder with empty weights."""

    def make(*weights: str, **config: Any) -> Path:
        (made := tmp_path / "model").mkdir()
        (made / "config.json").write_text(json.dumps(config))
        for name in weights:
            (made / name).write_bytes(b"")
        return made

    return make


def test_code_of_an_unknown_type_is_refused_and_an_owner_can_allow_it(folder: Folder) -> None:
    found = folder("model.safetensors", model_type="evil", auto_map=NAMED)
    with pytest.raises(
        InputError, match=r"model can be read only with code .* PPOFLOW_TRUST_REMOTE_CODE=1 .*no spec can"
    ):
        check_model_folder(found, trust_remote_code=False)
    assert check_model_folder(found, trust_remote_code=True) == []


def test_code_beside_a_known_type_does_not_run_and_the_user_is_told(folder: Folder) -> None:
    found = folder("model.safetensors", model_type="llama", auto_map=NAMED)
    (note,) = check_model_folder(found, trust_remote_code=False)
    assert note == (
        f"the model in {found} names code of its own (auto_map), which does not run here: transformers' own class for "
        "llama is used"
    )


@pytest.mark.parametrize("trusted", [False, True])
def test_weights_that_are_pickle_alone_are_refused_whoever_allows_what(folder: Folder, trusted: bool) -> None:
    found = folder("pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin", model_type="llama")
    with pytest.raises(InputError, match=r"as pickle alone \(pytorch_model-00001-of-00002.bin, .* never read: take"):
        check_model_folder(found, trust_remote_code=trusted)
    (found / "model-00001-of-00001.safetensors").touch()
    assert check_model_folder(found, trust_remote_code=trusted) == []


@pytest.mark.parametrize("config", ["", "[]", '{"auto_map": {}}', '{"auto_map": {}, "model_type": 3}'])
def test_what_only_transformers_can_judge_is_left_to_the_engine(folder: Folder, config: str) -> None:
    found = folder("model.safetensors")
    (found / "config.json").write_text(config)
    assert check_model_folder(found, trust_remote_code=False) == []


@pytest.mark.parametrize("known", ["llama", "qwen2", "gpt_neox", "phi3", "gemma3_text", "mistral"])
def test_known_types_are_found_by_reading(known: str) -> None:
    assert transformers_may_know(known)
    assert not transformers_may_know("evil")


def test_a_run_is_refused_for_what_this_machine_lacks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PPOFLOW_HOME", str(tmp_path / "home"))
    assert preflight(smoke_spec()) == []
    monkeypatch.setenv("PPOFLOW_REWARD_ENV", "NOT_HERE")
    with pytest.raises(InputError, match="PPOFLOW_REWARD_ENV names NOT_HERE"):
        preflight(smoke_spec())
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize(
    ("weights", "model_type", "verdict"),
    [("model.safetensors", "evil", "PPOFLOW_TRUST_REMOTE_CODE=1"), ("pytorch_model.bin", "llama", "pickle alone")],
)
def test_the_command_says_so_before_it_starts_anything(
    folder: Folder, tmp_path: Path, weights: str, model_type: str, verdict: str
) -> None:
    found = folder(weights, model_type=model_type, auto_map=NAMED)
    model = ["--set", "model.config=null", "--set", f"model.path={found}"]
    done = train(tmp_path / "home", "refused", *model, spec=SMOKE)
    assert done.returncode == 2
    assert done.stdout.startswith(f"starting: run refused from {SMOKE}\n")
    assert "Prefect" not in done.stdout
    assert verdict in done.stderr
    assert not [word for word in ("trust_remote_code=True", "hf.co", "Traceback") if word in done.stderr]
    assert not (tmp_path / "home").exists()
