"""How fast is the rollout engine beside `generate` of transformers: same model, prompts, longest response, stop tokens.

    python -m benchmarks.rollout [--shapes demo 27M] [--dtypes float32] [--rounds 5]

The model is a new one that finds all tokens about as likely; so many of them end a response that lengths are spread as
in training. `generate` has all prompts in one batch, in this process; the engine is one as runs have it, and its job
reads the checkpoint's digest and writes its table too. Rounds take turns, each with a seed of its own. Prints response
tokens a second, medians, and writes `benchmarks/results/rollout.json`.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks import report
from benchmarks.shapes import PROMPT, SHAPES, Shape, write_tokenizer
from infra.engines.protocol import Engine, EngineInput, EngineJob
from infra.settings import Settings
from ppo_core.data.tables import PROMPTS, prompt_document
from ppo_core.records import GenerateJob, PromptRow
from ppo_core.spec import ModelSpec
from tasks.stages.engine_programs import EnginePlan, launch
from tasks.stages.jobs import ask

ENGINE, GENERATE = "rollout engine", "generate"
SILENCE_S = 600.0


def main() -> None:
    """All shapes, all dtypes, both sides in turns."""
    parser = report.arguments(__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["demo", "27M"])
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32"])
    parser.add_argument("--responses", type=int, help="another number than the shape's")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    figures = dict[str, Any]()
    with tempfile.TemporaryDirectory() as place:
        engine = launch(EnginePlan("rollout", "benchmark"), Settings(home=Path(place)), Path(place))
        engine.start()
        try:
            for name in given.shapes:
                shape = replace(SHAPES[name], responses=given.responses or SHAPES[name].responses)
                for dtype in given.dtypes:
                    both = Both(engine, Path(place) / f"{name}-{dtype}", shape, dtype)
                    figures[f"{name}, {dtype}"] = both.compare(given.rounds)
                    report.save("rollout", given, figures)
        finally:
            engine.close()
    for case, sides in figures.items():
        show(case, sides)


class Both:
    """The same policy and prompts for both sides."""

    def __init__(self, engine: Engine, folder: Path, shape: Shape, dtype: str) -> None:
        from ppo_core.models.loading import create_policy

        self.engine, self.folder, self.shape = engine, folder, shape
        self.stops = stop_tokens(shape)
        config = {"eos_token_id": 0, **shape.config}
        self.policy = create_policy(config, vocab_size=shape.vocabulary, seed=0, dtype=dtype)
        self.policy.save_pretrained(folder / "checkpoint/policy")
        write_tokenizer(shape.vocabulary, folder / "checkpoint/policy")
        dice = Random(0)
        self.prompts = [[dice.randrange(2, shape.vocabulary) for _ in range(PROMPT)] for _ in range(shape.responses)]
        (folder / "dataset").mkdir()
        rows = [PromptRow(f"p{number}", "", ids, None, {}) for number, ids in enumerate(self.prompts)]
        table = pa.Table.from_pylist([prompt_document(row) for row in rows], schema=PROMPTS)
        pq.write_table(table, folder / "dataset/train.parquet")
        self.job = GenerateJob(
            seed=0,
            stream="benchmark",
            split="train",
            position=0,
            num_prompts=shape.responses,
            shuffle=False,
            samples_per_prompt=1,
            max_response_tokens=shape.longest,
            stop_token_ids=tuple(self.stops),
            temperature=1.0,
            model=ModelSpec(path="policy", dtype=dtype),
            kv_cache_gib=1.0,
            tensor_parallel_size=1,
        )

    def compare(self, rounds: int) -> dict[str, list[dict[str, float]]]:
        """Seconds and response tokens of each round, after a first one that warms up."""
        found: dict[str, list[dict[str, float]]] = {ENGINE: [], GENERATE: []}
        for seed in range(rounds + 1):
            for side, sample in ((ENGINE, self.sampled), (GENERATE, self.generated)):
                began = time.perf_counter()
                tokens = sample(seed)
                found[side].append({"tokens": tokens, "seconds": time.perf_counter() - began})
        return {side: each[1:] for side, each in found.items()}

    def sampled(self, seed: int) -> int:
        """Response tokens by a job of the engine."""
        paths = (self.folder / "checkpoint", self.folder / "dataset")
        inputs = {path.name: EngineInput(path, str(path)) for path in paths}
        output = self.folder / f"rollouts{seed}"
        output.mkdir()
        spec = self.job.model_copy(update={"seed": seed}).model_dump(mode="json")
        reply = ask(self.engine, EngineJob("generate_rollouts", inputs, output, spec), silence_s=SILENCE_S)
        return int(reply.result["num_response_tokens"])

    def generated(self, seed: int) -> int:
        """The same by transformers."""
        import torch

        torch.manual_seed(seed)
        ids = torch.tensor(self.prompts)
        with torch.no_grad():
            made = self.policy.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=self.shape.longest,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                eos_token_id=[0, *self.stops],
                pad_token_id=0,
            )
        return response_tokens(made[:, PROMPT:].tolist(), {0, *self.stops})


def stop_tokens(shape: Shape) -> list[int]:
    """So many that responses of a model that finds all tokens as likely have the shape's mean length."""
    return list(range(2, 2 + round(2 * shape.vocabulary / (shape.shortest + shape.longest))))


def response_tokens(rows: list[list[int]], stops: set[int]) -> int:
    """How many tokens, each row's up to the first that stops it, that one counted."""
    return sum(next((place for place, token in enumerate(row, 1) if token in stops), len(row)) for row in rows)


def show(case: str, sides: dict[str, list[dict[str, float]]]) -> None:
    """Ratios above 1 are faster than generate."""
    rates = {side: statistics.median(one["tokens"] / one["seconds"] for one in each) for side, each in sides.items()}
    rows = [
        [
            side,
            statistics.median(one["seconds"] for one in each),
            f"{statistics.median(one['tokens'] for one in each):.0f}",
            f"{rates[side]:.0f}",
            rates[side] / rates[GENERATE],
        ]
        for side, each in sides.items()
    ]
    report.show(f"rollouts, {case}", ("", "seconds", "response tokens", "tokens/s", "over generate"), rows)


if __name__ == "__main__":
    main()
