"""What a run starts from, read and checked in the scoring engine: its rows, tokenizer, context and rewards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ppo_core.data.dataset import (
    Limits,
    check_room,
    completion_text,
    in_parts,
)
from ppo_core.data.description import keys_of
from ppo_core.data.number_columns import columns_of
from ppo_core.data.preparation import PROMPT_SPLITS, Preparation
from ppo_core.data.rows import Columns, Row, Rows, check_question, read_rows, value_in
from ppo_core.data.sieve import HALF, unpacked
from ppo_core.data.tallies import left_out
from ppo_core.engines.rollout_limits import check_stop_tokens
from ppo_core.processes.lean_imports import quick_imports
from ppo_core.processes.plugins import Sources
from ppo_core.processes.protocol import Job
from ppo_core.records import InputError, PrepareDatasetJob, PromptRow
from ppo_core.scoring.reward import Sample
from ppo_core.scoring.weighted import WeightedRewards
from ppo_core.spec import DatasetSpec
from ppo_core.spec.hub import is_hub_name

TRIAL_ROWS = 5
ROWS_PER_REPORT = 1000


@dataclass(frozen=True)
class Trial:
    """What the rewards say of the first few rows, or why nothing."""

    scores: list[float | None]
    errors: list[str | None]


@dataclass(frozen=True)
class Start:
    """The tables of prompts and, as `sft`, of examples; what there is to tell of their sources; and the trial.

    `config` is the model's Hugging Face configuration, `tokenizer` the run's, `longest_prompt` the tokens of the
    longest of all splits.
    """

    tables: dict[str, pa.Table]
    sources: list[dict[str, Any]]
    longest_prompt: int
    config: Any
    tokenizer: Any
    context_length: int | None
    trial: Trial

    def counts(self) -> dict[str, int]:
        """Rows by split."""
        return {split: len(self.tables[split]) for split in ("train", "eval", "sft") if split in self.tables}

    def facts(self) -> dict[str, Any]:
        """What a check tells of it."""
        return {
            "counts": self.counts(),
            "left_out": left_out(self.sources),
            "context_length": self.context_length,
            "longest_prompt": self.longest_prompt,
            "scores": self.trial.scores,
            "errors": self.trial.errors,
        }

    def held_out_among(self, learned: str) -> int:
        """Held-out prompts that are among those `packed` ones."""
        known = unpacked(learned)
        if not known or "eval" not in self.tables:
            return 0
        return sum(key[:HALF] in known for key in keys_of(self.tables["eval"]))


@dataclass(frozen=True)
class Scanned:
    """How many rows a split has, its first few, and whether any has an answer."""

    count: int
    first: list[PromptRow]
    answered: bool


def read_start(job: Job, spec: PrepareDatasetJob, *, new: bool = False) -> Start:
    """Every row, tokenized, after every check that needs no model weights. Raises InputError, and RewardFailed.

    With `new` no run has begun by it yet: rewards' options are checked too. What needs no tokenizer comes first:
    transformers takes seconds to import.
    """
    sources, column = sources_of(job), spec.dataset.answer_column
    rewards = WeightedRewards(spec.reward, sources, column, job.progress)
    if new:
        rewards.check_options()
    rows = rows_of_splits(spec, sources)
    scanned = {split: scan(rows[split], rewards, column, job, new=new) for split in PROMPT_SPLITS if split in rows}
    if "eval" in scanned:
        _check_enough(scanned["eval"].count, spec)
    tried = scanned["train"].first
    counts = {split: found.count for split, found in scanned.items()}
    completions = example_completions(counted(rows["sft"][0], "sft", counts) if "sft" in rows else None, tried)
    if new:
        answered = any(found.answered for found in scanned.values())
        _check_columns(spec.dataset, rows["train"][0].columns.met, answered=answered)
    parts = rewards.score([Sample(row, text) for row, text in zip(tried, completions, strict=True)])
    with quick_imports():
        tokenizer, config, context = _read_model(job, spec)
    for number, text in enumerate(completions):
        if (seen := as_rewards_see(tokenizer, text)) != text:
            (parts[number],) = rewards.score([Sample(tried[number], seen)])
    check_stop_tokens(spec.stop_token_ids, len(tokenizer))
    limits = Limits(context, spec.dataset.max_prompt_tokens, spec.max_response_tokens)
    made = Preparation(spec.dataset, tokenizer, limits, columns_of(spec))
    # Held-out prompts first, where those to train on must not be among them.
    order = PROMPT_SPLITS[::-1] if spec.dataset.duplicates == "drop" else PROMPT_SPLITS
    for split in (split for split in order if split in rows):
        for source in rows[split]:
            made.add_prompts(split, source.source, with_progress(source, counts[split], job))
    for source in rows.get("sft", []):
        made.add_examples(source.source, with_progress(source, counts["sft"], job))
    tables = made.finished()
    check_room(made.longest(), limits)
    if spec.dataset.evaluates:
        _check_enough(len(tables.get("eval", ())), spec)
    for split in (split for split in PROMPT_SPLITS if split in tables):
        _check_vocabulary(split_name(split, spec), [tables[split]["prompt_token_ids"]], tokenizer, config)
    if "sft" in tables:
        examples = [tables["sft"][name] for name in ("prompt_token_ids", "completion_token_ids")]
        _check_vocabulary(str(spec.sft_data), examples, tokenizer, config)
    trial = Trial([rewards.total(part.scores) for part in parts], [part.error() for part in parts])
    return Start(tables, made.sources(), made.longest().tokens, config, tokenizer, context, trial)


def rows_of_splits(spec: PrepareDatasetJob, sources: Sources) -> dict[str, list[Rows]]:
    """The rows to train on, to evaluate with and to start from; functions are called here."""
    data = spec.dataset
    columns = Columns(data.prompt_column, dropped=data.drop_columns, chat=data.chat, system_prompt=data.system_prompt)
    examples = replace(
        columns, prompt=spec.sft_prompt_column, completion=spec.sft_completion_column, dropped=(), met=set()
    )
    given = {"train": [read_rows(source.path, sources, columns) for source in data.sources]}
    if data.evaluation is not None:
        given["eval"] = [read_rows(data.evaluation, sources, columns)]
    if spec.sft_data is not None:
        given["sft"] = [read_rows(spec.sft_data, sources, examples)]
    return given


def sources_of(job: Job) -> Sources:
    """The folder of the user's code and data, and from where code may come."""
    given, permitted = job.inputs["sources"], job.permissions
    downloads = {name: found.path for name, found in job.inputs.items() if is_hub_name(name)}
    return Sources(
        given.path,
        permitted.plugins,
        permitted.trust_remote_code,
        given.digest,
        permitted.run_generated_code,
        permitted.reward_urls,
        downloads,
    )


def scan(given: Sequence[Rows], rewards: WeightedRewards, column: str, job: Job, *, new: bool) -> Scanned:
    """Have each row checked, for itself and by the rewards. Raises InputError."""
    count, first, answered = 0, list[PromptRow](), False
    for rows in given:
        number = 0
        for part in in_parts(rows, ROWS_PER_REPORT):
            for row in part if new else ():
                check_question(row)
            prompts = [untokenized(row.content, column) for row in part]
            with naming(rows.source, several=len(given) > 1):
                rewards.check_rows(prompts, number + 1)
            first += [] if number else prompts[: max(1, TRIAL_ROWS // len(given))]
            answered = answered or any(row.reference_answer is not None for row in prompts)
            number += len(part)
            if len(part) == ROWS_PER_REPORT:
                job.progress(0, 0, f"{number:,} rows of {rows.source} read")
        count += number
    return Scanned(count, first, answered)


@contextmanager
def naming(source: str, *, several: bool) -> Iterator[None]:
    """Say of which source a row is, where there are several."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{source}: {error}" if several else str(error)) from None


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


def as_rewards_see(tokenizer: Any, text: str) -> str:
    """A completion as rewards get a response of its tokens: without the special ones that it has."""
    from ppo_core.data.tokenization import decode_response, special_tokens_in

    ids, special = special_tokens_in(tokenizer, text)
    return decode_response(tokenizer, ids) if special else text


def counted(rows: Rows, split: str, counts: dict[str, int]) -> Iterator[Mapping[str, Any]]:
    """The rows' contents; after the last `counts` has how many there are."""
    for number, row in enumerate(rows, 1):
        yield row.content
        counts[split] = number


def untokenized(row: Mapping[str, Any], column: str) -> PromptRow:
    """A row as rewards see it."""
    metadata = {key: value for key, value in row.items() if key not in ("prompt", column)}
    return PromptRow("", row["prompt"], [], value_in(row, column), metadata)


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


def split_name(split: str, spec: PrepareDatasetJob) -> str:
    """What people know the rows of a split by."""
    data = spec.dataset
    if split == "train" or data.evaluation is not None:
        return str(data.label if split == "train" else data.evaluation)
    return f"{data.label} that dataset.evaluation_fraction={data.evaluation_fraction:g} holds out"


def _check_columns(data: DatasetSpec, met: set[str], *, answered: bool) -> None:
    """Raise InputError where a column that the spec names is in no row; answers may be missing under their own name."""
    none, answer = f"no row has it (columns: {', '.join(sorted(map(str, met)))}): name one of these", data.answer_column
    if not answered and answer not in met and answer != DatasetSpec.model_fields["answer_column"].default:
        raise InputError(f"dataset.answer_column={answer}: {none}, or leave the key out")
    for name in data.drop_columns:
        if name not in met:
            raise InputError(f"dataset.drop_columns has {name!r}: {none}, or remove it")


def _check_enough(rows: int, spec: PrepareDatasetJob) -> None:
    fraction = spec.dataset.evaluation_fraction
    if not rows and fraction:
        raise InputError(
            f"dataset.evaluation_fraction={fraction:g} holds out none of the rows of {spec.dataset.label}: raise "
            "dataset.evaluation_fraction, or name held-out prompts in dataset.evaluation"
        )
    if rows < spec.num_eval_prompts:
        more = ", or raise dataset.evaluation_fraction" if fraction else ""
        raise InputError(
            f"evaluation.num_prompts={spec.num_eval_prompts} is more than the {rows} row{'' if rows == 1 else 's'} of "
            f"{split_name('eval', spec)}: lower it{more}"
        )


def _check_vocabulary(source: str, texts: Iterable[pa.ChunkedArray], tokenizer: Any, config: Any) -> None:
    """Raise InputError where a token of these lists of tokens, or the EOS, is beyond the model's vocabulary."""
    size = int(config.get_text_config().vocab_size)
    token = max(int(tokenizer.eos_token_id), *(pc.max(pc.list_flatten(text)).as_py() or 0 for text in texts))
    if token >= size:
        raise InputError(
            f"{source}: the tokenizer writes {tokenizer.convert_ids_to_tokens(token)!r} as token {token}, but the "
            f"model's vocab_size is {size}: give the model's own tokenizer, or a model of at least {len(tokenizer)}"
        )
