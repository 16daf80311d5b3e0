"""The scoring engine's jobs for reward models: preferences read and checked, and held-out ones scored."""

from __future__ import annotations

import json
import math
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ppo_core.data.description import describe_preferences
from ppo_core.data.preferences import (
    Ranking,
    held_out_trained,
    keys_of_prompts,
    read_preferences,
    read_rankings,
    tokenized,
    write_rankings,
)
from ppo_core.data.rows import Columns
from ppo_core.data.sieve import packed
from ppo_core.engines.start import sources_of
from ppo_core.models.weight_files import tensor_shapes
from ppo_core.processes.protocol import Job
from ppo_core.records import EvaluateRewardModelJob, InputError, PreparePreferencesJob
from ppo_core.scoring.preferences import calibration, distribution, pair_metrics

CLASSIFIER = "ForSequenceClassification"


def prepare_preferences(job: Job) -> dict[str, Any]:
    """Write `train.parquet` and `eval.parquet`, after every check that needs no model weights."""
    rankings, facts = _read(job)
    for split, found in rankings.items():
        write_rankings(job.output / f"{split}.parquet", found)
    described = describe_preferences(job.output, facts["held_out_trained"])
    return {**{name: facts[name] for name in ("counts", "pairs", "context_length")}, "described": described}


def check_preferences(job: Job) -> dict[str, Any]:
    """What the training of a reward model would find wrong with its data, tokenizer and model; writes nothing."""
    if "model" in job.inputs:
        tensor_shapes(job.inputs["model"].path)
    return _read(job)[1]


def _read(job: Job) -> tuple[dict[str, list[Ranking]], dict[str, Any]]:
    """The rankings of each split, and facts of them and of the model."""
    spec, sources = PreparePreferencesJob.model_validate(job.spec), sources_of(job)
    data = spec.dataset
    named = {"train": data.train, "eval": data.evaluation}
    columns = Columns(
        data.prompt_column,
        chosen=data.chosen_column,
        rejected=data.rejected_column,
        chat=spec.chat,
        system_prompt=spec.system_prompt,
    )
    read = {split: read_preferences(source, sources, columns) for split, source in named.items()}
    repeated = held_out_trained(read["train"], read["eval"], data)
    tokenizer, config, context, model = _start(job, spec)
    rankings = {}
    for split, preferences in read.items():
        job.progress(0, len(preferences), f"rows of {named[split]}")
        rankings[split] = tokenized(
            preferences,
            tokenizer,
            str(job.inputs["tokenizer"].path),
            max_tokens=spec.dataset.max_tokens,
            context_length=context,
            by_policy=spec.by_policy,
        )
        _check_vocabulary(named[split], rankings[split], tokenizer, config)
    return rankings, {
        "counts": {split: len(found) for split, found in rankings.items()},
        "pairs": {split: sum(math.comb(len(row.responses), 2) for row in found) for split, found in rankings.items()},
        "held_out_trained": repeated,
        "learned": packed(set(keys_of_prompts(read["train"]))),
        "context_length": context,
        "longest": max(len(text) for found in rankings.values() for row in found for text in row.responses),
        "model_type": config.model_type,
        "parameters": sum(value.numel() for value in model.parameters()),
    }


def evaluate_reward_model(job: Job) -> dict[str, Any]:
    """Write `scores.parquet` and `evaluation.json`: what the saved model says of the held-out responses."""
    from ppo_core.models.classifier import Classifier  # torch: seconds

    spec = EvaluateRewardModelJob.model_validate(job.spec)
    folder, trusted = job.inputs["model"].path / "model", job.permissions.trust_remote_code
    model = Classifier(folder, dtype=spec.dtype, trust_remote_code=trusted)
    rankings = read_rankings(job.inputs["dataset"].path / "eval.parquet")
    texts = [text for row in rankings for text in row.responses]
    scored = model.scores(
        texts, spec.microbatch_tokens, lambda done: job.progress(done, len(texts), "held-out responses scored")
    )
    places = [(number, rank) for number, row in enumerate(rankings) for rank in range(len(row.responses))]
    rows = [
        {"row": row, "rank": rank, "score": score, "tokens": len(text)}
        for (row, rank), score, text in zip(places, scored, texts, strict=True)
    ]
    pq.write_table(pa.Table.from_pylist(rows), job.output / "scores.parquet")
    left = iter(scored)
    scores = [[next(left) for _ in row.responses] for row in rankings]
    found = {"metrics": pair_metrics(scores), "calibration": calibration(scores), "distribution": distribution(scores)}
    (job.output / "evaluation.json").write_text(json.dumps(found, indent=2, sort_keys=True) + "\n")
    return found


def _start(job: Job, spec: PreparePreferencesJob) -> tuple[Any, Any, int | None, Any]:
    """Tokenizer and configuration, which fit each other and a reward model; the length of the model's context; and
    the model, without its weights."""
    from ppo_core.data.tokenization import check_kept, context_length, load_tokenizer, model_config
    from ppo_core.models.loading import empty_policy

    trusted = job.permissions.trust_remote_code
    tokenizer = load_tokenizer(job.inputs["tokenizer"].path, trust_remote_code=trusted)
    model = str(job.inputs["model"].path) if "model" in job.inputs else None
    config = model_config(model, spec.model.config, len(tokenizer), trust_remote_code=trusted)
    if any(str(name).endswith(CLASSIFIER) for name in config.architectures or ()):
        raise InputError(
            f"model {model} is a sequence classifier already ({config.architectures[0]}), and training starts from a "
            "causal LM: give that, or use this one as it is"
        )
    empty = empty_policy(config, model or str(spec.model.config), trust_remote_code=trusted)
    check_kept(tokenizer, config, trust_remote_code=trusted)
    return tokenizer, config, context_length(config), empty


def _check_vocabulary(source: str, rankings: list[Ranking], tokenizer: Any, config: Any) -> None:
    size = int(config.get_text_config().vocab_size)
    largest = max(token for row in rankings for text in row.responses for token in text)
    if largest >= size:
        raise InputError(
            f"{source}: the tokenizer writes {tokenizer.convert_ids_to_tokens(largest)!r} as token {largest}, but the "
            f"model's vocab_size is {size}: give the model's own tokenizer, or a model of at least {len(tokenizer)}"
        )
