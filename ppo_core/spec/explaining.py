"""What is wrong in a spec, in a line for each problem: the key, its value, and what would be right."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

LONGEST_VALUE = 80
_KEYED = ("dict_type", "model_type", "model_attributes_type")
_MEANT = {
    "algorithm": "kind",
    "dataset": "train",
    "dynamic_sampling": "max_batches",
    "kl": "coef",
    "lora": "rank",
    "model": "path",
    "overlong": "buffer",
    "preferences": "train",
    "reference": "kind",
    "registry": "model",
    "reward": "function",
    "reward_model": "file",
    "run": "file",
    "sft": "data",
    "sources": "function",
    "train": "path",
}
"""The key that a plain value means, in place of a section or of an entry of a list of sections."""
_REQUIREMENTS = {
    "missing": "is required but missing",
    "extra_forbidden": "is an unknown key",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "finite_number": "must be a finite number",
    "literal_error": "must be {expected}",
    "string_pattern_mismatch": "must match {pattern}",
    "string_too_short": "must have at least {min_length} characters",
    "string_too_long": "must have at most {max_length} characters",
    "too_short": "must have at least {min_length} entries",
    "too_long": "must have at most {max_length} entries",
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "must be a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "must be a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "must be true or false"),
    **dict.fromkeys(("list_type", "tuple_type"), "must be a list, as in [a, b]"),
    **dict.fromkeys(_KEYED, "must be keys with values, as in {{key: value}}"),
    "string_type": "must be text",
}
_ELSEWHERE = {
    "dataset": "data",
    "dataset.train": "train_dataset train_files prompt_data",
    "dataset.evaluation": "eval_dataset val_files",
    "dataset.prompt_column": "prompt_key input_key",
    "dataset.answer_column": "label_key",
    "dataset.chat": "apply_chat_template",
    "dataset.max_prompt_tokens": "max_prompt_length prompt_max_len",
    "model.path": "model_name_or_path sft_model_path pretrain",
    "model.critic": "critic_pretrain",
    "model.lora.rank": "lora_r lora_rank",
    "model.lora.alpha": "lora_alpha",
    "algorithm.kind": "adv_estimator advantage_estimator",
    "algorithm.scale": "scale_rewards norm_adv_by_std_in_grpo",
    "reward.function": "reward_funcs custom_reward_function",
    "reward.sources": "reward_model_path reward_pretrain remote_rm_url",
    "iterations": "max_steps num_train_epochs total_episodes total_epochs total_training_steps num_episodes",
    "rollout.prompts_per_iteration update.num_minibatches": "train_batch_size",
    "rollout.prompts_per_iteration": "rollout_batch_size",
    "rollout.samples_per_prompt": "num_generations n n_samples_per_prompt",
    "rollout.max_response_tokens": (
        "max_completion_length response_length max_response_length generate_max_len max_new_tokens"
    ),
    "rollout.dynamic_sampling": "filter_groups dynamic_filtering",
    "advantages.kl": "kl_ctrl",
    "advantages.kl.coef": "kl_coef init_kl_coef",
    "advantages.kl.coef update.kl_loss_coef": "beta",
    "advantages.kl.estimator": "kl_estimator kl_penalty",
    "advantages.kl.target": "target_kl kl_target",
    "advantages.kl.horizon": "kl_horizon",
    "update.kl_loss_estimator": "kl_loss_type",
    "advantages.gae_lambda": "lam lambd",
    "advantages.truncated": "mask_truncated_completions",
    "update.learning_rate": "learning_rate lr actor_learning_rate",
    "update.critic_learning_rate": "critic_lr",
    "update.num_ppo_epochs": "num_iterations ppo_epochs max_epochs",
    "update.num_minibatches": "num_mini_batches ppo_mini_batch_size",
    "update.clip_low update.clip_high": "cliprange epsilon clip_ratio eps_clip eps_clip_low_high clip_range",
    "update.clip_low": "clip_ratio_low",
    "update.clip_high": "epsilon_high clip_ratio_high",
    "update.dual_clip": "clip_ratio_c",
    "update.value_clip": "cliprange_value",
    "update.entropy_coef": "entropy_coeff entropy_loss_coef",
    "update.aggregation": "loss_type loss_agg_mode",
    "update.max_grad_norm": "grad_clip max_norm",
    "update.schedule": "lr_scheduler_type lr_scheduler",
    "update.warmup_iterations": "warmup_steps lr_warmup_steps",
    "update.critic_warmup_iterations": "critic_warmup freezing_actor_steps",
    "training.microbatch_size": "per_device_train_batch_size ppo_micro_batch_size_per_gpu micro_train_batch_size",
    "training.microbatch_tokens": "ppo_max_token_len_per_gpu",
    "training.num_ranks": "n_gpus_per_node",
    "training.compute_dtype": "bf16",
    "training.activation_checkpointing": "gradient_checkpointing enable_gradient_checkpointing",
    "engines.kv_cache_gib": "vllm_gpu_memory_utilization gpu_memory_utilization",
    "engines.tensor_parallel_size": "vllm_tensor_parallel_size tensor_model_parallel_size",
    "engines.rollout_engines": "vllm_num_engines",
    "evaluation.every": "eval_steps test_freq",
    "checkpoint.every": "save_steps save_freq",
    "checkpoint.keep_last": "save_total_limit",
    "name": "experiment_name project_name",
}
OTHER_NAMES = {name: keys.split() for keys, names in _ELSEWHERE.items() for name in names.split()}
"""What TRL, verl and OpenRLHF call settings, with the keys of a run that are meant: as in docs/hyperparameters.md."""
_GENERAL = re.compile(
    "alias|coef|column|data|decay|every|evaluation|folder|hub_commits|kind|metric|model|name|path|train|weights"
)
"""Names of keys that say too little to be looked for in other sections."""
_MEMBER = re.compile(r"str|int|float|bool|list|constrained-\w+|[a-z]+(-[a-z]+)*\[.*\]")
"""How pydantic names the members of a union that it distinguishes by types."""


def explain(cls: type[BaseModel], error: ValidationError) -> list[str]:
    """One line per problem: the key, what is wrong with which value, and what would be right."""
    lines: list[tuple[str, str]] = []
    errors = error.errors()
    for item in errors:
        place = _place(cls, item["loc"])
        where, kind, asked = place.key, item["type"], requirement(item)
        written = _as_section(place, item["input"]) if kind in _KEYED else ""
        asked = "must be keys with values" if written else asked
        subject = f"{where}={shown(item['input'])}: must be "
        if kind == "extra_forbidden" and (entry := _entry(cls, item["loc"], errors)):
            if item["loc"][-1] == "kind":
                lines.append((f"{where}: rewards with a kind are listed", f": reward: {{sources: [{entry}]}}"))
        elif kind == "extra_forbidden":
            lines.append((f"{where}: unknown key", _suggestion(cls, item["loc"], item["input"])))
        elif kind == "missing":
            lines.append((f"{where}: {asked}", place.meaning()))
        elif kind == "union_tag_invalid":
            lines.append((f"{where}.kind={item['ctx']['tag']!r}", f": choose one of {item['ctx']['expected_tags']}"))
        elif kind == "union_tag_not_found":
            kinds = ", ".join(repr(model.model_fields["kind"].default) for model in place.models)
            lines.append((f"{where}.kind: is required but missing", f": choose one of {kinds}"))
        elif kind == "value_error":
            lines.append((f"{where}: {asked}" if where else asked, ""))
        elif lines and lines[-1][0].startswith(subject):  # of a union, which wants one thing or another
            said, remedy = lines[-1]
            lines[-1] = f"{said}, or {asked.removeprefix('must be ')}", written or remedy
        else:
            remedy = place.meaning() if kind == "string_pattern_mismatch" else place.default()
            lines.append((f"{where}={shown(item['input'])}: {asked}", written or remedy))
    return [text + remedy for text, remedy in lines]


def _as_section(place: _Place, value: Any) -> str:
    """What to write in place of a plain value, where one key of the section is known to be meant."""
    name, entry, _ = place.key.rpartition(".")[2].partition("[")
    kinds = [model.model_fields["kind"].default for model in place.models if "kind" in model.model_fields]
    key = "kind" if value in kinds else _MEANT.get(name)
    if name == "function" and isinstance(value, list) and value and all(isinstance(one, str) for one in value):
        text = _keyed(dict.fromkeys(value, 1))
    elif key is not None and isinstance(value, str | int | float) and not isinstance(value, bool):
        text = _keyed({key: value})
    else:
        return ""
    if kinds and key == "kind" and value not in kinds:
        return f": choose one of {', '.join(map(repr, kinds))}, as in {name}: {_keyed({key: kinds[0]})}"
    return f": write {'-' if entry else f'{name}:'} {text}"


def _entry(cls: type[BaseModel], location: tuple[int | str, ...], errors: list[ErrorDetails]) -> str:
    """The unknown keys beside this one where they, with a kind, are those of an entry of the section's `sources`."""
    section = location[:-1]
    keys = {
        one["loc"][-1]: one["input"]
        for one in errors
        if one["type"] == "extra_forbidden" and one["loc"][:-1] == section
    }
    listed = any("sources" in model.model_fields for model in _place(cls, section).models)
    return _keyed(keys) if listed and "kind" in keys else ""


def _keyed(section: Mapping[Any, Any]) -> str:
    """A section as one writes it in one line."""
    return f"{{{_cut(', '.join(f'{key}: {value}' for key, value in section.items()))}}}"


def requirement(item: ErrorDetails) -> str:
    """What pydantic asks of a value that it refuses, in plain words."""
    kind, limits = item["type"], {name: _number(value) for name, value in item.get("ctx", {}).items()}
    if kind in ("string_too_short", "too_short") and limits["min_length"] == "1":
        return "must not be empty"
    words = _REQUIREMENTS.get(kind)
    if words is not None:
        return words.format(**limits)
    return item["msg"].removeprefix("Value error, ").replace("Input should be", "must be", 1)


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def shown(value: Any) -> str:
    """A value, cut where it is long."""
    return _cut(repr(value))


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 1]}…"


def _suggestion(cls: type[BaseModel], location: tuple[int | str, ...], value: Any) -> str:
    """What an unknown key may mean: keys that are surely meant, or one like it and all keys of its section."""
    section, name = _place(cls, location[:-1]), str(location[-1])
    known = list(section.models[0].model_fields) if section.models else []
    if "[" not in section.key and (meant := _meant(cls, f"{section.key}.".lstrip("."), known, name, value)):
        return f"; did you mean {' or '.join(meant)}?"
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6 if section.key else 0.75)
    hint = f"; did you mean {close[0]}?" if close else ""
    if difflib.get_close_matches(name, known, cutoff=0.8):
        return hint
    return f"{hint} (known: {', '.join(known)})" if known else hint


def _meant(cls: type[BaseModel], above: str, known: list[str], name: str, value: Any) -> list[str]:
    """The keys that other trainers call so, and those that have this name in other sections."""
    others, keys = OTHER_NAMES.get(name, []), _keys([cls])
    found = [above + last for last in (key.rpartition(".")[2] for key in others) if last in known]
    found += [key for key in keys if key.removeprefix("run.") in others]
    if not _GENERAL.fullmatch(name) and above + name not in keys:
        alike = [key for key in keys if key.rpartition(".")[2] == name]
        found += [key for key in alike if keys[key] or not isinstance(value, Mapping)]
    return [key if "." in key or not above else f"{key} (at the top level)" for key in dict.fromkeys(found)]


def _keys(models: list[type[BaseModel]], above: str = "") -> dict[str, bool]:
    """All keys below these sections but those of entries of lists, and which of them are sections."""
    found: dict[str, bool] = {}
    for model in models:
        for name, field in model.model_fields.items():
            inner = _models_in(field.annotation, entries=False)
            found |= {f"{above}{name}": bool(inner), **_keys(inner, f"{above}{name}.")}
    return found


class _Place(NamedTuple):
    """Where in a document a problem is: its key there, the field of that key, and the sections that may stand there."""

    key: str
    field: FieldInfo | None
    models: list[type[BaseModel]]

    def meaning(self) -> str:
        """What the field is for."""
        return f" ({self.field.description})" if self.field is not None and self.field.description else ""

    def default(self) -> str:
        """The field's default, where that is a plain value."""
        value = None if self.field is None else self.field.default
        shown = str(value).lower() if isinstance(value, bool) else value
        return f" (default: {shown})" if isinstance(shown, int | float | str) else ""


def _place(cls: type[BaseModel], location: tuple[int | str, ...]) -> _Place:
    """The place at pydantic's `location`, which also names the members of unions: the document has none of those."""
    key, field = "", None
    models: list[type[BaseModel]] = [cls]
    for part in location:
        if isinstance(part, int):
            key, field = f"{key}[{part}]", None
            continue
        kinds = [model for model in models if "kind" in model.model_fields] if len(models) > 1 else []
        meant = [model for model in kinds if model.model_fields["kind"].default == part]
        fields = [model.model_fields[part] for model in models if part in model.model_fields]
        if meant or (not fields and _MEMBER.fullmatch(part)):
            models = meant
            continue
        key, field = f"{key}.{part}" if key else part, fields[0] if fields else None
        models = [model for found in fields for model in _models_in(found.annotation)]
    return _Place(key, field, models)


def _models_in(annotation: Any, *, entries: bool = True) -> list[type[BaseModel]]:
    """The sections that a type allows, those of `entries` of lists among them."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if not entries and get_origin(annotation) is tuple:
        return []
    return [model for part in get_args(annotation) for model in _models_in(part, entries=entries)]
