"""The forms of reward functions that users have from other trainers, told apart by the names of their parameters.

trl         reward(prompts, completions, completion_ids, **columns) -> list     (and any that is none of these)
verl        compute_score(data_source, solution_str, ground_truth, extra_info) -> float | {"score": float, ...}
verl batch  compute_score(data_sources, solution_strs, ground_truths, extra_infos) -> list of those
openrlhf    reward_func(queries, prompts, labels) -> tensor | {"rewards": tensor, "extra_logs": {name: tensor}}
verifiers   reward(prompt, completion, answer, info, state, **columns) -> float     (also without `completion`)
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from ppo_core.records import InputError
from ppo_core.scoring.reward import Sample, content_of
from ppo_core.scoring.spans import number_of

Arguments = dict[str, Any]
TOKENS = "completion_ids"
"""What a function in TRL's form gets if it names it: the token ids of each response."""


@dataclass(frozen=True)
class Form:
    """How a function is called: the parameter that tells it, whether once for each sample, what it always gets, which
    of that is the reference answer, and which of it an option may replace."""

    mark: str
    one_by_one: bool
    given: frozenset[str]
    answer: str = ""
    optional: frozenset[str] = frozenset()


TRL = Form("completions", False, frozenset({"prompts", "completions"}))
VERL_GIVEN = frozenset({"data_source", "solution_str", "ground_truth", "extra_info"})
VERL = Form("solution_str", True, VERL_GIVEN, "ground_truth", frozenset({"data_source", "extra_info"}))
VERL_BATCH = Form("solution_strs", False, frozenset(f"{name}s" for name in VERL.given), "ground_truths")
OPENRLHF = Form("queries", False, frozenset({"queries", "prompts", "labels"}), "labels")
VERIFIERS_GIVEN = frozenset({"prompt", "completion", "answer", "info", "state"})
VERIFIERS = Form("completion", True, VERIFIERS_GIVEN, "answer", frozenset({"info", "state"}))
FORMS = (TRL, VERL, VERL_BATCH, OPENRLHF, VERIFIERS)
ALIKE = 0.85
"""Of two names, one of which is a misspelt other one."""
KEPT = frozenset({TOKENS}).union(*(form.given - form.optional for form in FORMS))


def form_of(parameters: Mapping[str, inspect.Parameter]) -> Form:
    """The form that a function with these parameters has.

    TRL's names are plural, and no column has the name `prompt`; `state` may be a column, where others come by `**`.
    """
    for form in FORMS:
        if form.mark in parameters:
            return form
    if not {"prompts", TOKENS} & parameters.keys():
        others = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        if "prompt" in parameters or ("state" in parameters and not others):
            return VERIFIERS
    return TRL


def check_names(name: str, form: Form, options: Iterable[str]) -> None:
    """Raise InputError for an option with the name of what the form gives, and no option may replace."""
    given = sorted({*form.given, *((TOKENS,) if form is TRL else ())} - form.optional)
    for option in options:
        if option in given:
            raise InputError(
                f"the option {option} of the reward function {name} has the name of an argument that functions of its "
                f"form get anyway ({', '.join(given)}): leave it out, or rename it, with the parameter that reads it"
            )


def takes_option(parameters: Mapping[str, inspect.Parameter], option: str) -> bool:
    """Whether a function with these parameters takes it: also among all others, but for a misspelt name of its own."""
    own = set(takes(parameters))
    others = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    return option in own or (others and not get_close_matches(option, own - KEPT, n=1, cutoff=ALIKE))


def unknown_option(option: str, functions: Mapping[str, Mapping[str, inspect.Parameter]]) -> str:
    """The message that none of the functions, by their names with their parameters, takes an option."""
    lists = {name: [one for one in takes(found) if one not in KEPT] for name, found in functions.items()}
    there = "; ".join(f"{name} takes {', '.join(names) or 'no options'}" for name, names in lists.items())
    close = get_close_matches(option, [one for names in lists.values() for one in names], n=1)
    hint = f"; did you mean {close[0]}?" if close else ": leave it out, or add the parameter"
    return f"the option {option} is taken by no reward function that it is given to ({there}){hint}"


def takes(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    """The names of the arguments that a function takes by name."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [one.name for one in parameters.values() if one.kind in named]


def batch_arguments(form: Form, samples: Sequence[Sample], columns: Sequence[Arguments]) -> Arguments:
    """What a function that is called once gets, to write into as well: a list for each argument and each column."""
    if form is VERL_BATCH:
        rows = [one_by_one_arguments(VERL, sample, row) for sample, row in zip(samples, columns, strict=True)]
        return {**_lists(columns), **{f"{name}s": [row[name] for row in rows] for name in VERL.given}}
    lists = _lists(columns)
    if form is OPENRLHF:
        return {
            **lists,
            "queries": [_text(one.row.prompt) + one.response for one in samples],
            "prompts": [_text(one.row.prompt) for one in samples],
            "labels": [own(one.row.reference_answer) for one in samples],
        }
    return {
        **lists,
        "prompts": [own(one.row.prompt) for one in samples],
        "completions": [as_completion(one.row.prompt, one.response) for one in samples],
    }


def one_by_one_arguments(form: Form, sample: Sample, columns: Arguments) -> Arguments:
    """What a function that is called for each sample gets, to write into as well: no other call sees it."""
    row, columns = sample.row, own(columns)
    prompt, metadata, answer = own(row.prompt), own(row.metadata), own(row.reference_answer)
    if form is VERL:
        return {
            **columns,
            "data_source": metadata.get("data_source"),
            "solution_str": sample.response,
            "ground_truth": answer,
            "extra_info": metadata.get("extra_info", metadata),
        }
    known = {
        "prompt": prompt,
        "completion": as_completion(prompt, sample.response),
        "answer": answer,
        "info": metadata.get("info", metadata),
    }
    task = {"task": metadata["task"]} if "task" in metadata else {}
    return {**columns, **known, "state": {**known, **task}}


def scores_in(name: str, form: Form, returned: Any) -> Any:
    """What a function returned without what its form wraps it in. Raises InputError where the scores are missing."""
    if form is OPENRLHF and isinstance(returned, Mapping):
        if "rewards" not in returned:
            there = ", ".join(map(str, returned)) or "nothing"
            raise InputError(
                f"{name} returned a mapping without the key 'rewards' (it has: {there}): return "
                'the scores under it, as in {"rewards": [0.5, 1.0]}, or as a list'
            )
        return returned["rewards"]
    if form is VERL and isinstance(returned, Mapping):
        return returned.get("score", returned)
    if form is VERL_BATCH and isinstance(returned, Sequence) and not isinstance(returned, str | bytes):
        return [scores_in(name, VERL, one) for one in returned]
    return returned


def measures_in(name: str, form: Form, returned: Any, count: int) -> list[dict[str, float]]:
    """The numbers that a function returned beside its scores, of each of `count` samples; empty where it returns none.

    verl's mappings have them beside `score`, OpenRLHF's in `extra_logs`, a list for each name. Other values are left
    out. Raises InputError, in which `name` is the function's, where such a list has another length, or is none.
    """
    if form is OPENRLHF and isinstance(returned, Mapping) and isinstance(returned.get("extra_logs"), Mapping):
        listed = {str(key): _listed(name, key, values, count) for key, values in returned["extra_logs"].items()}
        return [_numbers(dict(zip(listed, row, strict=True))) for row in zip(*listed.values(), strict=True)]
    if form in (VERL, VERL_BATCH) and isinstance(returned, Sequence):
        rows = [{k: v for k, v in one.items() if k != "score"} if isinstance(one, Mapping) else {} for one in returned]
        return [_numbers(row) for row in rows] if any(rows) else []
    return []


def _listed(name: str, key: Any, values: Any, count: int) -> list[Any]:
    try:
        listed = list(values) if not isinstance(values, str | bytes | Mapping) else None
    except TypeError:  # a number, or a tensor of one
        listed = None
    if listed is None or len(listed) != count:
        found = f"{len(listed)} numbers" if listed is not None else f"one {type(values).__name__}, no list"
        raise InputError(
            f"{name} returned {found} as extra_logs[{key!r}] for {count} completions: return one number for each, or "
            "leave it out"
        )
    return listed


def _numbers(values: Mapping[Any, Any]) -> dict[str, float]:
    numbers = {
        str(name): float(value) if isinstance(value, bool) else number_of(value) for name, value in values.items()
    }
    return {name: number for name, number in numbers.items() if number is not None and math.isfinite(number)}


def as_completion(prompt: Any, text: str) -> Any:
    """Text for text prompts; for chats one assistant message."""
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]


def _lists(columns: Sequence[Arguments]) -> Arguments:
    """A list for each column that any row has."""
    names = sorted({name for row in columns for name in row})
    return {name: [own(row.get(name)) for row in columns] for name in names}


def own(value: Any) -> Any:
    """A copy of what a row holds, at any depth."""
    if isinstance(value, dict):
        return {key: own(inner) for key, inner in value.items()}
    if not isinstance(value, list):
        return value
    return [own(inner) if isinstance(inner, dict | list) else inner for inner in value]


def _text(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else "\n".join(map(content_of, prompt))
