"""What the installed vLLM can do, read out of its source: importing it takes seconds."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ppo_core.records import InputError

CPU_BACKEND = ("v1", "attention", "backends", "cpu_attn.py")
REGISTRY = ("model_executor", "models", "registry.py")
GENERATING = ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS", "_TRANSFORMERS_SUPPORTED_MODELS")


def check_architecture(model: Any) -> None:
    """Raise InputError for a model of transformers that vLLM neither has nor can run by transformers' own code.

    It need have no weights. What code of its own makes, vLLM itself has to judge, as where its source says nothing.
    """
    made_by, known = type(model), architectures()
    names = {made_by.__name__, *(model.config.architectures or ())}
    if not known or names & known or not made_by.__module__.startswith("transformers."):
        return
    if not (made_by.is_backend_compatible() or made_by._can_set_attn_implementation()):
        raise InputError(
            f"vLLM has no {made_by.__name__} (model_type={model.config.model_type}), and cannot run transformers' own: "
            "take a model of another type, such as llama or qwen2"
        )


def architectures() -> frozenset[str]:
    """The names of the causal LMs that it has; none at all where they are not found."""
    names = set[str]()
    for node in _parsed(*REGISTRY).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            targets = {target.id for target in node.targets if isinstance(target, ast.Name)}
            if targets.intersection(GENERATING):
                names.update(str(key.value) for key in node.value.keys if isinstance(key, ast.Constant))
    return frozenset(names)


def cpu_head_sizes() -> list[int]:
    """The sizes of attention heads that it takes on a CPU; none at all where they are not found."""
    for node in ast.walk(_parsed(*CPU_BACKEND)):
        if isinstance(node, ast.FunctionDef) and node.name == "get_supported_head_sizes":
            return _returned(node)
    return []


def _parsed(*place: str) -> ast.Module:
    found = find_spec("vllm")
    for folder in [] if found is None else found.submodule_search_locations or []:
        if (path := Path(folder, *place)).is_file():
            return ast.parse(path.read_bytes())
    return ast.Module([], [])


def _returned(function: ast.FunctionDef) -> list[int]:
    """The list of numbers that a function consists of returning."""
    last = function.body[-1]
    if not isinstance(last, ast.Return) or not isinstance(last.value, ast.List):
        return []
    numbers = [item.value for item in last.value.elts if isinstance(item, ast.Constant)]
    return [number for number in numbers if isinstance(number, int)]
