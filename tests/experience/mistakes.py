"""Mistakes that a new user makes, and what the command line must say to each: the value, the limit and the remedy."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.numpy import load_file, save_file

from tests.experience.meeting import Break, Mistake
from tests.experience.project import edit, edit_json, write_rows

NO_SUCH_SERVER = "http://127.0.0.1:9/api"


def set_key(text: str) -> tuple[str, ...]:
    """The command with one override."""
    return ("train", "spec.yaml", "--set", text)


def in_spec(old: str, new: str) -> Break:
    """Another text in the spec."""
    return lambda folder: edit(folder / "spec.yaml", old, new)


def in_file(name: str, text: str) -> Break:
    """A file with this text alone."""
    return lambda folder: (folder / name).write_text(text)


def without(name: str) -> Break:
    """A file that is missing."""
    return lambda folder: (folder / name).unlink()


def reward(body: str) -> Break:
    """A reward function with this body."""
    return in_file("rewards.py", f"def correct(prompts, completions, answer):\n    {body}\n")


def configured(**values: object) -> Break:
    """Another configuration of the model, whose weights stay."""
    return lambda folder: edit_json(folder / "model" / "config.json", **values)


def other_code(folder: Path) -> None:
    """A model that needs its own code."""
    edit_json(folder / "model" / "config.json", model_type="mine", auto_map={"AutoModelForCausalLM": "mine.Model"})


def as_pickle(folder: Path) -> None:
    """Weights that only pickle can read."""
    (folder / "model" / "model.safetensors").rename(folder / "model" / "pytorch_model.bin")


def a_shard_short(folder: Path) -> None:
    """A copy of a sharded model that was broken off."""
    weights = load_file(folder / "model" / "model.safetensors")
    first, last = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    names = sorted(weights)
    save_file({name: weights[name] for name in names[:3]}, folder / "model" / first, {"format": "pt"})
    places = {name: first if name in names[:3] else last for name in names}
    index = {"metadata": {}, "weight_map": places}
    (folder / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model" / "model.safetensors").unlink()


def many_small_heads(folder: Path) -> None:
    """Heads of 16, as tutorials make them to have a small model."""
    edit(folder / "spec.yaml", "  path: model\n", HEADS_OF_16)


def one_long_prompt(folder: Path) -> None:
    rows: list[dict[str, object]] = [{"prompt": "1+1=", "answer": "2"}] * 8
    write_rows(folder / "prompts.jsonl", [*rows, {"prompt": "1" + "+1" * 20 + "=", "answer": "1"}])


def one_without_answer(folder: Path) -> None:
    rows: list[dict[str, object]] = [{"prompt": "1+1=", "answer": "2"}] * 8
    write_rows(folder / "prompts.jsonl", [*rows, {"prompt": "2+1="}])


HEADS_OF_16 = """\
  tokenizer: model
  config: {model_type: llama, hidden_size: 64, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4,
           max_position_embeddings: 64}
"""
IN_SPECS = [
    Mistake("a spec that is not there", ("nowhere.yaml",), command=("train", "nowhere.yaml")),
    Mistake(
        "a misspelt key",
        ("rollout.temprature", "did you mean temperature?"),
        in_spec("rollout:", "rollout:\n  temprature: 0.7"),
    ),
    Mistake(
        "a misspelt section in an override",
        ("rolout", "did you mean rollout?"),
        command=set_key("rolout.temperature=1"),
    ),
    Mistake("text instead of a number", ("iterations", "many"), in_spec("iterations: 2", "iterations: many")),
    Mistake("a tab in YAML", ("spec.yaml", "line 4", "tab", "spaces"), in_spec("  train:", "\ttrain:")),
    Mistake(
        "minibatches that do not divide",
        ("update.num_minibatches=3", "8 responses", "[1, 2, 4, 8]"),
        command=set_key("update.num_minibatches=3"),
    ),
    Mistake(
        "a rate below zero", ("update.learning_rate", "greater than 0"), command=set_key("update.learning_rate=-1")
    ),
    Mistake("a cut distribution", ("top_p=0.9", "Set top_p: 1"), command=set_key("rollout.top_p=0.9")),
    Mistake(
        "bfloat16 without master weights",
        ("model.dtype=bfloat16", "set zero_stage to 1"),
        command=set_key("model.dtype=bfloat16"),
    ),
    Mistake(
        "a reward without its function",
        ("'rewards.py' is not a function", "path/to/file.py:function"),
        in_spec("rewards.py:correct", "rewards.py"),
    ),
    Mistake(
        "a spec for another command",
        ("spec.yaml is a spec for another command: ppoflow train spec.yaml",),
        command=("rlhf", "spec.yaml"),
    ),
    Mistake("a run's name with a space", ("my run", "letters"), command=("train", "spec.yaml", "--run", "my run")),
]
ON_THE_MACHINE = [
    Mistake(
        "a home that is a file",
        ("spec.yaml", "is a file", "PPOFLOW_HOME"),
        environment={"PPOFLOW_HOME": "{project}/spec.yaml"},
    ),
    Mistake(
        "a home that cannot be written to",
        ("/proc/ppoflow", "PPOFLOW_HOME"),
        environment={"PPOFLOW_HOME": "/proc/ppoflow"},
    ),
    Mistake(
        "a judge's key that is not there",
        ("PPOFLOW_REWARD_ENV names JUDGE_KEY", "set"),
        environment={"PPOFLOW_REWARD_ENV": "JUDGE_KEY"},
    ),
    Mistake(
        "Ray with a store on this disk",
        ("engines.backend=ray", "PPOFLOW_STORE=s3://"),
        command=set_key("engines.backend=ray"),
    ),
    Mistake(
        "a Prefect server that is not there",
        ("no Prefect server answers at http://127.0.0.1:9/api", "unset PREFECT_API_URL"),
        environment={"PREFECT_API_URL": NO_SUCH_SERVER},
    ),
    Mistake(
        "an address without http://",
        ("PREFECT_API_URL='127.0.0.1:4200'", "write http://HOST:PORT/api"),
        environment={"PREFECT_API_URL": "127.0.0.1:4200"},
    ),
    Mistake(
        "a run that nobody has begun",
        ("there is no run nobody", "runs there: none", "ppoflow train"),
        command=("resume", "nobody"),
    ),
    Mistake(
        "a policy of such a run",
        ("there is no run nobody", "runs there: none", "ppoflow train"),
        command=("sample", "nobody", "1+1="),
    ),
]
IN_DATA = [
    Mistake("prompts that are not there", ("there is no file", "prompts.jsonl"), without("prompts.jsonl")),
    Mistake(
        "CSV under the name of JSONL",
        ("prompts.jsonl is CSV", "JSONL", "rename it to prompts.csv"),
        in_file("prompts.jsonl", "prompt,answer\n1+1=,2\n"),
    ),
    Mistake(
        "one JSON array instead of lines",
        ("prompts.jsonl is one JSON array", "JSONL", "rename it to prompts.json"),
        in_file("prompts.jsonl", json.dumps([{"prompt": "1+1=", "answer": "2"}], indent=1)),
    ),
    Mistake("half a line", ("prompts.jsonl:2", "not JSON"), in_file("prompts.jsonl", '{"prompt": "1+1="}\n{"prom\n')),
    Mistake("an empty file", ("prompts.jsonl", "holds no rows"), in_file("prompts.jsonl", "")),
    Mistake(
        "prompts under another name",
        ("prompts.jsonl", "prompt=None", "the row has the columns answer, question"),
        in_file("prompts.jsonl", '{"question": "1+1=", "answer": "2"}\n'),
    ),
    Mistake("one prompt too long", ("42 tokens", "dataset.max_prompt_tokens=16"), one_long_prompt),
    Mistake("a row without its answer", ("needs the column 'answer'", "row 9"), one_without_answer),
    Mistake(
        "more evaluation than rows",
        ("evaluation.num_prompts=9", "8 rows", "lower it"),
        command=set_key("evaluation.num_prompts=9"),
    ),
]
IN_REWARDS = [
    Mistake("rewards that are not there", ("there is no file", "rewards.py"), without("rewards.py")),
    Mistake(
        "a function that is not there",
        ("rewards.py has no function 'right'", "(it has: correct)"),
        in_spec("rewards.py:correct", "rewards.py:right"),
    ),
    Mistake(
        "a package that is not installed",
        ("importing", "No module named 'sympify'", ": install it in the environment of ppoflow"),
        in_file("rewards.py", "import sympify\n\ndef correct(**columns): return []\n"),
    ),
    Mistake(
        "a reward that raises", ("KeyError: 'gold'", "rewards.py:2"), reward("return [{}['gold'] for _ in prompts]")
    ),
    Mistake("too few scores", ("returned 1 scores for 5 completions",), reward("return [1.0]")),
    Mistake("a score that is no number", ("score 0 is nan", "finite"), reward("return [float('nan')] * len(prompts)")),
]
IN_MODELS = [
    Mistake(
        "a name of the hub",
        ("Qwen/Qwen2.5-0.5B-Instruct", "write hf://Qwen/Qwen2.5-0.5B-Instruct"),
        in_spec("path: model", "path: Qwen/Qwen2.5-0.5B-Instruct"),
    ),
    Mistake("weights as pickle", ("pickle only", "pytorch_model.bin", "safetensors"), as_pickle),
    Mistake("no weights", ("model", "safetensors"), without("model/model.safetensors")),
    Mistake("half of the weights", ("model-00002-of-00002.safetensors",), a_shard_short),
    Mistake(
        "weights of another config.json",
        ("config.json", "model.embed_tokens.weight is [103, 64]", "Take both from the same model"),
        configured(hidden_size=128),
    ),
    Mistake(
        "no tokenizer",
        ("model", "tokenizer"),
        lambda folder: [path.unlink() for path in (folder / "model").glob("*token*")],
    ),
    Mistake("a model with custom code", ("needs custom code", "PPOFLOW_TRUST_REMOTE_CODE=1"), other_code),
    Mistake("heads of 16", ("16", "head"), many_small_heads),
    Mistake(
        "a response longer than the context",
        ("rollout.max_response_tokens=62", "context 64", "lower it"),
        command=set_key("rollout.max_response_tokens=62"),
    ),
    Mistake(
        "a cache too small for one response",
        ("engines.kv_cache_gib=1e-05", "raise it"),
        command=set_key("engines.kv_cache_gib=0.00001"),
    ),
]
MISTAKES = [*IN_SPECS, *ON_THE_MACHINE, *IN_DATA, *IN_REWARDS, *IN_MODELS]
