"""What is refused before anything starts: models whose files would run code. Told in a second, and in our words."""

from __future__ import annotations

import codecs
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from infra.settings import Settings
from ppo_core.records import InputError
from ppo_core.spec import SpecError
from tasks.checks.disk import require_free
from tasks.checks.model_folder import require_folder, require_model
from tasks.checks.preflight import check_model_folder, preflight, transformers_may_know
from tasks.runs.state_folder import places
from tests.e2e.launch import SMOKE, train
from tests.tasks.run_contexts import smoke_spec

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
    with pytest.raises(InputError, match=r"model needs custom code .* PPOFLOW_TRUST_REMOTE_CODE=1 .*no spec can"):
        check_model_folder(found, trust_remote_code=False)
    assert check_model_folder(found, trust_remote_code=True) == []


def test_code_beside_a_known_type_does_not_run_and_the_user_is_told(folder: Folder) -> None:
    found = folder("model.safetensors", model_type="llama", auto_map=NAMED)
    (note,) = check_model_folder(found, trust_remote_code=False)
    assert note == (
        f"the model in {found} has custom code (auto_map), which does not run here: transformers' own class for "
        "llama is used instead"
    )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ("registry.alias=champion", "registry.alias=champion is promotion.alias too"),
        ("registry.model=a/b", "registry.model: 'a/b' has /"),
        ("registry.metric=evaluation/scor", "registry.metric=evaluation/scor"),
    ],
)
def test_what_no_file_of_a_spec_may_say_is_refused_in_changes_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str, message: str
) -> None:
    """As of `ppoflow resume RUN --set`, or of a form."""
    monkeypatch.setenv("PPOFLOW_HOME", str(tmp_path))
    spec = smoke_spec()
    preflight(spec)
    with pytest.raises(SpecError, match=message):
        preflight(spec.with_overrides([changed]))


@pytest.mark.parametrize("trusted", [False, True])
def test_weights_that_are_pickle_alone_are_refused_whoever_allows_what(folder: Folder, trusted: bool) -> None:
    found = folder("pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin", model_type="llama")
    with pytest.raises(InputError, match=r"as pickle only \(pytorch_model-00001-of-00002.bin, .* never loaded: use"):
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
    [("model.safetensors", "evil", "PPOFLOW_TRUST_REMOTE_CODE=1"), ("pytorch_model.bin", "llama", "pickle only")],
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


def test_what_stands_where_a_model_should_is_called_by_its_name(folder: Folder) -> None:
    found = folder("model.safetensors", model_type="llama")
    require_model(found)
    for require in (require_model, partial(require_folder, key="model.path")):
        with pytest.raises(InputError, match=rf"config.json is a file: give the folder that contains it, {found}$"):
            require(found / "config.json")
    (found / "config.json").write_bytes(codecs.BOM_UTF8 + (found / "config.json").read_bytes())
    with pytest.raises(InputError, match=r"config.json begins with a byte order mark \(BOM\): save it as UTF-8"):
        require_model(found)
    (found / "config.json").rename(found / "adapter_config.json")
    with pytest.raises(InputError, match=r"model is an adapter .* merge it into its base model first"):
        require_model(found)


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("us/small", "; for a model on the Hugging Face Hub, write hf://us/small"),
        ("../rm/reward-model", ""),
        ("/models/small", ""),
        ("runs/mine/reward-model", "; ppoflow reward-model SPEC --run mine makes this one"),
        ("models/us/small", ""),
        ("small", ""),
    ],
)
def test_only_what_may_be_of_the_hub_is_said_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, hint: str
) -> None:
    monkeypatch.setenv("PPOFLOW_HOME", str(tmp_path))
    spec = smoke_spec(f"model.path={given}", "model.config=null", "model.tokenizer=null", "sft=null")
    with pytest.raises(InputError, match=rf"there is no folder .*, in model.path{hint}$"):
        preflight(spec.model_copy(update={"folder": str(tmp_path)}))


@pytest.mark.parametrize("home", ["", "elsewhere"])
def test_how_a_missing_reward_model_is_made_depends_on_the_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str
) -> None:
    monkeypatch.setenv("PPOFLOW_HOME", str(tmp_path / home))
    made = "ppoflow reward-model SPEC --run mine"
    other = (
        rf"made under another PPOFLOW_HOME than the present one \({tmp_path}/elsewhere\), by PPOFLOW_HOME={tmp_path}"
    )
    hint = rf"it would be {other} {made}: make it there, or name the .*" if home else f"{made} makes this one"
    with pytest.raises(InputError, match=rf"there is no folder .*, in model.path; {hint}$"):
        require_model(tmp_path / "runs" / "mine" / "reward-model")


UNREADABLE = """
import os, sys
from pathlib import Path
from ppo_core.data.files import rows_of_file
from ppo_core.records import InputError
from tasks.checks.model_folder import check_model_folder, require_folder

if os.geteuid() == 0:
    os.setuid(65534)
home = Path(sys.argv[1])
read = lambda path: list(rows_of_file(path))
folder_at = lambda path: require_folder(path, "model.path")
for look, path in ((lambda f: check_model_folder(f, trust_remote_code=False), "closed"), (folder_at, "closed/in"),
                   (folder_at, "open"), (read, "rows.jsonl"), (read, "closed/rows.jsonl")):
    try:
        look(home / path)
    except InputError as error:
        print(error)
"""


def test_what_this_user_may_not_read_is_named() -> None:
    """By a process of a user who has no rights: root may read everything."""
    with TemporaryDirectory() as place:
        home = Path(place)
        home.chmod(0o755)
        for name in ("closed/in", "open"):
            (home / name).mkdir(parents=True)
        for name in ("open/config.json", "rows.jsonl"):
            (home / name).write_text("{}")
            (home / name).chmod(0)
        (home / "closed").chmod(0)
        command = [sys.executable, "-c", UNREADABLE, place]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[3])
        (home / "closed").chmod(0o700)
    assert done.returncode == 0, done.stderr
    names = ["closed", "closed/in", "open/config.json", "rows.jsonl", "closed/rows.jsonl"]
    told = [f"{home / name} cannot be read (Permission denied): give " for name in names]
    assert [line.startswith(start) for line, start in zip(done.stdout.splitlines(), told, strict=True)] == [True] * 5


def test_a_full_disk_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    home, *_ = places(Settings(home=tmp_path))
    require_free(home, 200 << 20)
    with pytest.raises(
        InputError,
        match=rf"state folder {tmp_path} is on a disk with 1 MiB free, .* 200 MiB .* PPOFLOW_HOME to another",
    ):
        require_free(home, (2 << 20) - 1)


@pytest.mark.parametrize("key", ["dataset.train", "dataset.evaluation", "model.tokenizer", "sft.data"])
def test_the_users_home_is_found_in_paths_of_a_spec(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    section, _, name = key.partition(".")
    assert smoke_spec().with_overrides([f"{key}=~/x.py:y"]).model_dump()[section][name] == "/home/me/x.py:y"
