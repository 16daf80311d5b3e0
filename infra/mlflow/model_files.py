"""Makes a Hugging Face folder an MLflow model too, where it lies and without touching its weights.

Written into the folder:
- MLmodel: what MLflow needs to load and serve it (flavors transformers and python_function);
- components/tokenizer/: copies of the tokenizer's files, because MLflow looks for them there;
- requirements.txt, python_env.yaml, conda.yaml: the environment that `mlflow models serve` builds.
The bytes depend on the folder, the seed and the installed versions alone: no clock, no random id.
"""

from __future__ import annotations

import json
import platform
import shutil
import uuid
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from infra.mlflow.client import ENVIRONMENT
from infra.settings import export

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "config.json",  # AutoTokenizer reads the model type in it
)
REQUIRED_PACKAGES = ("mlflow", "torch", "transformers", "safetensors", "numpy")
SERVED_NEW_TOKENS = 256


class Task(NamedTuple):
    """What a model is for: transformers' name of the task, and its pipeline."""

    name: str
    pipeline: str


UUID_PLACEHOLDER = "uuid-of-the-model"
ANSWERS = Task("text-generation", "TextGenerationPipeline")
SCORES = Task("text-classification", "TextClassificationPipeline")


class ModelFolderError(ValueError):
    """The folder is not a complete Hugging Face model with its tokenizer."""


def write_mlmodel(folder: Path, *, digest_seed: str, context_length: int | None = None, task: Task = ANSWERS) -> None:
    """Add MLflow's files to a folder with config.json, weights and a fast tokenizer. Imports MLflow, but no torch.

    `digest_seed` gives the model's uuid, `task` says whether it answers or scores texts. Served answers have 256 tokens
    unless asked otherwise, or half the `context_length` where that is less.
    """
    architecture = _architecture(folder)
    if not (folder / "tokenizer.json").is_file() or not (folder / "tokenizer_config.json").is_file():
        raise ModelFolderError(
            f"{folder} has no tokenizer.json with tokenizer_config.json: save the tokenizer into it with "
            "`AutoTokenizer.from_pretrained(MODEL).save_pretrained(FOLDER)` (a fast tokenizer)"
        )
    components = folder / "components" / "tokenizer"
    components.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, components / name)
    for name, text in _environment().items():
        (folder / name).write_text(text, encoding="utf-8")
    own = uuid.uuid5(uuid.NAMESPACE_OID, f"ppoflow:{digest_seed}").hex
    quoted = yaml.safe_dump(own).splitlines()[0]  # digits alone would be a number
    text = _model_text(architecture, context_length, task).replace(UUID_PLACEHOLDER, quoted)
    (folder / "MLmodel").write_text(text, encoding="utf-8")


def _architecture(folder: Path) -> str:
    file = folder / "config.json"
    if not file.is_file():
        raise ModelFolderError(f"{folder} has no config.json: it is not a Hugging Face model folder")
    architectures = json.loads(file.read_text(encoding="utf-8")).get("architectures")
    if not architectures:
        raise ModelFolderError(
            f"{file} names no architecture (architectures={architectures}): set it, for example to "
            '["LlamaForCausalLM"]; `model.save_pretrained` does'
        )
    return str(architectures[0])


@cache
def _model_text(architecture: str, context_length: int | None, task: Task) -> str:
    """`MLmodel` with a placeholder for the uuid; MLflow takes 7 ms to write it."""
    export(ENVIRONMENT)
    from mlflow import pyfunc
    from mlflow.models import Model

    model = Model(
        model_uuid=UUID_PLACEHOLDER,
        utc_time_created="1970-01-01 00:00:00",  # a clock here would change the folder's digest
        signature=_signature(context_length) if task is ANSWERS else _score_signature(),
        metadata={"context_length": context_length} if context_length is not None else None,
    )
    model.add_flavor(
        "transformers",
        task=task.name,
        instance_type=task.pipeline,
        pipeline_model_type=architecture,
        source_model_name=architecture,  # not the path: it differs from place to place
        model_binary=".",
        components=["tokenizer"],
        # By the same road as everybody else who loads this folder, whatever class its configuration names.
        tokenizer_type="AutoTokenizer",
        transformers_version=version("transformers"),
        code=None,
    )
    pyfunc.add_to_model(
        model,
        loader_module="mlflow.transformers",
        conda_env="conda.yaml",
        python_env="python_env.yaml",
        model_config={"return_full_text": False} if task is ANSWERS else None,
    )
    return str(model.to_yaml())


def _signature(context_length: int | None) -> Any:
    """A text in, the answer out; greedy unless asked otherwise."""
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, ParamSchema, ParamSpec, Schema

    new_tokens = SERVED_NEW_TOKENS if context_length is None else max(1, min(SERVED_NEW_TOKENS, context_length // 2))
    return ModelSignature(
        inputs=Schema([ColSpec("string")]),
        outputs=Schema([ColSpec("string")]),
        params=ParamSchema(
            [
                ParamSpec("max_new_tokens", "long", new_tokens),
                ParamSpec("do_sample", "boolean", False),
                ParamSpec("temperature", "double", 1.0),
            ]
        ),
    )


def _score_signature() -> Any:
    """A text (a prompt with its response) in, a label without meaning and the score out."""
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, Schema

    outputs = Schema([ColSpec("string", "label"), ColSpec("double", "score")])
    return ModelSignature(inputs=Schema([ColSpec("string")]), outputs=outputs)


@cache
def _environment() -> Mapping[str, str]:
    """The files that say what a server of the model installs; versions are read once."""
    python = platform.python_version()
    # Without the build's mark (2.13.0+cpu), so that it can be had from an ordinary index.
    pins = [f"{package}=={version(package).split('+')[0]}" for package in REQUIRED_PACKAGES]
    python_env = {"python": python, "build_dependencies": ["pip"], "dependencies": ["-r requirements.txt"]}
    conda_env = {
        "name": "mlflow-env",
        "channels": ["conda-forge"],
        "dependencies": [f"python={python}", "pip", {"pip": pins}],
    }
    return {
        "requirements.txt": "".join(f"{pin}\n" for pin in pins),
        "python_env.yaml": yaml.safe_dump(python_env, sort_keys=False),
        "conda.yaml": yaml.safe_dump(conda_env, sort_keys=False),
    }
