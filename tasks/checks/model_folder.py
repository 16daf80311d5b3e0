"""A model's folder, by its config.json and the names of its files: in no time, without transformers or torch."""

from __future__ import annotations

import json
import os
from codecs import BOM_UTF8
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from infra.settings import Settings
from ppo_core.records import InputError, needs_own_code
from ppo_core.spec.hub import SCHEME, is_repository

ADAPTER = "adapter_config.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def require_model(folder: Path, key: str = "model.path", what: str = "causal LM", given: str = "") -> None:
    """Raise InputError where this is no folder of a model, `what` the spec's `key` asks for and calls `given`."""
    _refuse_file_or_unreadable(folder)
    if not folder.is_dir():
        hint = f"; for a model on the Hugging Face Hub, write {SCHEME}{given}" if is_repository(given) else ""
        if folder.name == "reward-model" and folder.parent.parent.name == "runs":
            hint = _how_to_make(folder)
        raise InputError(
            f"there is no folder {folder}: give a path relative to the spec, or an absolute one, in {key}{hint}"
        )
    path = folder / "config.json"
    if not path.is_file():
        if (folder / ADAPTER).is_file():
            raise InputError(
                f"{folder} is an adapter ({ADAPTER}), not a full model: merge it into its base model first, with "
                f"peft's merge_and_unload and save_pretrained, and give that folder in {key}"
            )
        raise InputError(f"{folder} has no config.json: give the folder of a Hugging Face {what} in {key}")
    if path.read_bytes().startswith(BOM_UTF8):
        raise InputError(f"{path} begins with a byte order mark (BOM): save it as UTF-8 without one")
    if not _config(folder):
        raise InputError(f"{path} is not a JSON object: copy or download the file again")


def _how_to_make(folder: Path) -> str:
    """How to come by a reward model that is missing where `ppoflow reward-model` puts its models."""
    run, home, ours = folder.parent.name, folder.parents[2].resolve(), Settings().home.resolve()
    if home == ours:
        return f"; ppoflow reward-model SPEC --run {run} makes this one"
    return (
        f"; it would be made under another PPOFLOW_HOME than the present one ({ours}), by PPOFLOW_HOME={home} ppoflow "
        f"reward-model SPEC --run {run}: make it there, or name the folder of one that there is"
    )


def require_folder(folder: Path, key: str) -> None:
    """Raise InputError where there is none, as the spec's `key` names."""
    _refuse_file_or_unreadable(folder)
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}: give a path relative to the spec, or an absolute one, in {key}")


def check_model_folder(folder: Path, *, trust_remote_code: bool) -> list[str]:
    """By its config.json and the names of its files; what is wrong with what these hold, the engines find out."""
    _refuse_file_or_unreadable(folder)
    if not folder.is_dir():
        return []  # said where the folder is taken for an input
    _require_safetensors(folder)
    config = _config(folder)
    model_type = config.get("model_type")
    if "auto_map" not in config or trust_remote_code or not isinstance(model_type, str):
        return []
    if not transformers_may_know(model_type):
        raise needs_own_code(folder)
    return [
        f"the model in {folder} has custom code (auto_map), which does not run here: transformers' own class for "
        f"{model_type} is used instead"
    ]


def transformers_may_know(model_type: str) -> bool:
    """False only where the tables of the installed transformers do not have the type; to import them takes seconds."""
    found = find_spec("transformers")
    if found is None or found.origin is None:
        return True
    tables = list((Path(found.origin).parent / "models" / "auto").glob("*.py"))
    return not tables or any(f'"{model_type}"' in table.read_text(encoding="utf-8") for table in tables)


def _refuse_file_or_unreadable(folder: Path) -> None:
    """Raise InputError for a file, and for a folder that this user may not read, or a file in it."""
    try:
        folder.stat()
    except PermissionError:
        raise _unreadable(folder) from None
    except OSError:
        return  # it is not there
    if not folder.is_dir():
        raise InputError(f"{folder} is a file: give the folder that contains it, {folder.parent}")
    if not os.access(folder, os.R_OK | os.X_OK):
        raise _unreadable(folder)
    for path in sorted(folder.iterdir()):
        if path.is_file() and not os.access(path, os.R_OK):
            raise _unreadable(path)


def _unreadable(path: Path) -> InputError:
    return InputError(f"{path} cannot be read (Permission denied): give user {os.geteuid()} permission to read it")


def _require_safetensors(folder: Path) -> None:
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    pickles = [name for name in names if name.endswith(PICKLES)]
    if pickles and not any(name.endswith(".safetensors") for name in names):
        raise InputError(
            f"{folder} has its weights as pickle only ({', '.join(pickles[:3])}), which can run any code and is never "
            "loaded: use the model's safetensors files, or, if you trust it, convert it with transformers' "
            "from_pretrained and save_pretrained"
        )


def _config(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
