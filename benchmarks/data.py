"""How fast prompts become a dataset, and in how much memory: read, checked, tokenized, written by the scoring engine.

    python -m benchmarks.data [--prompts 1000000]

The tokenizer is a byte-level BPE of 8,000 tokens, trained here. Prints the figures of each form of the same prompts and
writes `benchmarks/results/data.json`.
"""

from __future__ import annotations

import csv
import json
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from benchmarks import report
from infra.engines.protocol import EngineInput, EngineJob
from infra.settings import Settings
from tasks.stages.engine_programs import EnginePlan, launch
from tasks.stages.jobs import ask

LETTERS = "aeiourstlnmdcphbgkf"
SILENCE_S = 300.0
KIB = 2**10


def main() -> None:
    """Measure every form."""
    parser = report.arguments(__doc__)
    parser.add_argument("--prompts", type=int, default=1_000_000)
    given = parser.parse_args()
    count = given.prompts
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_tokenizer(folder / "tokenizer")
        write_prompts(folder, count)
        cases = {
            "JSON lines": {"train": "prompts.jsonl"},
            "CSV": {"train": "prompts.csv"},
            "Parquet": {"train": "prompts.parquet"},
            "Parquet, repeats left out, 1 % held out": {
                "train": "prompts.parquet", "duplicates": "drop", "too_long": "drop", "evaluation_fraction": 0.01,
            },
        }  # fmt: skip
        rows = [{"case": name, **measured(folder, dataset)} for name, dataset in cases.items()]
    columns = ("form", "seconds", "of all cores", "prompts a second", "tokens a prompt", "peak memory, MiB")
    table = [
        [
            row["case"],
            row["seconds"],
            row["cpu_seconds"],
            f"{count / row['seconds']:,.0f}",
            row["tokens_per_prompt"],
            f"{row['peak_mib']:,.0f}",
        ]
        for row in rows
    ]
    report.show(f"{count:,} short prompts to a dataset", columns, table)
    report.save("data", given, rows)


def measured(folder: Path, dataset: dict[str, Any]) -> dict[str, float]:
    """One dataset by an engine of its own: seconds of the job, and the most memory that its process had."""
    spec = {
        "dataset": {**dataset, "answer_column": "answer"},
        "model": {"config": {"model_type": "llama", "max_position_embeddings": 2048}, "tokenizer": "tokenizer"},
        "sft_data": None,
        "max_response_tokens": 64,
        "num_eval_prompts": 0,
        "reward": {"sources": [{"kind": "exact_match"}]},
    }
    with tempfile.TemporaryDirectory() as place:
        output = Path(place) / "dataset"
        output.mkdir()
        engine = launch(EnginePlan("scoring", "benchmark"), Settings(home=Path(place)), Path(place))
        engine.start()
        inputs = {"sources": EngineInput(folder, ""), "tokenizer": EngineInput(folder / "tokenizer", "")}
        try:
            warm = {**spec, "dataset": {"train": "warm.jsonl"}}  # imports take seconds
            ask(engine, EngineJob("prepare_dataset", inputs, output, warm), silence_s=SILENCE_S)
            started, used = time.perf_counter(), cpu_seconds()
            ask(engine, EngineJob("prepare_dataset", inputs, output, spec), silence_s=SILENCE_S)
            seconds, used = time.perf_counter() - started, cpu_seconds() - used
            peak = max(most_memory_kib(process.pid) for process in psutil.Process().children(recursive=True))
        finally:
            engine.close()
        tokens = pq.read_table(output / "train.parquet", columns=["prompt_token_ids"])["prompt_token_ids"]
        return {
            "seconds": seconds,
            "cpu_seconds": used,
            "peak_mib": peak / KIB,
            "tokens_per_prompt": pc.mean(pc.list_value_length(tokens)).as_py(),
        }


def cpu_seconds() -> float:
    """What the engine has used of all cores."""
    times = [process.cpu_times() for process in psutil.Process().children(recursive=True)]
    return sum(one.user + one.system for one in times)


def most_memory_kib(pid: int) -> int:
    """The most that a process has had in memory so far."""
    facts = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(facts["VmHWM"].split()[0])


def write_prompts(folder: Path, count: int) -> None:
    """The same prompts in each form."""
    rows = [{"prompt": text, "answer": str(number)} for number, text in enumerate(texts(count))]
    (folder / "warm.jsonl").write_text(json.dumps(rows[0]))
    with (folder / "prompts.jsonl").open("w") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in rows)
    with (folder / "prompts.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, ["prompt", "answer"])
        table.writeheader()
        table.writerows(rows)
    pq.write_table(pa.Table.from_pylist(rows), folder / "prompts.parquet")


def texts(count: int) -> Iterator[str]:
    """Questions of ten words, of a vocabulary of three thousand."""
    draw = random.Random(0)
    words = ["".join(draw.choices(LETTERS, k=draw.randint(2, 8))) for _ in range(3000)]
    for _ in range(count):
        yield " ".join(["What is", *draw.choices(words, k=8)]) + "?"


def write_tokenizer(folder: Path) -> None:
    """A BPE in the form of GPT-2's, trained on such questions."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=8000, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts(20_000), trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)


if __name__ == "__main__":
    main()
