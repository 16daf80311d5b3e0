"""Whatever lies in a store, reading it runs none of it."""

from __future__ import annotations

import json
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest

from ppo_core.data.tokenization import load_tokenizer, model_config
from ppo_core.models.loading import load_policy
from ppo_core.processes.permissions import Permissions, permissions_of
from ppo_core.processes.plugins import Sources, load_function
from ppo_core.records import InputError
from tests.ppo_core.training.programs.poison_program import CODE, EVIL, POISONS, SIGN
from tests.ppo_core.training.programs.poison_program import __name__ as PROGRAM

ROOT = Path(__file__).parents[3]
ADVICE = ("trust_remote_code=True", "hf.co", "huggingface.co")  # transformers' own
HARMLESS = {
    "pickle as policy/pytorch_model.bin",
    "pickle as policy/adapter_model.bin",
    "config names code",  # of a type that transformers knows, and has its own code for
    "code for generate",
}


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", PROGRAM, str(tmp_path_factory.mktemp("poison"))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("poison", POISONS)
def test_a_poisoned_artifact_executes_nothing(outcome: dict[str, Any], poison: str) -> None:
    found = outcome["found"][poison]
    assert found["executed"] == []
    assert not found["sign"]
    assert bool(found["refused"]) == (poison not in HARMLESS)


def test_the_watch_would_see_it(outcome: dict[str, Any]) -> None:
    assert [line.split()[0] for line in outcome["control"]] == ["pickle.find_class", "os.system", "exec"]
    assert outcome["sign"]
    assert outcome["sound"] == []  # a sound folder loads by every road


def evil_folder(tmp_path: Path) -> Path:
    config = {"model_type": "evil", "auto_map": {"AutoConfig": f"{EVIL}.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    code = f"open({str(tmp_path / SIGN)!r}, 'w').close()\nfrom transformers import PretrainedConfig\n"
    (tmp_path / f"{EVIL}.py").write_text(f"{code}class Config(PretrainedConfig):\n    model_type = 'evil'\n")
    return tmp_path


def test_code_of_a_model_runs_only_where_the_owner_says_so(tmp_path: Path) -> None:
    folder = evil_folder(tmp_path)
    for read in (lambda: model_config(str(folder), None), lambda: load_policy(folder, dtype="float32")):
        with pytest.raises(
            InputError, match=r"PPOFLOW_TRUST_REMOTE_CODE=1 in ppoflow's environment; no spec can"
        ) as told:
            read()
        assert not [advice for advice in ADVICE if advice in "".join(traceback.format_exception(told.value))]
    assert not (folder / SIGN).exists()
    assert model_config(str(folder), None, trust_remote_code=True).model_type == "evil"
    assert (folder / SIGN).exists()


def test_the_refusal_of_a_tokenizers_code_is_ours_too(tmp_path: Path) -> None:
    named = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": [f"{EVIL}.Evil", f"{EVIL}.Evil"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    with pytest.raises(InputError, match="PPOFLOW_TRUST_REMOTE_CODE=1") as told:
        load_tokenizer(tmp_path)
    assert not [advice for advice in ADVICE if advice in "".join(traceback.format_exception(told.value))]


def test_the_command_line_carries_the_permissions() -> None:
    assert permissions_of([]) == Permissions((".",), trust_remote_code=False)
    given = ["--plugins=.", "--plugins=/srv/rewards", "--trust-remote-code"]
    assert permissions_of(given) == Permissions((".", "/srv/rewards"), trust_remote_code=True)


@pytest.mark.parametrize("name", ["../outside.py:f", "outside_by_link.py:f", "os:system", "textwrap:dedent"])
def test_code_from_elsewhere_is_refused_before_it_runs(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "spec"
    folder.mkdir()
    (tmp_path / "outside.py").write_text(f"{CODE}def f():\n    return 1\n".replace(SIGN, str(tmp_path / SIGN)))
    (folder / "outside_by_link.py").symlink_to(tmp_path / "outside.py")
    with pytest.raises(InputError, match=r"may not run here, only from \..*PPOFLOW_PLUGINS"):
        load_function(name, Sources(folder))
    assert not (tmp_path / SIGN).exists()


def test_the_owner_can_allow_folders_and_packages(tmp_path: Path) -> None:
    folder = tmp_path / "spec"
    folder.mkdir()
    (tmp_path / "allowed.py").write_text("def f():\n    return 1\n")
    assert load_function("../allowed.py:f", Sources(folder, (".", str(tmp_path))))() == 1
    assert load_function("textwrap:dedent", Sources(folder, ("textwrap",)))(" a") == "a"
    with pytest.raises(InputError, match="may not run here"):
        load_function("textwrap:dedent", Sources(folder, ("text",)))
    (folder / "own.py").write_text("def f():\n    return 1\n")
    with pytest.raises(InputError, match="may not run here"):  # the spec's own folder is not on this list
        load_function("own.py:f", Sources(folder, ("textwrap",)))
