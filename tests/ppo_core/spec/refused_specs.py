"""Specs that cannot be run, each as what it changes in the smallest one, with the words in which it is refused."""

from __future__ import annotations

from typing import Any

SMALLEST = {
    "dataset": {"train": "prompts.jsonl"},
    "model": {"path": "folder"},
    "reward": {"function": "reward.py:correct"},
}


def rule(kind: str, **keys: Any) -> dict[str, Any]:
    """A spec with this reward."""
    return {"reward": {"sources": [{"kind": kind, **keys}]}}


NO_KEYS = {
    **dict.fromkeys(
        ("tokenizer", "max_tokens", "key_column", "answer_key", "stop_token", "author", "key", "image_token", "id_key"),
        "x",
    ),
    **{"token": 3, "auth": False, "keys": ["a"], "inner": {"json_key": "a"}},
}
"""Options of a reward that are taken, whatever they sound like."""
OFFLOADED = {"engines": {"offload_reference": True}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({**OFFLOADED, "update": {"kl_loss_coef": 0.1, "kl_loss_estimator": "full"}}, "each minibatch asks .* set offload"),
    ({**OFFLOADED, "model": {"path": "folder", "lora": {"rank": 4}}}, "reference is the policy .* set it to false"),
    *[
        (changes, rf"spec.yaml: {key}: unknown key; did you mean {meant}\?$")
        for changes, key, meant in (
            ({"learning_rate": 1e-6}, "learning_rate", "update.learning_rate or sft.learning_rate"),
            ({"advantages": {"kl_coef": 0.1}}, "advantages.kl_coef", "advantages.kl.coef"),
            ({"rollout": {"n": 4}}, "rollout.n", "rollout.samples_per_prompt"),
            ({"update": {"lr": 1}}, "update.lr", "update.learning_rate"),
            ({"cliprange": 0.2}, "cliprange", "update.clip_low or update.clip_high"),
            ({"update": {"beta": 1}}, "update.beta", "update.kl_loss_coef or advantages.kl.coef"),
            ({"tensor_parallel_size": 2}, "tensor_parallel_size", "engines.tensor_parallel_size"),
            ({"update": {"total_epochs": 2}}, "update.total_epochs", r"iterations \(at the top level\)"),
            ({"data": {"train_files": "a"}}, "data", "dataset"),
            ({"kl": {"coef": 0}}, "kl", "advantages.kl"),
        )
    ],
    ({"algorithm": "trpo"}, r"algorithm='trpo': .*: choose one of 'ppo', 'vapo', .*, as in algorithm: {kind: ppo}$"),
    ({"advantages": {"reference": "moving"}}, "advantages.reference='moving': .*: choose one of 'fixed'"),
    ({"dataset": {"train": "a", "path": "b"}}, r"dataset.path: unknown key \(known: train, evaluation, "),
    ({"critic": {"lr": 1}}, r"critic: unknown key \(known: name, "),
    *[
        (changes, rf"(^|: ){key}: must be (text, or )?keys with values: write {remedy}$")
        for changes, key, remedy in (
            ({"algorithm": "grpo"}, "algorithm='grpo'", "algorithm: {kind: grpo}"),
            ({"model": "good"}, "model='good'", "model: {path: good}"),
            ({"dataset": "rows.jsonl"}, "dataset='rows.jsonl'", "dataset: {train: rows.jsonl}"),
            ({"reward": "r.py:correct"}, "reward='r.py:correct'", "reward: {function: r.py:correct}"),
            ({"advantages": {"kl": 0.1}}, "advantages.kl=0.1", "kl: {coef: 0.1}"),
            ({"advantages": {"kl": "adaptive"}}, "advantages.kl='adaptive'", "kl: {kind: adaptive}"),
            ({"advantages": {"reference": "ema"}}, "advantages.reference='ema'", "reference: {kind: ema}"),
            ({"reward": {"sources": ["r.py:f"]}}, r"reward.sources\[0\]='r.py:f'", "- {function: r.py:f}"),
            ({"reward": {"sources": ["number"]}}, r"reward.sources\[0\]='number'", "- {kind: number}"),
            ({"dataset": {"train": ["a"]}}, r"dataset.train\[0\]='a'", "- {path: a}"),
            ({"reward": {"function": ["a:f", "b:g"]}}, r"reward.function=.*'\]", "function: {a:f: 1, b:g: 1}"),
            ({"model": {"path": "a", "lora": 8}}, "model.lora=8", "lora: {rank: 8}"),
        )
    ],
    ({"model": {"path": "a", "lora": True}}, "model.lora=True: must be keys with values, as in {key: value}$"),
    (
        {"training": {"microbatch_tokens": 559}},
        r"microbatch_tokens=559 is less than the longest sequence: 560 tokens .* Raise it to at least 560",
    ),
    (
        {"dataset": {"train": "s3://bucket/rows"}},
        "s3://bucket/rows is a URL, .* hf://OWNER/NAME .* download anything else first",
    ),
    ({"model": {"path": "https://hub/owner/name"}}, "model.path.*https://hub/owner/name is a URL"),
    (
        {"model": {"path": "hf://gpt2"}},
        "model.path: hf://gpt2 is not a valid name on the Hugging Face Hub: write hf://OWNER/NAME",
    ),
    (
        {"model": {"path": "hf://owner/name:onnx"}},
        "hf://owner/name:onnx names onnx in a repository, .* leave :onnx out",
    ),
    (
        {"dataset": {"train": "hf://datasets/owner/name/data/train.csv"}},
        "is not a valid name on the Hugging Face Hub: .* as in hf://owner/name:data/train.csv",
    ),
    ({"dataset": {"evaluation": "hf://owner/name@v1:../x"}}, "hf://owner/name@v1:../x points outside its repository"),
    ({"dataset": {"train": "a", "curriculum": {"column": "level"}}}, "curriculum.prompts: is required but missing"),
    *[
        (
            {"dataset": {"train": "a", "curriculum": {"column": name, "prompts": 4}}},
            f"dataset: curriculum.column={name} is {name}_column too, which is not kept with the other columns",
        )
        for name in ("answer", "prompt")
    ],
    ({"dataset": {"train": "a", "drop_columns": ["answer"]}}, "drop_columns has 'answer', which another key .* names"),
    ({"dataset": {"train": "a", "prompt_column": "answer"}}, "prompt_column and answer_column are both 'answer'"),
    ({"dataset": {"train": "a", "prompt_column": "q", "answer_column": "prompt"}}, "rename the column prompt in the"),
    (
        {"dataset": {"train": "a", "evaluation": "b", "evaluation_fraction": 0.1}},
        "dataset: evaluation=b and evaluation_fraction=0.1 both define the held-out prompts: remove one",
    ),
    ({"dataset": {"train": "a", "evaluation_fraction": 0.6}}, "evaluation_fraction=0.6: must be at most 0.5"),
    ({"dataset": {"train": []}}, r"dataset.train: the list of sources is empty: name at least one"),
    (
        {"dataset": {"train": [{"path": "a", "weight": 1}, {"path": "b"}]}},
        "train: b has no weight, but other sources do: give",
    ),
    ({"dataset": {"train": [{"path": "a", "weight": 0}]}}, "dataset.train.0..weight=0: must be greater than 0"),
    ({"rolout": {}}, r"rolout: unknown key; did you mean rollout\?$"),
    ({"rollout": {"temprature": 1}}, r"rollout.temprature: unknown key; did you mean temperature\?$"),
    ({"rollout": {"max_tokens": 1}}, r"max_tokens: unknown key; did you mean max_response_tokens\? \(known: prompts_"),
    ({"updates": {}}, r"updates: unknown key; did you mean update\?$"),
    ({"evaluate": {}}, r"evaluate: unknown key; did you mean evaluation\? \(known: name, "),
    ({"generation": {}}, r"generation: unknown key \(known: name, "),
    ({"reward": {}}, "reward: no reward is named: give at least one function, .* or a list of `sources`"),
    (
        {"reward": {"function": {"reward.py:correct": 0}}},
        "reward: every reward has weight 0, so every score would be 0",
    ),
    ({"reward": {"sources": [{"kind": "numbr"}]}}, "reward.sources.0..kind='numbr': choose one of 'function', '"),
    ({"reward": {"sources": [{"weight": 1}]}}, "sources.0..kind: is required but missing: choose one of 'func"),
    ({"reward": {"sources": [{"kind": "regex"}]}}, "reward.sources.0..pattern: is required but missing"),
    (
        {"reward": {"sources": [{"kind": "regex", "pattern": "("}]}},
        r"'\(' is not a valid regular expression \(missing \), unterm",
    ),
    ({"reward": {"sources": [{"kind": "number", "tolerence": 1}]}}, "tolerence: unknown key; did you mean tolerance"),
    (
        {"reward": {"sources": [{"kind": "number"}] * 2}},
        r"two rewards have the same name \(number, number\).* another `name`",
    ),
    ({"reward": {"sources": {"kind": "number"}}}, "reward.sources={'kind': 'number'}: must be a list, as in .a, b.$"),
    *[
        (
            {"reward": reward},
            rf": reward.kind: rewards with a kind are listed: reward: {{sources: \[{entry}\]}}$",
        )
        for reward, entry in (
            ({"kind": "number"}, "{kind: number}"),
            ({"pattern": "a", "kind": "regex", "max_failed_fraction": 0}, "{kind: regex, pattern: a}"),
        )
    ],
    (rule("length"), "no length is given: set min, max or both, or target with a slope"),
    (rule("length", min=5, max=4), "min=5 is above max=4, so no length can score 1"),
    (rule("length", target=5, slope=2, min=1), "target=5 is the one length that scores 1: leave out min and max, or t"),
    (rule("length", target=5), "target=5 with slope=0 scores 1 at exactly that length only, else 0: set slope"),
    (rule("format"), r"no format is given: set pattern, or tags, for example \[think, answer\]"),
    (rule("format", pattern="("), r"'\(' is not a valid regular expression"),
    (rule("format", tags=["<think>"]), "'<think>' is not a tag name: write think for <think>...</think>"),
    (rule("format", tags=["a", "a"]), "tags a, a: name each tag once"),
    (rule("json_schema"), "reward.sources.0..json_schema: is required but missing"),
    (rule("json_schema", json_schema={"type": "objct"}), "not a valid JSON Schema, at type: 'objct' is not valid"),
    (rule("json_schema", json_schema={"pattern": "("}), r"not a valid JSON Schema, at pattern: '\(' is not a 'regex'"),
    (rule("json_schema", json_schema={"$schema": "http://a/b"}), r"\$schema='http://a/b' is not a known draft"),
    (
        rule("json_schema", json_schema={"items": {"$ref": "#/$defs/a"}}),
        r"its \$ref '#/\$defs/a' cannot be resolved: write #/\$defs/NAME, and add that definition to the schema",
    ),
    (
        rule("json_schema", json_schema={"$ref": "http://10.0.0.1/a"}),
        r"its \$ref 'http://10.0.0.1/a' cannot be resolved",
    ),
    (rule("unit_tests", memory_mib=10), "memory_mib=10: must be at least 64"),
    (
        {**rule("unit_tests", timeout_s=60), "engines": {"reward_timeout_s": 60}},
        "timeout_s=60 of the reward unit_tests is not below engines.reward_timeout_s=60, after which the scoring",
    ),
    (
        {"reward": {"sources": [{"function": "a.py:f", "timeout_s": 300}]}},
        "timeout_s=300 of the reward f is not below engines.reward_timeout_s=300, .*: lower the first, or raise",
    ),
    ({"iterations": "many"}, "iterations='many': must be a whole number"),
    ({"seed": True}, "seed=True: must be a whole number"),
    *[
        ({"registry": {"metric": metric}}, f"registry.metric={metric} is measured by no run {why}")
        for metric, why in {
            "evalution/score": r".metrics begin with advantage/, .*, update/.; did you mean evaluation/score\?",
            "polcy/entropy": r".*; did you mean policy/entropy\?",
            "foo": ".*: set it to evaluation/score, or to one of docs/metrics.md",
            "policy/": ".metrics begin with",
            "score": ".metrics begin with",
            "score/corect": r".of score/… there are mean, .*, correct.; did you mean score/correct\?",
            "score/nope": ".of score/… there are mean, std, .*, correct.",
        }.items()
    ],
    ({"registry": {"metric": "evaluation/score/correct"}}, "is not measured by an evaluation: set it to one of eval"),
    ({"registry": {"alias": "Latest"}}, r"registry.alias: 'Latest': MLflow reserves latest, v1, .* choose another"),
    ({"registry": {"alias": "v12"}}, r"registry.alias: 'v12': MLflow reserves"),
    (
        {"registry": {"alias": "best one"}},
        "registry.alias: 'best one' is not a valid MLflow alias: use letters, digits, dashes and underscores",
    ),
    ({"registry": {"alias": ""}}, "registry.alias: '' is not a valid MLflow alias: use letters"),
    ({"registry": {"alias": "a" * 256}}, r"registry.alias: a+\.\.\. has 256 characters, MLflow allows 255: shorten it"),
    ({"registry": {"model": "it's"}}, "has ', which MLflow, or models:/NAME@ALIAS, does not allow .* as in it-s"),
    (
        {"registry": {"alias": "champion"}},
        "registry.alias=champion is promotion.alias too, .* past all gates: set one of them to another alias",
    ),
    ({"promotion": {"alias": "candidate"}}, "registry.alias=candidate is promotion.alias too"),
    *[
        ({"registry": {"model": name}}, f"registry.model: '{name}' {why}")
        for name, why in {
            "a/b": "has /, which MLflow, .* leave that out, as in a-b",
            "a:/b@c": "has / and : and @, .* leave that out, as in a-b-c",
            "   ": "cannot be the name of a registered model: it needs at least one letter or digit",
            "..": "cannot be the name",
            "a ": "begins or ends with a space",
        }.items()
    ],
    (
        {"rollout": {"temperature_column": "answer"}},
        "temperature_column=answer is dataset.answer_column too, and would have no effect: name a column of its own",
    ),
    (
        {"dataset": {"train": "a", "prompt_column": "q"}, "rollout": {"max_response_tokens_column": "q"}},
        "rollout.max_response_tokens_column=q is dataset.prompt_column too",
    ),
    *[
        ({section: {key: value}}, f"{place or f'{section}.{key}'}=True: must be a {kind}")
        for section, key, value, place, kind in (
            ("rollout", "temperature", True, "", "number"),
            ("rollout", "top_k", True, "", "whole number"),
            ("sft", "num_steps", True, "", "whole number"),
            ("update", "value_clip", True, "", "number"),
            ("update", "betas", [0.9, True], r"update.betas\[1\]", "number"),
            ("engines", "rollout_resources", {"GPU": True}, "engines.rollout_resources.GPU", "number"),
        )
    ],
    ({"iterations": False}, "iterations=False: must be a whole number"),
    ({"engines": {"place": "local"}}, "engines.place: unknown key"),
    ({"engines": {"backend": "slurm"}}, "engines.backend='slurm': must be 'local' or 'ray' .default: local.$"),
    (
        {"engines": {"address": "ray://head:10001"}},
        "engines.address='ray://head:10001': must match .* .HOST:PORT of the Ray",
    ),
    ({"engines": {"rollout_engines": 0}}, "engines.rollout_engines=0: must be at least 1"),
    ({"seed": -1}, "seed=-1: must be at least 0"),
    ({"training": {"num_ranks": 3}}, r"training.num_ranks=3 does not divide the 64 .* \[1, 2, 4, 8, 16, 32, 64\]"),
    ({"sft": {"data": "a", "batch_size": 9}, "training": {"num_ranks": 2}}, r"2 does not divide the 9 .* an SFT batch"),
    ({"model": {"path": "a", "lora": {"rank": 0}}}, "model.lora.rank=0: must be at least 1"),
    ({"model": {"path": "a", "lora": {"rnk": 8}}}, r"model.lora.rnk: unknown key; did you mean rank\?"),
    ({"model": {"path": "a", "lora": {"target_modules": []}}}, "model.lora.target_modules"),
    (
        {"evaluation": {"weights": "ema"}},
        "evaluation.weights=ema needs a moving average, and update.ema_decay is off: set update.ema_decay .*, or",
    ),
    (
        {"advantages": {"reference": {"kind": "ema"}}, "model": {"path": "a", "lora": {}}},
        "advantages.reference.kind=ema with model.lora: .* set it to fixed, or leave model.lora out",
    ),
    ({"model": {"path": "a", "dtype": "bfloat16"}}, "bfloat16 with training.zero_stage=0 .* set zero_stage to 1"),
    ({"model": {}}, "model: set exactly one of path .* and config"),
    ({"model": {"path": "a", "config": {"model_type": "llama"}}}, "model: set exactly one of path"),
    ({"model": {"config": {}, "tokenizer": "t"}}, "model: config has no model_type"),
    (
        {"model": {"config": {"model_type": "llama"}}},
        "a new model has no tokenizer: name a folder with one in model.tokenizer",
    ),
    ({"reward": {"function": "rewards.correct"}}, "'rewards.correct' is not a function: write package.module:function"),
    ({"reward": {"function": {}}}, "reward: no reward is named: give at least one function"),
    (
        {"reward": {"function": {"a.py:f": 1, "b.py:f": 1}}},
        "two rewards have the same name .*: give one of them another `name`",
    ),
    (
        {"reward": {"sources": [{"kind": "number"}], "options": {"limit": 3}}},
        "reward: options=limit is for functions, and no reward is one: leave it out, or give each reward in `sources`",
    ),
    *[
        ({"reward": reward}, "what looks like a key .(api_key|OPENAI_API_KEY2). is an option, .* PPOFLOW_REWARD_ENV")
        for reward in (
            {"function": "a.py:f", "options": {"api_key": "sk-1"}},
            {"function": "a.py:f", "options": {"judges": [{"api_key": "sk-1"}]}},
            {"function": "a.py:f", "options": {"OPENAI_API_KEY2": "sk-1"}},
            {"sources": [{"function": "a.py:f", "options": {"api_key": "sk-1"}}]},
        )
    ],
    *[
        (
            rule("length", max=9, name=name),
            f"reward length is called {name}, but score/{name} is a metric of all rewards .* name: my_{name}}}\\]",
        )
        for name in ("std", "unscored", "positions", "ahead", "prompts_with_signal")
    ],
    (
        {"reward": {"function": "reward.py:mean"}},
        r"reward reward.py:mean is called mean, .* as mean, std, .*: .* name: my_mean",
    ),
    ({"guards": {"max_gold_fall": 1}}, "guards: max_gold_fall=1 has no effect without gold_reward: set"),
    ({"guards": {"gold_reward": "gold"}}, r"guards.gold_reward=gold is not one of the rewards \(correct\): name"),
    (
        {"promotion": {"metric": "gold"}},
        r"promotion.metric=gold is not score, accuracy or one of the rewards \(correct\): name one of them, or add",
    ),
    ({"name": "../escape"}, "name='../escape': must match .*letters"),
]
