"""A model's folder, by its config.json and the names of its files: in no time, without transformers or torch."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ppo_core.records import InputError, needs_own_code

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def require_model(folder: Path) -> None:
    """Raise InputError where this is no folder of a model."""
    if not folder.is_dir():
        raise InputError(
            f"there is no folder {folder}: give a path relative to the spec, or an absolute one, in model.path; for a "
            f"model of the hub, first: hf download {'/'.join(folder.parts[-2:])} --local-dir {folder}"
        )
    path = folder / "config.json"
    if not path.is_file():
        raise InputError(f"{folder} has no config.json: give the folder of a Hugging Face causal LM in model.path")
    if not _config(folder):
        raise InputError(f"{path} is no JSON object: take the file anew from where the model comes from")


def require_folder(folder: Path) -> None:
    """Raise InputError where there is none."""
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}: give a path relative to the spec, or an absolute one")


def check_model_folder(folder: Path, *, trust_remote_code: bool) -> list[str]:
    """By its config.json and the names of its files; what is wrong with what these hold, the engines find out."""
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
        f"the model in {folder} names code of its own (auto_map), which does not run here: transformers' own class for "
        f"{model_type} is used"
    ]


def transformers_may_know(model_type: str) -> bool:
    """False only where the tables of the installed transformers do not have the type; to import them takes seconds."""
    found = find_spec("transformers")
    if found is None or found.origin is None:
        return True
    tables = list((Path(found.origin).parent / "models" / "auto").glob("*.py"))
    return not tables or any(f'"{model_type}"' in table.read_text(encoding="utf-8") for table in tables)


def _require_safetensors(folder: Path) -> None:
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    pickles = [name for name in names if name.endswith(PICKLES)]
    if pickles and not any(name.endswith(".safetensors") for name in names):
        raise InputError(
            f"{folder} has its weights as pickle alone ({', '.join(pickles[:3])}), which can run any code and is never "
            "read: take the model's safetensors files, or convert it where you trust it, with transformers' "
            "from_pretrained and save_pretrained"
        )


def _config(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
