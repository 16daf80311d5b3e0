"""What a run starts from, read and checked in the scoring engine: its rows, tokenizer, context and rewards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ppo_core.data.dataset import (
    Limits,
    PromptMaker,
    check_room,
    completion_text,
    in_parts,
    supervised_rows,
)
from ppo_core.data.rows import Columns, Row, Rows, read_rows
from ppo_core.data.tables import example_table, prompt_table
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

    `config` is the model's Hugging Face configuration, `longest_prompt` the tokens of the longest of all splits.
    """

    prompts: dict[str, pa.Table]
    examples: pa.Table | None
    longest_prompt: int
    config: Any
    context_length: int | None
    trial_scores: list[float | None]
    trial_errors: list[str | None]

    def counts(self) -> dict[str, int]:
        """Rows by split."""
        rows = {split: len(prompts) for split, prompts in self.prompts.items()}
        return rows if self.examples is None else {**rows, "sft": len(self.examples)}


@dataclass(frozen=True)
class Scanned:
    """How many rows a source has, and its first few."""

    count: int
    first: list[PromptRow]


def read_start(job: Job, spec: PrepareDatasetJob) -> Start:
    """Every row, tokenized, after every check that needs no model weights. Raises InputError, and RewardFailed.

    What needs no tokenizer comes first: transformers takes seconds to import.
    """
    sources, column = sources_of(job), spec.dataset.answer_column
    rewards = WeightedRewards(spec.reward, sources, column, job.progress)
    rows = rows_of_splits(spec, sources)
    scanned = {split: scan(rows[split], rewards, column, job) for split in ("train", "eval") if split in rows}
    if "eval" in scanned:
        _check_enough(scanned["eval"].count, spec)
    tried = scanned["train"].first
    completions = example_completions((row.content for row in rows["sft"]) if "sft" in rows else None, tried)
    parts = rewards.score([Sample(row, text) for row, text in zip(tried, completions, strict=True)])
    tokenizer, config, context = _read_model(job, spec)
    limits = Limits(context, spec.dataset.max_prompt_tokens, spec.max_response_tokens)
    prompts, longest = {}, []
    for split, found in scanned.items():
        maker = PromptMaker(tokenizer, column, limits)
        prompts[split] = prompt_table(maker.prompts(with_progress(rows[split], found.count, job)))
        _check_vocabulary(rows[split].source, prompts[split], tokenizer, config)
        longest.append(maker.longest)
    check_room(max(longest, key=lambda found: found.tokens), limits)
    examples = None
    if "sft" in rows:
        examples = example_table(supervised_rows(with_progress(rows["sft"], 0, job), tokenizer, context_length=context))
    trial = [rewards.total(part.scores) for part in parts]
    most = max(found.tokens for found in longest)
    return Start(prompts, examples, most, config, context, trial, [part.error() for part in parts])


def rows_of_splits(spec: PrepareDatasetJob, sources: Sources) -> dict[str, Rows]:
    """The rows to train on, to evaluate with and to start from; functions are called here."""
    data = spec.dataset
    columns = Columns(data.prompt_column, chat=data.chat, system_prompt=data.system_prompt)
    examples = replace(columns, prompt=spec.sft_prompt_column, completion=spec.sft_completion_column)
    given = {"train": (data.train, columns), "eval": (data.evaluation, columns), "sft": (spec.sft_data, examples)}
    return {split: read_rows(source, sources, form) for split, (source, form) in given.items() if source is not None}


def sources_of(job: Job) -> Sources:
    """The folder of the user's code and data, and from where code may come."""
    given, permitted = job.inputs["sources"], job.permissions
    return Sources(given.path, permitted.plugins, permitted.trust_remote_code, given.digest)


def scan(rows: Rows, rewards: WeightedRewards, column: str, job: Job) -> Scanned:
    """Have each row checked, for itself and by the rewards. Raises InputError."""
    count, first = 0, list[PromptRow]()
    for part in in_parts(rows, ROWS_PER_REPORT):
        given = [untokenized(row.content, column) for row in part]
        rewards.check_rows(given, count + 1)
        count, first = count + len(part), first or given[:TRIAL_ROWS]
        if len(part) == ROWS_PER_REPORT:
            job.progress(0, 0, f"{count:,} rows of {rows.source} read")
    return Scanned(count, first)


def example_completions(examples: Iterable[Mapping[str, Any]] | None, prompts: Sequence[PromptRow]) -> list[str]:
    """Completions to try a reward on: those of the SFT rows in turn, else the reference answers; every second empty."""
    if examples is not None:
        wanted, known, first = {str(row.prompt) for row in prompts}, dict[str, str](), None
        for example in examples:
            first = completion_text(example) or "" if first is None else first
            if str(example["prompt"]) in wanted:
                known[str(example["prompt"])] = completion_text(example) or ""
        texts = [known.get(str(row.prompt), first or "") for row in prompts]
    else:
        texts = ["" if row.reference_answer is None else str(row.reference_answer) for row in prompts]
    return [text if index % 2 == 0 else "" for index, text in enumerate(texts)]


def untokenized(row: Mapping[str, Any], column: str) -> PromptRow:
    """A row as rewards see it."""
    metadata = {key: value for key, value in row.items() if key not in ("prompt", column)}
    return PromptRow("", row["prompt"], [], row.get(column), metadata)


def with_progress(rows: Rows, total: int, job: Job) -> Iterator[Row]:
    """The rows, with a sign of life after every thousand: a large file must not look like a hung engine."""
    for number, row in enumerate(rows, 1):
        yield row
        if number % ROWS_PER_REPORT == 0:
            job.progress(number, total, f"rows of {rows.source} tokenized")


def _read_model(job: Job, spec: PrepareDatasetJob) -> tuple[Any, Any, int | None]:
    """Tokenizer and configuration, which fit each other, and the length of the model's context."""
    from ppo_core.data.tokenization import check_kept, context_length, load_tokenizer, model_config

    trusted = job.permissions.trust_remote_code
    tokenizer = load_tokenizer(job.inputs["tokenizer"].path, trust_remote_code=trusted)
    model = str(job.inputs["model"].path) if "model" in job.inputs else None
    config = model_config(model, spec.model.config, len(tokenizer), trust_remote_code=trusted)
    check_kept(tokenizer, config, trust_remote_code=trusted)
    return tokenizer, config, context_length(config)


def _check_enough(rows: int, spec: PrepareDatasetJob) -> None:
    if rows < spec.num_eval_prompts:
        raise InputError(
            f"evaluation.num_prompts={spec.num_eval_prompts} is more than the {rows} rows of "
            f"{spec.dataset.evaluation}: lower it"
        )


def _check_vocabulary(source: str, prompts: pa.Table, tokenizer: Any, config: Any) -> None:
    size = int(config.get_text_config().vocab_size)
    token = max(int(tokenizer.eos_token_id), pc.max(pc.list_flatten(prompts["prompt_token_ids"])).as_py())
    if token >= size:
        raise InputError(
            f"{source}: the tokenizer writes {tokenizer.convert_ids_to_tokens(token)!r} as token {token}, but the "
            f"model's vocab_size is {size}: give the model's own tokenizer, or a model of at least {len(tokenizer)}"
        )
