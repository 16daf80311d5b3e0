"""The scoring engine's jobs on preferences: read and checked, made of scored samples, and held-out ones scored."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ppo_core.data.description import describe_preferences
from ppo_core.data.preferences import SPLITS, Preferences, Sides, read_preferences
from ppo_core.data.rankings import RankingMaker, RankingsWriter, read_rankings
from ppo_core.data.rows import Columns
from ppo_core.data.sampled_pairs import SampledPairs
from ppo_core.data.sieve import Sieve, packed
from ppo_core.data.tables import SOURCES, read_prompts, read_rollouts, read_scores, write_sources
from ppo_core.data.tallies import documents, left_out
from ppo_core.engines.start import ROWS_PER_REPORT, sources_of
from ppo_core.models.weight_files import tensor_shapes
from ppo_core.processes.lean_imports import seldom_collecting
from ppo_core.processes.protocol import Job
from ppo_core.records import EvaluateRewardModelJob, InputError, PairSamplesJob, PreparePreferencesJob
from ppo_core.scoring.preferences import calibration, distribution, pair_metrics
from ppo_core.spec import PreferencesSpec


@dataclass
class Side:
    """What the rankings of a split come to, one after the other: texts in tokens, `largest` a token's number."""

    counts: int = 0
    pairs: int = 0
    longest: int = 0
    largest: int = 0

    def add(self, responses: list[list[int]]) -> None:
        """One more row."""
        self.counts += 1
        self.pairs += math.comb(len(responses), 2)
        self.longest = max(self.longest, *map(len, responses))
        self.largest = max(self.largest, *map(max, responses))


def prepare_preferences(job: Job) -> dict[str, Any]:
    """Write `train.parquet` and `eval.parquet`, after every check that needs no model weights."""
    facts = _read(job, {split: RankingsWriter(job.output / f"{split}.parquet") for split in SPLITS})
    if facts["sources"]:
        write_sources(job.output / SOURCES, facts["sources"])
    described = describe_preferences(job.output, facts["held_out_trained"], facts["sources"])
    return {**{name: facts[name] for name in ("counts", "pairs", "context_length")}, "described": described}


@seldom_collecting()
def check_preferences(job: Job) -> dict[str, Any]:
    """What the training of a reward model would find wrong with its data, tokenizer and model; writes nothing."""
    if "model" in job.inputs:
        tensor_shapes(job.inputs["model"].path)
    facts = _read(job, {split: RankingsWriter(None) for split in SPLITS}, weights=True)
    return {**facts, "left_out": left_out(facts["sources"])}


def _read(job: Job, writers: dict[str, RankingsWriter], *, weights: bool = False) -> dict[str, Any]:
    """Have the rankings of each split written; facts of them and of the model, whose `weights` are looked at too.

    Rows are read twice, so that all of them are checked before the first is tokenized: transformers takes seconds to
    import.
    """
    spec = PreparePreferencesJob.model_validate(job.spec)
    data = spec.dataset
    sieve = Sieve(data.evaluation_fraction, data.duplicates == "drop", spec.chat, spec.system_prompt)
    given = _given(job, spec, sieve)
    total = _count(job, given, data)
    tokenizer, config, context, model = _start(job, spec, weights=weights)
    name, drop = str(job.inputs["tokenizer"].path), data.too_long == "drop"
    maker = RankingMaker(tokenizer, name, data.max_tokens, context, spec.by_policy, drop)
    sides, both = {split: Side() for split in SPLITS}, Sides()
    sieve.forget()
    for preferences in given:
        both.begin(preferences.rows.source, preferences.split)
        for number, (preference, ranking) in enumerate(maker.rankings(preferences), 1):
            both.add(preference)
            if ranking is not None:
                writers[preference.split].add(ranking)
                sides[preference.split].add(ranking.responses)
            if number % ROWS_PER_REPORT == 0:
                job.progress(number, total, f"rows of {preferences.rows.source} tokenized")
    repeated = both.held_out_trained(data)
    for split, side in sides.items():
        writers[split].close()
        _check_vocabulary(data.label_of(split), side.largest, tokenizer, config)
    several = len(data.sources) > 1 or data.drops
    return {
        "counts": {split: side.counts for split, side in sides.items()},
        "pairs": {split: side.pairs for split, side in sides.items()},
        "held_out_trained": repeated,
        "learned": packed(both.rows["train"]),
        "sources": documents(both.tallies, data.weights, f"{spec.section}.train") if several else [],
        "context_length": context,
        "longest": max(side.longest for side in sides.values()),
        "model_type": config.model_type,
        "parameters": sum(value.numel() for value in model.parameters()),
        "recomputes": bool(model.supports_gradient_checkpointing),
    }


def _count(job: Job, given: list[Preferences], data: PreferencesSpec) -> int:
    """How many rows there are. Raises InputError where rows are none, or too few are left on a side."""
    both = Sides()
    for preferences in given:
        both.begin(preferences.rows.source, preferences.split)
        for number, preference in enumerate(preferences, 1):
            both.add(preference)
            if number % ROWS_PER_REPORT == 0:
                job.progress(0, 0, f"{number:,} rows of {preferences.rows.source} read")
    both.held_out_trained(data)
    return sum(tally.read for tally in both.tallies)


def _given(job: Job, spec: PreparePreferencesJob, sieve: Sieve) -> list[Preferences]:
    """The sources of preferences; functions are called here."""
    data, sources = spec.dataset, sources_of(job)
    columns = Columns(
        data.prompt_column,
        chosen=data.chosen_column,
        rejected=data.rejected_column,
        chat=spec.chat,
        system_prompt=spec.system_prompt,
    )
    given = [read_preferences(source.path, sources, columns, sieve=sieve) for source in data.sources]
    if data.evaluation is None:
        return given
    held_out = read_preferences(data.evaluation, sources, columns, "eval", sieve)
    # First, where those to train on must not be among them.
    return [held_out, *given] if data.duplicates == "drop" else [*given, held_out]


def pair_samples(job: Job) -> dict[str, Any]:
    """Write `pairs.jsonl`: of each prompt of each iteration the best response and the worst; see `PairSamplesJob`."""
    numbers, found = PairSamplesJob.model_validate(job.spec).iterations, SampledPairs()
    with (job.output / "pairs.jsonl").open("w", encoding="utf-8") as file:
        for done, number in enumerate(numbers):
            job.progress(done, len(numbers), f"iteration {number}")
            place = {name: job.inputs[f"{name}_{number}"].path for name in ("dataset", "rollouts", "scores")}
            rollouts = read_rollouts(place["rollouts"] / "rollouts.parquet")
            prompts = read_prompts(place["dataset"] / "train.parquet", named={row.prompt_id for row in rollouts})
            scores = read_scores(place["scores"] / "scores.parquet")
            for row in found.rows({prompt.prompt_id: prompt for prompt in prompts}, rollouts, scores):
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
    return found.counts


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


def _start(job: Job, spec: PreparePreferencesJob, *, weights: bool) -> tuple[Any, Any, int | None, Any]:
    """Tokenizer and configuration, which fit each other and a reward model; the length of the model's context; and
    the model, without its weights, which are only looked at."""
    from ppo_core.data.tokenization import check_kept, context_length, load_tokenizer, model_config
    from ppo_core.engines.model_checks import check_weights, refuse_untrainable
    from ppo_core.models.architectures import require_causal
    from ppo_core.models.loading import empty_policy
    from ppo_core.models.reward_model import ClassifierFolder

    trusted = job.permissions.trust_remote_code
    tokenizer = load_tokenizer(job.inputs["tokenizer"].path, trust_remote_code=trusted)
    model = str(job.inputs["model"].path) if "model" in job.inputs else None
    config = model_config(model, spec.model.config, len(tokenizer), trust_remote_code=trusted)
    require_causal(config, str(model))
    name = model or str(spec.model.config)
    empty = empty_policy(config, name, trust_remote_code=trusted)
    if not spec.by_policy:
        refuse_untrainable(config, name)
        ClassifierFolder(config, name, tokenizer.pad_token_id, set())
    if weights and model is not None and not spec.by_policy:
        check_weights(empty, job.inputs["model"].path, spec.model, trust_remote_code=trusted)
    check_kept(tokenizer, config, trust_remote_code=trusted)
    return tokenizer, config, context_length(config), empty


def _check_vocabulary(source: str, largest: int, tokenizer: Any, config: Any) -> None:
    size = int(config.get_text_config().vocab_size)
    if largest >= size:
        raise InputError(
            f"{source}: the tokenizer writes {tokenizer.convert_ids_to_tokens(largest)!r} as token {largest}, but the "
            f"model's vocab_size is {size}: give the model's own tokenizer, or a model of at least {len(tokenizer)}"
        )
