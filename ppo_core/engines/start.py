"""What a run starts from, read and checked in the scoring engine: its rows, tokenizer, context and rewards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ppo_core.data.dataset import (
    Limits,
    check_room,
    completion_text,
    longest_of,
    prompt_rows,
    read_rows,
    supervised_rows,
)
from ppo_core.engines.protocol import Job
from ppo_core.records import InputError, PrepareDatasetJob, PromptRow
from ppo_core.scoring.plugins import Sources
from ppo_core.scoring.reward import Sample
from ppo_core.scoring.weighted import WeightedRewards

TRIAL_ROWS = 5
ROWS_PER_REPORT = 1000


@dataclass(frozen=True)
class Start:
    """Prompts by split, SFT examples (None: no SFT), and what the rewards say of the first few rows, or why nothing.

    `config` is the model's Hugging Face configuration.
    """

    prompts: dict[str, list[PromptRow]]
    examples: list[dict[str, list[int]]] | None
    config: Any
    context_length: int | None
    trial_scores: list[float | None]
    trial_errors: list[str | None]

    def counts(self) -> dict[str, int]:
        """Rows by split."""
        rows = {split: len(prompts) for split, prompts in self.prompts.items()}
        return rows if self.examples is None else {**rows, "sft": len(self.examples)}

    def longest_prompt(self) -> int:
        """Tokens of the longest prompt of all splits."""
        return max(len(row.prompt_token_ids) for prompts in self.prompts.values() for row in prompts)


def read_start(job: Job, spec: PrepareDatasetJob) -> Start:
    """Every row, tokenized, after every check that needs no model weights. Raises InputError, and RewardFailed.

    What needs no tokenizer comes first: transformers takes seconds to import.
    """
    sources, column = sources_of(job), spec.dataset.answer_column
    rewards = WeightedRewards(spec.reward, sources, column, job.progress)
    splits = {"train": spec.dataset.train, "eval": spec.dataset.evaluation, "sft": spec.sft_data}
    named = {split: source for split, source in splits.items() if source is not None}
    rows = {split: read_rows(source, sources) for split, source in named.items()}
    _check_enough(rows.get("eval"), spec)
    for split in {"train", "eval"} & set(rows):
        rewards.check_rows([untokenized(row, column) for row in rows[split]])
    tried = [untokenized(row, column) for row in rows["train"][:TRIAL_ROWS]]
    completions = example_completions(rows.get("sft"), tried)
    parts = rewards.score([Sample(row, text) for row, text in zip(tried, completions, strict=True)])
    tokenizer, config, context = _read_model(job, spec)
    limits = Limits(context, spec.dataset.max_prompt_tokens, spec.max_response_tokens)
    anywhere = replace(limits, context_length=None)  # the longest of all splits says what fits
    prompts: dict[str, list[PromptRow]] = {}
    for split in ("train", "eval"):
        if split in named:
            source, given = named[split], with_progress(rows[split], named[split], job)
            prompts[split] = prompt_rows(given, tokenizer, source=source, answer_column=column, limits=anywhere)
            _check_vocabulary(source, prompts[split], tokenizer, config)
    longest = [longest_of(found, named[split]) for split, found in prompts.items()]
    check_room(max(longest, key=lambda found: found.tokens), limits)
    examples = None
    if "sft" in named:
        given = with_progress(rows["sft"], named["sft"], job)
        examples = supervised_rows(given, tokenizer, source=named["sft"], context_length=context)
    trial = [rewards.total(part.scores) for part in parts]
    return Start(prompts, examples, config, context, trial, [part.error() for part in parts])


def sources_of(job: Job) -> Sources:
    """The folder of the user's code and data, and from where code may come."""
    given, permitted = job.inputs["sources"], job.permissions
    return Sources(given.path, permitted.plugins, permitted.trust_remote_code, given.digest)


def example_completions(examples: Sequence[dict[str, Any]] | None, prompts: Sequence[PromptRow]) -> list[str]:
    """Completions to try a reward on: those of the SFT rows in turn, else the reference answers; every second empty."""
    if examples is not None:
        known = {str(row["prompt"]): completion_text(row) or "" for row in examples}
        texts = [known.get(str(row.prompt), completion_text(examples[0]) or "") for row in prompts]
    else:
        texts = ["" if row.reference_answer is None else str(row.reference_answer) for row in prompts]
    return [text if index % 2 == 0 else "" for index, text in enumerate(texts)]


def untokenized(row: Mapping[str, Any], column: str) -> PromptRow:
    """A row as rewards see it."""
    metadata = {key: value for key, value in row.items() if key not in ("prompt", column)}
    return PromptRow("", row["prompt"], [], row.get(column), metadata)


def with_progress(rows: list[dict[str, Any]], source: str, job: Job) -> Iterator[dict[str, Any]]:
    """The rows, with a sign of life after every thousand: a large file must not look like a hung engine."""
    for number, row in enumerate(rows, 1):
        yield row
        if number % ROWS_PER_REPORT == 0:
            job.progress(number, len(rows), f"rows of {source} tokenized")


def _read_model(job: Job, spec: PrepareDatasetJob) -> tuple[Any, Any, int | None]:
    """Tokenizer and configuration, which fit each other, and the length of the model's context."""
    from ppo_core.data.tokenization import check_kept, context_length, load_tokenizer, model_config

    trusted = job.permissions.trust_remote_code
    tokenizer = load_tokenizer(job.inputs["tokenizer"].path, trust_remote_code=trusted)
    model = str(job.inputs["model"].path) if "model" in job.inputs else None
    config = model_config(model, spec.model.config, len(tokenizer), trust_remote_code=trusted)
    check_kept(tokenizer, config, trust_remote_code=trusted)
    return tokenizer, config, context_length(config)


def _check_enough(rows: Sequence[Any] | None, spec: PrepareDatasetJob) -> None:
    if rows is not None and len(rows) < spec.num_eval_prompts:
        raise InputError(
            f"evaluation.num_prompts={spec.num_eval_prompts} is more than the {len(rows)} rows of "
            f"{spec.dataset.evaluation}: lower it"
        )


def _check_vocabulary(source: str, prompts: list[PromptRow], tokenizer: Any, config: Any) -> None:
    size = int(config.get_text_config().vocab_size)
    for token in {int(tokenizer.eos_token_id), *(token for row in prompts for token in row.prompt_token_ids)}:
        if token >= size:
            raise InputError(
                f"{source}: the tokenizer writes {tokenizer.convert_ids_to_tokens(token)!r} as token {token}, but the "
                f"model's vocab_size is {size}: give the model's own tokenizer, or a model of at least {len(tokenizer)}"
            )
