"""The scoring engine: runs user code (reward functions, row generators), away from models and orchestration.

Jobs: describe_sources, describe_dataset, check_run, try_reward, prepare_dataset, score_ahead, score_rollouts,
select_rollouts, score_evaluation, compare_evaluations; check_preferences, prepare_preferences, evaluate_reward_model,
pair_samples; make_room.
Jobs that run user code get `folder`, where the spec's relative paths start, as the input `sources`.
"""

from __future__ import annotations

import json
import statistics
import sys
from functools import cache, partial
from typing import Any

import pyarrow.parquet as pq

from ppo_core.data.description import describe
from ppo_core.data.tables import (
    SOURCES,
    component_names,
    read_prompts,
    read_rollouts,
    write_rollouts,
    write_scores,
    write_sources,
)
from ppo_core.engines.reward_models import (
    check_preferences,
    evaluate_reward_model,
    pair_samples,
    prepare_preferences,
)
from ppo_core.engines.rollout_limits import check_stop_texts
from ppo_core.engines.selection import scores_beside, select_rollouts, signals
from ppo_core.engines.start import example_completions, read_start, rows_of_splits, scan, sources_of
from ppo_core.engines.user_code import as_loaded, describe_sources, require_same_code, require_same_models
from ppo_core.models.weight_files import tensor_shapes
from ppo_core.processes.lean_imports import leave_out_unused, quick_imports, seldom_collecting
from ppo_core.processes.permissions import permissions_of
from ppo_core.processes.protocol import EngineDefect, Job, serve, take_over_stdout
from ppo_core.processes.turns import room_made
from ppo_core.records import (
    WITH_SIGNAL,
    CheckRunJob,
    EvaluateJob,
    PrepareDatasetJob,
    PromptRow,
    RolloutRow,
    ScoreAheadJob,
    ScoreJob,
    ScoreRow,
)
from ppo_core.scoring.ahead import ScoresAhead
from ppo_core.scoring.comparison import compare_evaluations
from ppo_core.scoring.held_models import held_models
from ppo_core.scoring.overoptimisation import response_metrics
from ppo_core.scoring.reward import RewardFailed, Sample
from ppo_core.scoring.spans import Decode
from ppo_core.scoring.weighted import WeightedRewards, check_enough, make_remembered
from ppo_core.spec import RewardSpec


def prepare_dataset(job: Job) -> dict[str, Any]:
    """Write `train.parquet`, `eval.parquet` and `sft.parquet`, after every check that needs no model weights."""
    spec = PrepareDatasetJob.model_validate(job.spec)
    found = read_start(job, spec)
    for split, table in found.tables.items():
        pq.write_table(table, job.output / f"{split}.parquet")
    if found.sources:
        write_sources(job.output / SOURCES, found.sources)
    return {"counts": found.counts(), "context_length": found.context_length}


def describe_dataset(job: Job) -> dict[str, Any]:
    """What a prepared dataset is, in numbers. Input: dataset."""
    return describe(job.inputs["dataset"].path)


@seldom_collecting()
def check_run(job: Job) -> dict[str, Any]:
    """What a run would find wrong with its data, tokenizer, reward functions and model, found before it starts."""
    spec = CheckRunJob.model_validate(job.spec)
    model, critic = (job.inputs[name].path if name in job.inputs else None for name in ("model", "critic"))
    for folder in filter(None, (model, critic)):
        tensor_shapes(folder)
    found = read_start(job, spec.dataset, new=spec.new)
    if spec.new:
        check_stop_texts(spec.stop, found.tokenizer, model, spec.dataset.stop_token_ids)
    with quick_imports():
        leave_out_unused()
        from ppo_core.engines.model_checks import check_model  # torch: seconds

        facts = check_model(
            found.config,
            model,
            spec,
            tokens=found.longest_prompt + spec.dataset.max_response_tokens,
            trust_remote_code=job.permissions.trust_remote_code,
            rewards=[(reward, sources_of(job).place(reward.path)) for reward in spec.dataset.reward.models],
            critic=None if critic is None else (critic, found.tokenizer),
        )
    return {**found.facts(), **facts, "learned_held_out": found.held_out_among(spec.learned)}


def score_ahead(job: Job, ahead: ScoresAhead) -> dict[str, Any]:
    """Have rewards score responses while others are sampled; writes nothing. `scored`: which, from 0, all did."""
    require_same_models(job)
    spec, ahead = ScoreAheadJob.model_validate(job.spec), ahead.for_dataset(job.inputs["dataset"].digest)
    prompts = _prompts(job, spec.split, {row.prompt_id for row in spec.responses})
    samples = [
        Sample(prompts[row.prompt_id], row.response, row.response_token_ids, row.sample_index) for row in spec.responses
    ]
    sources, column = sources_of(job), spec.answer_column
    as_loaded([name for reward in spec.rewards for name in reward.code], job)  # for `require_same_code` of all scores
    rewards = [make_remembered(reward, sources, column, job.progress, ahead, once=True) for reward in spec.rewards]
    scored = zip(*(reward.score_ahead(samples) for reward in rewards), strict=True)
    return {"scored": [number for number, there in enumerate(scored) if all(there)]}


def score_rollouts(job: Job, ahead: ScoresAhead | None = None) -> dict[str, Any]:
    """Write `scores.parquet`, row by row: what came with the rollouts (`selection`), else `ahead` and the rest anew."""
    spec = ScoreJob.model_validate(job.spec)
    rollouts = read_rollouts(job.inputs["rollouts"].path / "rollouts.parquet")
    beside = scores_beside(job.inputs["rollouts"], spec.reward, spec.answer_column, job.inputs["sources"])
    scores = beside or _scored(job, spec.reward, spec.answer_column, spec.split, rollouts, _decoder(job), ahead)
    if all(row.score is None for row in scores):
        raise RewardFailed(
            f"none of the {len(scores)} responses has a score ({scores[0].error}): there is nothing to learn from; see "
            "why the rewards give none, for example a judge that does not answer"
        )
    if not beside:  # else each batch was checked, and the chosen may have more that failed
        check_enough(scores, spec.reward)
    write_scores(job.output / "scores.parquet", scores)
    metrics = score_metrics(scores, "score") | response_metrics(rollouts, scores)
    if spec.samples_per_prompt is not None:
        counted, clip = spec.truncated_count, spec.score_clip
        signal = signals(rollouts, scores, spec.samples_per_prompt, truncated_count=counted, score_clip=clip)
        metrics[WITH_SIGNAL] = float(sum(signal))
    if ahead is not None:
        ahead.forget_used()
    return {"metrics": metrics}


def score_evaluation(job: Job) -> dict[str, Any]:
    """Write `responses.parquet` (sampled rows), `metrics.json` and scores of sampled and greedy responses."""
    spec = EvaluateJob.model_validate(job.spec)
    metrics: dict[str, float] = {}
    for name, prefix in (("sampled", "evaluation"), ("greedy", "evaluation/greedy")):
        rollouts = read_rollouts(job.inputs[name].path / "rollouts.parquet")
        scores = _scored(job, spec.reward, spec.answer_column, "eval", rollouts)
        check_enough(scores, spec.reward, f"{name} held-out responses")
        write_scores(job.output / f"{name}_scores.parquet", scores)
        write_rollouts(job.output / ("responses.parquet" if name == "sampled" else "greedy.parquet"), rollouts)
        given = [row.score for row in scores if row.score is not None]
        if given:
            metrics[_join(prefix, "score")] = statistics.fmean(given)
            if len(given) < len(scores):
                metrics[_join(prefix, "unscored")] = float(len(scores) - len(given))
            metrics[_join(prefix, "accuracy")] = sum(score >= spec.pass_score for score in given) / len(given)
        if len(spec.reward.rewards) > 1:
            metrics |= component_means(scores, _join(prefix, "score"))
        lengths = [len(row.response_token_ids) for row in rollouts]
        metrics[_join(prefix, "response_length")] = statistics.fmean(lengths)
        if name == "sampled":
            samples = _samples(job, rollouts, scores)
    (job.output / "metrics.json").write_text(json.dumps(metrics, indent=2, sort_keys=True) + "\n")
    (job.output / "samples.json").write_text(json.dumps(samples, indent=2) + "\n")
    return {"metrics": metrics, "samples": samples}


def try_reward(job: Job) -> dict[str, Any]:
    """Scores of a few rows with trial completions, without a model: what `ppoflow reward` shows."""
    spec = PrepareDatasetJob.model_validate(job.spec["dataset"])
    sources, column = sources_of(job), spec.dataset.answer_column
    rewards = WeightedRewards(spec.reward, sources, column, job.progress)
    if job.spec.get("new"):
        rewards.check_options()
    given = rows_of_splits(spec, sources)
    prompts = scan(given["train"], rewards, column, job, new=bool(job.spec.get("new"))).first
    wanted = "sft" in given and not job.spec["completions"]
    examples = (row.content for row in given["sft"][0]) if wanted else None
    texts = job.spec["completions"] or example_completions(examples, prompts)
    completions = [texts[index % len(texts)] for index in range(len(prompts))]
    parts = rewards.score([Sample(row, text) for row, text in zip(prompts, completions, strict=True)])
    table = [
        {
            "prompt": row.prompt,
            "completion": text,
            "components": {**part.scores, **part.measures},
            "score": rewards.total(part.scores),
            "error": part.error(),
            "spans": {name: found.spans for name, found in part.parts.items() if not found.of_tokens},
        }
        for row, text, part in zip(prompts, completions, parts, strict=True)
    ]
    return {"rows": table}


def make_room(job: Job) -> dict[str, Any]:
    """Have reward models leave the GPU to other engines, until the next scores."""
    try:
        return room_made(held_models().make_room())
    except Exception as error:
        # They still have their memory, which the next engine would lack.
        raise EngineDefect(f"a reward model made no room: {type(error).__name__}: {error}") from error


def score_metrics(scores: list[ScoreRow], prefix: str) -> dict[str, float]:
    """Mean, spread and count of what could be scored, and the mean of each component; left out where nothing could.

    `positions`, where scores came in parts: at how many tokens a response's is credited, the mean over those responses.
    """
    given = [row.score for row in scores if row.score is not None]
    metrics = {f"{prefix}/unscored": float(len(scores) - len(given))}
    if given:
        metrics |= {f"{prefix}/mean": statistics.fmean(given), f"{prefix}/std": statistics.pstdev(given)}
    in_parts = [row.token_scores for row in scores if row.token_scores is not None]
    if in_parts:
        metrics[f"{prefix}/positions"] = statistics.fmean(map(len, in_parts))
    return metrics | component_means(scores, prefix)


def component_means(scores: list[ScoreRow], prefix: str) -> dict[str, float]:
    """The mean of each reward over the rows that it scored, by its name; left out where it scored none."""
    metrics = {}
    for name in component_names(scores):
        known = [value for row in scores if (value := row.components.get(name)) is not None]
        if known:
            metrics[f"{prefix}/{name}"] = statistics.fmean(known)
    return metrics


def _scored(
    job: Job,
    reward: RewardSpec,
    column: str,
    split: str,
    rollouts: list[RolloutRow],
    decode: Decode | None = None,
    ahead: ScoresAhead | None = None,
) -> list[ScoreRow]:
    require_same_code(reward, job)
    require_same_models(job)
    prompts = _prompts(job, split, {row.prompt_id for row in rollouts})
    known = ahead and ahead.for_dataset(job.inputs["dataset"].digest)
    rewards = WeightedRewards(reward, sources_of(job), column, job.progress, known)
    return rewards.score_rollouts([prompts[row.prompt_id] for row in rollouts], rollouts, decode)


def _prompts(job: Job, split: str, ids: set[str]) -> dict[str, PromptRow]:
    return {row.prompt_id: row for row in read_prompts(job.inputs["dataset"].path / f"{split}.parquet", named=ids)}


def _decoder(job: Job) -> Decode:
    """The text of tokens by the run's tokenizer, which is loaded when a score in parts first asks for it."""

    @cache
    def tokenizer() -> Any:
        with quick_imports():
            from ppo_core.data.tokenization import load_tokenizer  # transformers: seconds

            return load_tokenizer(job.inputs["tokenizer"].path, trust_remote_code=job.permissions.trust_remote_code)

    def decode(token_ids: list[int]) -> str:
        from ppo_core.data.tokenization import decode_response

        return decode_response(tokenizer(), token_ids)

    return decode


def _samples(job: Job, rollouts: list[RolloutRow], scores: list[ScoreRow], count: int = 8) -> list[dict[str, Any]]:
    """The first rows as people look at them."""
    shown = list(zip(rollouts, scores, strict=True))[:count]
    prompts = _prompts(job, "eval", {row.prompt_id for row, _ in shown})
    return [
        {"prompt": prompts[row.prompt_id].prompt, "response": row.response, "score": score.score}
        for row, score in shown
    ]


def _join(prefix: str, name: str) -> str:
    return f"{prefix}_{name}" if "/" in prefix else f"{prefix}/{name}"


def main() -> None:
    """Serve scoring jobs on standard input and output."""
    preparing = (describe_sources, describe_dataset, check_run, try_reward, prepare_dataset)
    of_preferences = (check_preferences, prepare_preferences, evaluate_reward_model, pair_samples)
    others = (select_rollouts, score_evaluation, compare_evaluations, make_room)
    jobs = {job.__name__: job for job in (*preparing, *others, *of_preferences)}
    ahead = ScoresAhead()
    scoring = {job.__name__: partial(job, ahead=ahead) for job in (score_ahead, score_rollouts)}
    serve({**jobs, **scoring}, take_over_stdout(), permissions_of(sys.argv[1:]))


if __name__ == "__main__":
    main()
