"""Loads poisoned artifacts by every road that engines take, and prints what Python executed for each of them.

`python -m tests.ppo_core.training.programs.poison_program DIR`. An audit hook sees what is unpickled, run, imported or
started; the control at the end proves that it would see the poison work.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from ppo_core.data.tables import (
    longest_prompt,
    read_prompts,
    read_rollouts,
    read_scores,
    write_rollouts,
    write_scores,
)
from ppo_core.data.tokenization import encode_prompt, load_tokenizer, model_config, stop_token_ids
from ppo_core.models.loading import load_critic, load_policy
from ppo_core.records import PromptRow, RolloutRow, ScoreRow
from ppo_core.training.checkpoint import write_start
from ppo_core.training.checkpoint_checks import optimizer_shards, require_network
from ppo_core.training.experience import Experience
from ppo_core.training.state import read_state
from tests.ppo_core.tiny_policies import make_tokenizer
from tests.ppo_core.training.update_cases import make_experience, save_experience
from tests.ppo_core.written_tables import write_prompts

EVIL = "evil_by_artifact"
SIGN = "executed"
CODE = f"open({SIGN!r}, 'w').close()\nclass Evil:\n    pass\n"
JINJA = "{{ cycler.__init__.__globals__.os.system('touch executed') }}"
NAMED = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM", "AutoModel"), f"{EVIL}.Evil")


class Bomb:
    """Unpickled, it runs a command."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {SIGN}",)


PICKLE = pickle.dumps(Bomb())


def as_pickle(name: str) -> Callable[[Path], None]:
    """A pickle where another file was."""

    def poison(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_bytes(PICKLE)

    return poison


def only_bin(folder: Path) -> None:
    """Weights as torch pickled them once."""
    (folder / "policy" / "model.safetensors").unlink()
    as_pickle("policy/pytorch_model.bin")(folder)


def with_code(name: str, **entries: Any) -> Callable[[Path], None]:
    """A JSON file that names code which lies beside it."""

    def poison(folder: Path) -> None:
        file = folder / "policy" / name
        document = json.loads(file.read_text()) if file.is_file() else {}
        file.write_text(json.dumps({**document, **entries}))
        (file.parent / f"{EVIL}.py").write_text(CODE)

    return poison


def custom_generate(folder: Path) -> None:
    """Code that `generate` of transformers may fetch from a model's folder."""
    (folder / "policy" / "custom_generate").mkdir()
    (folder / "policy" / "custom_generate" / "generate.py").write_text(CODE)


def chat_template(folder: Path) -> None:
    """What Jinja runs where it is not in a sandbox."""
    (folder / "policy" / "chat_template.jinja").write_text(JINJA)


def python_type(folder: Path) -> None:
    """A column of a type that older readers unpickle."""
    table = pq.read_table(folder / "rollouts.parquet")
    field = pa.field("x", pa.int32(), metadata={"ARROW:extension:name": "arrow.py_extension_type"})
    poisoned = field.with_metadata({**field.metadata, "ARROW:extension:metadata": PICKLE})
    columns = [*table.columns, pa.chunked_array([[1] * len(table)], pa.int32())]
    schema = pa.schema([*table.schema, poisoned])
    pq.write_table(pa.table(columns, schema=schema), folder / "rollouts.parquet")


POISONS: dict[str, Callable[[Path], None]] = {
    **{
        f"pickle as {name}": as_pickle(name)
        for name in (
            "policy/model.safetensors",
            "critic/model.safetensors",
            "critic/value_head.safetensors",
            "optimizer/policy-00000.safetensors",
            "state.json",
            "policy/config.json",
            "policy/tokenizer.json",
            "policy/tokenizer_config.json",
            "policy/generation_config.json",
            "policy/pytorch_model.bin",
            "policy/adapter_model.bin",
            "experience.safetensors",
            "rollouts.parquet",
            "scores.parquet",
            "train.parquet",
        )
    },
    "only a torch pickle": only_bin,
    "config names code": with_code("config.json", auto_map=NAMED),
    "config of an unknown type names code": with_code("config.json", auto_map=NAMED, model_type="evil"),
    "tokenizer names code": with_code(
        "tokenizer_config.json", tokenizer_class="Evil", auto_map={"AutoTokenizer": [f"{EVIL}.Evil", f"{EVIL}.Evil"]}
    ),
    "code for generate": custom_generate,
    "chat template runs a command": chat_template,
    "parquet of a python type": python_type,
}


def healthy(folder: Path) -> None:
    """A checkpoint, rollouts, a dataset."""
    tokenizer = make_tokenizer(chat=True)
    tiny = LlamaConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1, vocab_size=70)
    model = AutoModelForCausalLM.from_config(tiny)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    write_start(folder, model, weights, tokenizer, identity="x", networks=("policy", "critic"), dtype="float32")
    write_prompts(folder / "train.parquet", [PromptRow("a", "w1", [5], None, {})])
    write_rollouts(folder / "rollouts.parquet", [RolloutRow("a", 0, [5], [6], "w2", [-1.0], "length")])
    write_scores(folder / "scores.parquet", [ScoreRow("a", 0, 1.0, {"right": 1.0}, False, None)])
    save_experience(make_experience(), experience := folder.with_name("experience"))
    shutil.copytree(experience, folder, dirs_exist_ok=True)
    (folder / "optimizer").mkdir()
    save_file({"exp_avg/x": torch.zeros(1)}, folder / "optimizer" / "policy-00000.safetensors")


def roads(folder: Path) -> dict[str, Callable[[], object]]:
    """Everything that engines do with files from the store."""
    policy = folder / "policy"
    return {
        "policy's files": lambda: require_network(folder, "policy"),
        "critic's files": lambda: require_network(folder, "critic"),
        "policy of a checkpoint": lambda: load_policy(policy, dtype="float32", exact=True),
        "load_policy": lambda: load_policy(policy, dtype="float32"),
        "load_critic": lambda: load_critic(folder / "critic", dtype="float32"),
        "optimizer": lambda: optimizer_shards(folder, "policy", {"exp_avg/x": (1,)}),
        "state": lambda: read_state(folder),
        "tokenizer": lambda: load_tokenizer(policy),
        "chat": lambda: encode_prompt(load_tokenizer(policy), [{"role": "user", "content": "w1"}]),
        "stop": lambda: stop_token_ids(load_tokenizer(policy), policy),
        "config": lambda: model_config(str(policy), None),
        "experience": lambda: Experience.load(folder),
        "rollouts": lambda: read_rollouts(folder / "rollouts.parquet"),
        "scores": lambda: read_scores(folder / "scores.parquet"),
        "prompts": lambda: read_prompts(folder / "train.parquet"),
        "longest prompt": lambda: longest_prompt(folder / "train.parquet"),
    }


def main(home: Path) -> None:
    """Try all, then the control."""
    seen: list[str] = []
    watched = ("os.system", "pickle.find_class", "subprocess.Popen", "os.exec", "os.posix_spawn")

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in watched:
            seen.append(f"{event} {arguments[:2]!r}"[:200])
        elif event == "exec" and "/poisoned/" in file_of(arguments[0]):
            seen.append(f"exec {arguments[0]!r}"[:200])
        elif event == "import" and EVIL in str(arguments[0]):
            seen.append(f"import {arguments[0]}")

    healthy(sound := home / "sound")
    refused_sound = [name for name, road in roads(sound).items() if fails(road)]
    sys.addaudithook(hook)
    found: dict[str, Any] = {}
    for name, poison in POISONS.items():
        folder = home / "poisoned" / name.replace("/", " ")
        shutil.copytree(sound, folder)
        os.chdir(folder)
        poison(folder)
        seen.clear()
        refused = [road for road, call in roads(folder).items() if fails(call)]
        found[name] = {"executed": [*seen], "sign": Path(SIGN).exists(), "refused": sorted(refused)}
    os.chdir(home)
    seen.clear()
    pickle.loads(PICKLE)
    sys.path.insert(0, str(home / "poisoned" / "config names code" / "policy"))
    importlib.import_module(EVIL)
    print(json.dumps({"found": found, "control": [*seen], "sign": Path(SIGN).exists(), "sound": refused_sound}))


def file_of(code: Any) -> str:
    """The file that a code object comes from."""
    return str(code.co_filename) if isinstance(code, type(main.__code__)) else ""


def fails(call: Callable[[], object]) -> bool:
    """Whether it raises."""
    try:
        call()
    except Exception:
        return True
    return False


if __name__ == "__main__":
    main(Path(sys.argv[1]))
