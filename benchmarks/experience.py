"""How fast are rollouts turned into experience, beside plain passes of transformers, and beside TRL's PPOTrainer?

    python -m benchmarks.experience [--shapes demo 27M] [--rounds 5] [--compute-dtype float32] [--trl .ppoflow/trl]

Ours is the training engine's job: policy, reference and critic over all rows, then rewards and advantages, reading and
writing included. The plain passes are those three models one after the other over padded rows (`--rows` at once) to the
same logprobs and values. TRL, where its environment is (`benchmarks.iteration` makes it), has the policy's logits from
its sampling, and passes only reference and critic, padded to the longest response. Rounds take turns. Writes
`benchmarks/results/experience.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.iteration import TRL, has_trl, peer
from benchmarks.shapes import SHAPES, Shape
from benchmarks.training_jobs import Work, open_engine

OURS, PLAIN = "compute_advantages", "plain passes"
WARM_UP = 1


def main() -> None:
    """All shapes, all sides, in turns."""
    parser = report.arguments(__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["demo", "27M"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=32, help="of the plain passes, at once")
    parser.add_argument("--compute-dtype", choices=["auto", "float32", "bfloat16"], default="float32", help="ours")
    parser.add_argument("--trl", type=Path, default=Path(".ppoflow/trl"), help="the folder of TRL's environment")
    given = parser.parse_args()
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}
    engine, figures = open_engine(1), dict[str, Any]()
    for name in given.shapes:
        figures[name] = compare(engine, SHAPES[name], given)
        medians = {side: statistics.median(spent) for side, spent in figures[name].items()}
        rows = [[side, spent, spent / medians[OURS]] for side, spent in medians.items()]
        report.show(f"experience, {name}", ("", "seconds", "over ours"), rows)
        report.save("experience", given, figures)


def compare(engine: Any, shape: Shape, given: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of every side in every round, after a warm-up."""
    python = given.trl.absolute() / "bin/python"
    sides = [OURS, PLAIN, *([TRL] if has_trl(given.trl.absolute()) else [])]
    found: dict[str, list[float]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory() as folder:
        training = {"compute_dtype": given.compute_dtype}
        work = Work(engine, Path(folder), shape, training, "float32")
        work.start()
        passes = Plain(work.checkpoint, rows_of(work.folder))
        for number in range(WARM_UP + given.rounds):
            began = time.perf_counter()
            experience = work.compute_advantages(number)
            computed = time.perf_counter()
            logprobs, reference_logprobs, values = passes.run(given.rows)
            found[PLAIN].append(time.perf_counter() - computed)
            found[OURS].append(computed - began)
            check_equal(experience, logprobs, reference_logprobs, values)
            if TRL in found:
                found[TRL] += trls(python, work, shape)
    return {side: spent[WARM_UP:] for side, spent in found.items()}


def trls(python: Path, work: Work, shape: Shape) -> list[float]:
    """One iteration of TRL's, without an update, after its own warm-up."""
    prompts = work.folder / "prompts.json"
    prompts.write_text(json.dumps([prompt for prompt, _ in rows_of(work.folder)]))
    options = ("--epochs=0", f"--responses={shape.responses}", f"--length={shape.longest}")
    return [one["experience"] for one in peer(python, work.folder / "start/policy", prompts, 3, options)]


def rows_of(folder: Path) -> list[tuple[list[int], list[int]]]:
    """Prompt and response of each row."""
    from ppo_core.data.tables import read_rollouts

    return [(row.prompt_token_ids, row.response_token_ids) for row in read_rollouts(folder / "rollouts.parquet")]


class Plain:
    """Policy, reference and critic of a checkpoint, as transformers runs them."""

    def __init__(self, checkpoint: Path, sequences: Sequence[tuple[list[int], list[int]]]) -> None:
        from transformers import AutoModelForCausalLM

        from ppo_core.models.loading import load_critic

        self.policy, self.reference = (AutoModelForCausalLM.from_pretrained(checkpoint / "policy") for _ in range(2))
        self.critic = load_critic(checkpoint / "critic", dtype="float32")
        self.sequences = sequences

    def run(self, rows: int) -> tuple[list[list[float]], ...]:
        """Logprobs of policy and reference, and values, by row and response token: `rows` at once, padded."""
        import torch

        parts = [self.sequences[start : start + rows] for start in range(0, len(self.sequences), rows)]
        with torch.no_grad():
            return (
                [row for part in parts for row in self._logprobs(self.policy, part)],
                [row for part in parts for row in self._logprobs(self.reference, part)],
                [row for part in parts for row in self._values(part)],
            )

    def _logprobs(self, model: Any, part: Sequence[tuple[list[int], list[int]]]) -> list[list[float]]:
        ids = padded(part)
        predicted = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
        return responses(predicted.gather(2, ids[:, 1:, None])[:, :, 0], part)

    def _values(self, part: Sequence[tuple[list[int], list[int]]]) -> list[list[float]]:
        hidden = self.critic.backbone(input_ids=padded(part)).last_hidden_state
        return responses(self.critic.value_head(hidden)[:, :-1, 0], part)


def padded(part: Sequence[tuple[list[int], list[int]]]) -> Any:
    """Token ids, zeros on the right, where no causal model looks."""
    import torch

    rows = [torch.tensor([*prompt, *response]) for prompt, response in part]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def responses(found: Any, part: Sequence[tuple[list[int], list[int]]]) -> list[list[float]]:
    """What was found at the positions that predict response tokens."""
    return [
        row[len(prompt) - 1 : len(prompt) + len(response) - 1].tolist()
        for row, (prompt, response) in zip(found, part, strict=True)
    ]


def check_equal(experience: Path, *plain: list[list[float]]) -> None:
    """Both sides must have computed the same, up to the precision of ours. Raises ValueError."""
    from ppo_core.training.experience import Experience

    ours = Experience.load(experience)
    assert ours.values is not None
    for table, rows in zip((ours.old_logprobs, ours.reference_logprobs, ours.values), plain, strict=True):
        pairs = (
            (a, b) for line, row in zip(table.tolist(), rows, strict=True) for a, b in zip(line, row, strict=False)
        )
        if (difference := max(abs(a - b) for a, b in pairs)) > 0.1:
            raise ValueError(f"{experience}: the plain passes differ from the engine's by {difference}")


if __name__ == "__main__":
    main()
