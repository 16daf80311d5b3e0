"""The scoring engine: runs user code (reward functions, row generators), away from models and orchestration.

Jobs: prepare_dataset, score_rollouts, score_evaluation, compare_evaluations, describe_sources, try_reward. Jobs that
run user code get `folder`, where the spec's relative paths start, as the input `sources`.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ppo_core.comparison import compare_evaluations
from ppo_core.dataset import Limits, completion_text, prompt_rows, read_rows, supervised_rows
from ppo_core.engines.protocol import Job, serve, take_over_stdout
from ppo_core.permissions import permissions_of
from ppo_core.plugins import Sources, source_digest
from ppo_core.records import EvaluateJob, InputError, PrepareDatasetJob, PromptRow, RolloutRow, ScoreJob, ScoreRow
from ppo_core.reward_functions import RewardFailed, RewardFunctions, score_rows
from ppo_core.spec import RewardSpec
from ppo_core.tables import read_prompts, read_rollouts, write_prompts, write_rollouts, write_scores

TRIAL_ROWS = 5
ROWS_PER_REPORT = 1000


def describe_sources(job: Job) -> dict[str, Any]:
    """Digest of every piece of user code the spec names: what makes a cached stage stale when the code changes."""
    sources = _sources(job)
    return {name: source_digest(name, sources) for name in job.spec["functions"]}


def prepare_dataset(job: Job) -> dict[str, Any]:
    """Write `train.parquet`, `eval.parquet` and `sft.parquet`, after every check that needs no model weights."""
    from ppo_core.tokenization import check_kept, context_length, load_tokenizer, model_config

    spec = PrepareDatasetJob.model_validate(job.spec)
    sources, trusted = _sources(job), job.permissions.trust_remote_code
    tokenizer = load_tokenizer(job.inputs["tokenizer"].path, trust_remote_code=trusted)
    model = str(job.inputs["model"].path) if "model" in job.inputs else None
    config = model_config(model, spec.model.config, len(tokenizer), trust_remote_code=trusted)
    check_kept(tokenizer, config, trust_remote_code=trusted)
    context = context_length(config)
    limits = Limits(context, spec.dataset.max_prompt_tokens, spec.max_response_tokens)
    counts = {}
    functions = _functions(spec.reward, sources)
    column = spec.dataset.answer_column
    for split, source in (("train", spec.dataset.train), ("eval", spec.dataset.evaluation)):
        if source is None:
            continue
        rows = read_rows(source, sources)
        prompts = prompt_rows(_told(rows, source, job), tokenizer, source=source, answer_column=column, limits=limits)
        _check_vocabulary(source, prompts, tokenizer, config)
        functions.check_columns(prompts, column)
        _check_enough(split, source, len(prompts), spec)
        write_prompts(job.output / f"{split}.parquet", prompts)
        counts[split] = len(prompts)
        if split == "train":
            tried = prompts[:TRIAL_ROWS]
            functions.score(tried, [_answer_text(row) for row in tried], column)
    if spec.sft_data is not None:
        rows = read_rows(spec.sft_data, sources)
        told = _told(rows, spec.sft_data, job)
        examples = supervised_rows(told, tokenizer, source=spec.sft_data, context_length=context)
        pq.write_table(pa.Table.from_pylist(examples), job.output / "sft.parquet")
        counts["sft"] = len(examples)
    return {"counts": counts, "context_length": context}


def score_rollouts(job: Job) -> dict[str, Any]:
    """Write `scores.parquet`, row for row those of the rollouts."""
    spec = ScoreJob.model_validate(job.spec)
    rollouts = read_rollouts(job.inputs["rollouts"].path / "rollouts.parquet")
    scores = _scored(job, spec.reward, spec.answer_column, spec.split, rollouts)
    if all(row.score is None for row in scores):
        raise RewardFailed(
            f"none of the {len(scores)} responses has a score ({scores[0].error}): there is nothing to learn from; see "
            "why the reward functions return None, for example a judge that does not answer"
        )
    write_scores(job.output / "scores.parquet", scores)
    return {"metrics": score_metrics(scores, "score")}


def score_evaluation(job: Job) -> dict[str, Any]:
    """Write `responses.parquet` (sampled rows), `metrics.json` and scores of sampled and greedy responses."""
    spec = EvaluateJob.model_validate(job.spec)
    metrics: dict[str, float] = {}
    for name, prefix in (("sampled", "evaluation"), ("greedy", "evaluation/greedy")):
        rollouts = read_rollouts(job.inputs[name].path / "rollouts.parquet")
        scores = _scored(job, spec.reward, spec.answer_column, "eval", rollouts)
        write_scores(job.output / f"{name}_scores.parquet", scores)
        write_rollouts(job.output / ("responses.parquet" if name == "sampled" else "greedy.parquet"), rollouts)
        given = [row.score for row in scores if row.score is not None]
        if given:
            metrics[_join(prefix, "score")] = statistics.fmean(given)
            metrics[_join(prefix, "accuracy")] = sum(score >= spec.pass_score for score in given) / len(given)
        lengths = [len(row.response_token_ids) for row in rollouts]
        metrics[_join(prefix, "response_length")] = statistics.fmean(lengths)
        if name == "sampled":
            samples = _samples(job, rollouts, scores)
    (job.output / "metrics.json").write_text(json.dumps(metrics, indent=2, sort_keys=True) + "\n")
    (job.output / "samples.json").write_text(json.dumps(samples, indent=2) + "\n")
    return {"metrics": metrics, "samples": samples}


def try_reward(job: Job) -> dict[str, Any]:
    """Scores of a few rows with trial completions, without a model: what `ppoflow reward` shows."""
    sources, column = _sources(job), job.spec["answer_column"]
    functions = _functions(RewardSpec.model_validate(job.spec["reward"]), sources)
    rows = read_rows(job.spec["train"], sources)[:TRIAL_ROWS]
    prompts = [_untokenized(number, row, column) for number, row in enumerate(rows)]
    functions.check_columns(prompts, column)
    texts = job.spec["completions"] or _example_completions(job.spec, sources, prompts)
    completions = [texts[index % len(texts)] for index in range(len(prompts))]
    parts = functions.score(prompts, completions, column)
    table = [
        {"prompt": row.prompt, "completion": text, "components": part, "score": functions.total(part)}
        for row, text, part in zip(prompts, completions, parts, strict=True)
    ]
    return {"rows": table}


def score_metrics(scores: list[ScoreRow], prefix: str) -> dict[str, float]:
    """Mean, spread and count of what could be scored, and the mean of each component; left out where nothing could."""
    given = [row.score for row in scores if row.score is not None]
    metrics = {f"{prefix}/unscored": float(len(scores) - len(given))}
    if given:
        metrics |= {f"{prefix}/mean": statistics.fmean(given), f"{prefix}/std": statistics.pstdev(given)}
    for name in scores[0].components:
        values = [row.components[name] for row in scores]
        known = [value for value in values if value is not None]
        if known:
            metrics[f"{prefix}/{name}"] = statistics.fmean(known)
    return metrics


def _scored(job: Job, reward: RewardSpec, column: str, split: str, rollouts: list[RolloutRow]) -> list[ScoreRow]:
    prompts = {row.prompt_id: row for row in read_prompts(job.inputs["dataset"].path / f"{split}.parquet")}
    functions = _functions(reward, _sources(job))
    return score_rows(functions, [prompts[row.prompt_id] for row in rollouts], rollouts, column)


def _told(rows: list[dict[str, Any]], source: str, job: Job) -> Iterator[dict[str, Any]]:
    """The rows, with a sign of life after every thousand: a large file must not look like a hung engine."""
    for number, row in enumerate(rows, 1):
        yield row
        if number % ROWS_PER_REPORT == 0:
            job.progress(number, len(rows), f"rows of {source} tokenized")


def _samples(job: Job, rollouts: list[RolloutRow], scores: list[ScoreRow], count: int = 8) -> list[dict[str, Any]]:
    """The first rows as people look at them."""
    prompts = {row.prompt_id: row for row in read_prompts(job.inputs["dataset"].path / "eval.parquet")}
    return [
        {"prompt": prompts[row.prompt_id].prompt, "response": row.response, "score": score.score}
        for row, score in list(zip(rollouts, scores, strict=True))[:count]
    ]


def _example_completions(spec: Any, sources: Sources, prompts: list[PromptRow]) -> list[str]:
    """Completions to try a reward on: those of the SFT data in turn, else the reference answers; every second empty."""
    if spec["sft_data"] is not None:
        rows = read_rows(spec["sft_data"], sources)
        known = {str(row["prompt"]): completion_text(row) or "" for row in rows}
        texts = [known.get(str(row.prompt), completion_text(rows[0]) or "") for row in prompts]
    else:
        texts = [_answer_text(row) for row in prompts]
    return [text if index % 2 == 0 else "" for index, text in enumerate(texts)]


def _untokenized(number: int, row: Any, column: str) -> PromptRow:
    metadata = {key: value for key, value in row.items() if key not in ("prompt", column)}
    return PromptRow(str(number), row["prompt"], [], row.get(column), metadata)


def _answer_text(row: PromptRow) -> str:
    """A completion to try a reward on."""
    return "" if row.reference_answer is None else str(row.reference_answer)


def _check_enough(split: str, source: str, count: int, spec: PrepareDatasetJob) -> None:
    if split == "eval" and count < spec.num_eval_prompts:
        raise InputError(
            f"evaluation.num_prompts={spec.num_eval_prompts} is more than the {count} rows of {source}: lower it"
        )


def _check_vocabulary(source: str, prompts: list[PromptRow], tokenizer: Any, config: Any) -> None:
    size = int(config.get_text_config().vocab_size)
    for token in {int(tokenizer.eos_token_id), *(token for row in prompts for token in row.prompt_token_ids)}:
        if token >= size:
            raise InputError(
                f"{source}: the tokenizer writes {tokenizer.convert_ids_to_tokens(token)!r} as token {token}, but the "
                f"model's vocab_size is {size}: give the model's own tokenizer, or a model of at least {len(tokenizer)}"
            )


def _sources(job: Job) -> Sources:
    return Sources(job.inputs["sources"].path, job.permissions.plugins)


def _functions(reward: RewardSpec, sources: Sources) -> RewardFunctions:
    return RewardFunctions(reward.weights, reward.options, sources)


def _join(prefix: str, name: str) -> str:
    return f"{prefix}_{name}" if "/" in prefix else f"{prefix}/{name}"


def main() -> None:
    """Serve scoring jobs on standard input and output."""
    replies = take_over_stdout()
    jobs = (describe_sources, prepare_dataset, score_rollouts, score_evaluation, compare_evaluations, try_reward)
    serve({job.__name__: job for job in jobs}, replies, permissions_of(sys.argv[1:]))


if __name__ == "__main__":
    main()
