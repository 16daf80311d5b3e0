"""A policy folder registered where it lies: everybody who loads it gets the same answers."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from infra.mlflow.model_files import ModelFolderError, write_mlmodel
from infra.mlflow.registry import register, resolve
from tests.infra.mlflow.tiny_models import CONTEXT, make_tiny_llama

PROMPT = "w1 w7 w3"
NEW_TOKENS = 8


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('registry')}/mlflow.db"


def greedy(folder: str | Path) -> tuple[list[int], str]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)[0]
    answer = output[inputs["input_ids"].shape[1] :]
    return answer.tolist(), tokenizer.decode(answer, skip_special_tokens=True)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_every_loader_gives_the_same_greedy_tokens(
    tmp_path: Path, uri: str, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow

    folder = make_tiny_llama(tmp_path / "policy", tied=tied)
    expected_tokens, expected_text = greedy(folder)
    write_mlmodel(folder, digest_seed="k" * 64, context_length=CONTEXT)
    for file in folder.rglob("*"):
        if file.is_file():
            file.chmod(0o444)
    name = f"tiny-{tied}"
    version = register(uri, name=name, source=folder.as_uri(), tags={"ppoflow.digest": "d"}, aliases=["best"])

    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    pipeline: Any = mlflow.transformers.load_model(f"models:/{name}@best")
    (answer,) = pipeline(PROMPT, max_new_tokens=NEW_TOKENS, do_sample=False, return_tensors=True)
    served = mlflow.pyfunc.load_model(f"models:/{name}/{version.version}")

    assert len(expected_tokens) == NEW_TOKENS
    assert len(set(expected_tokens)) > 1
    assert answer["generated_token_ids"][-NEW_TOKENS:] == expected_tokens
    assert served.predict(PROMPT, params={"max_new_tokens": NEW_TOKENS}) == [expected_text]
    assert greedy(resolve(uri, f"models:/{name}@best").removeprefix("file://"))[0] == expected_tokens
    assert (folder / "registered_model_meta").is_file()  # MLflow's own note, beside files that are read-only


def test_the_same_folder_gives_the_same_bytes_at_any_time_in_any_place(tmp_path: Path) -> None:
    one = make_tiny_llama(tmp_path / "one", tied=True)
    two = tmp_path / "elsewhere" / "two"
    shutil.copytree(one, two)
    write_mlmodel(one, digest_seed="seed", context_length=CONTEXT)
    program = (
        "import sys; from pathlib import Path; from infra.mlflow.model_files import write_mlmodel; "
        f"write_mlmodel(Path({str(two)!r}), digest_seed='seed', context_length={CONTEXT}); "
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, check=True, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]"
    files = sorted(file.relative_to(one) for file in one.rglob("*") if file.is_file())
    assert {Path("MLmodel"), Path("requirements.txt"), Path("components/tokenizer/tokenizer.json")} <= set(files)
    assert files == sorted(file.relative_to(two) for file in two.rglob("*") if file.is_file())
    for file in files:
        assert (one / file).read_bytes() == (two / file).read_bytes(), file

    before = (one / "MLmodel").read_bytes()
    write_mlmodel(one, digest_seed="another seed", context_length=CONTEXT)
    assert (one / "MLmodel").read_bytes() != before


def test_requirements_are_pinned_without_the_mark_of_a_build(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path, tied=True)
    write_mlmodel(folder, digest_seed="seed")
    pins = (folder / "requirements.txt").read_text().splitlines()
    assert {pin.split("==")[0] for pin in pins} >= {"mlflow", "torch", "transformers"}
    assert not any("+" in pin for pin in pins)


def test_a_folder_without_tokenizer_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path, tied=True)
    (folder / "tokenizer.json").unlink()
    before = sorted(folder.rglob("*"))
    with pytest.raises(ModelFolderError, match=r"no tokenizer\.json.*save_pretrained"):
        write_mlmodel(folder, digest_seed="seed")
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(("config", "message"), [({}, "names no architecture"), (None, r"no config\.json")])
def test_a_folder_without_architecture_is_refused(tmp_path: Path, config: dict[str, Any] | None, message: str) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFolderError, match=message):
        write_mlmodel(tmp_path, digest_seed="seed")
