"""Engines as the tasks start them, and their jobs in short."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from infra.engines.process import EngineInput, EngineJob, EngineProcess, EngineProgress, EngineReply
from infra.settings import Settings
from ppo_core.data.tables import read_rollouts
from ppo_core.records import PromptRow, RolloutRow
from ppo_core.spec import RunSpec
from tasks.stages.engine_programs import (
    PROGRAMS,
    rollout_environment,
    scoring_environment,
    training_command,
    training_environment,
)
from tests.ppo_core.written_tables import write_prompts
from tests.waiting import LONG_S

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 900.0  # the first job waits for the imports: 20 s on a quiet machine


@dataclass(frozen=True)
class Client:
    """A running engine with a folder for what its jobs write."""

    engine: EngineProcess
    folder: Path
    numbers: itertools.count[int]

    def output(self) -> Path:
        """A new empty folder."""
        folder = self.folder / f"job-{next(self.numbers)}"
        folder.mkdir()
        return folder

    def run(
        self,
        name: str,
        inputs: Mapping[str, Path],
        spec: Mapping[str, Any],
        output: Path | None,
        on_progress: Callable[[EngineProgress], None] | None = None,
        code: str = "",
    ) -> EngineReply:
        """One job; a folder's path serves as its digest, for no test writes into one twice. `code`: that of `sources`.

        Without it, whatever code there is.
        """
        given = {key: EngineInput(path, code if key == "sources" else str(path)) for key, path in inputs.items()}
        return self.engine.run(EngineJob(name, given, output, spec), timeout_s=TIMEOUT_S, on_progress=on_progress)

    def generate(self, checkpoint: Path, dataset: Path, **changes: Any) -> list[RolloutRow]:
        """The rollouts of `checkpoint` (a folder with `policy/`) for the prompts of `dataset`."""
        output = self.output()
        self.run("generate_rollouts", {"checkpoint": checkpoint, "dataset": dataset}, generate_spec(**changes), output)
        return read_rollouts(output / "rollouts.parquet")


def open_engine(name: str, folder: Path, spec: RunSpec | None = None) -> Client:
    """An engine as the tasks start it for a run of `spec`."""
    spec = spec or minimal_spec()
    settings = Settings(home=folder)
    environment = {"rollout": rollout_environment(settings), "scoring": scoring_environment(settings)}.get(name)
    if environment is None:
        environment = training_environment(settings, num_ranks=spec.training.num_ranks)
    engine = EngineProcess(
        name,
        PROGRAMS[name],
        log=folder / f"{name}.log",
        environment={**environment, "PYTHONPATH": str(ROOT)},
        command=training_command(spec.training.num_ranks) if name == "training" else None,
    )
    engine.start()
    return Client(engine, folder, itertools.count())


def ends_by_itself(client: Client) -> bool:
    """Close it; whether it then ended without being killed, however long a busy machine takes for that."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("infra.engines.process.CLOSE_GRACE_S", LONG_S)
        began = time.monotonic()
        client.engine.close()
    return time.monotonic() - began < LONG_S


def generate_spec(**changes: Any) -> dict[str, Any]:
    """A GenerateJob as JSON."""
    return {
        "seed": 3,
        "stream": 1,
        "split": "train",
        "position": 0,
        "num_prompts": 4,
        "shuffle": False,
        "samples_per_prompt": 1,
        "max_response_tokens": 16,
        "temperature": 1.0,
        "model": {"path": "policy"},
        "kv_cache_gib": 0.05,
        "tensor_parallel_size": 1,
        **changes,
    }


def minimal_spec() -> RunSpec:
    return RunSpec.model_validate({"dataset": {"train": "x"}, "model": {"path": "x"}, "reward": {"function": "x.py:y"}})


def write_dataset(folder: Path, prompts: list[list[int]]) -> Path:
    """A dataset of token prompts, named p0, p1, ...; train and eval are the same."""
    folder.mkdir(parents=True)
    rows = [PromptRow(f"p{number}", f"prompt {number}", ids, None, {}) for number, ids in enumerate(prompts)]
    for split in ("train", "eval"):
        write_prompts(folder / f"{split}.parquet", rows)
    return folder


def tokens_of(rows: list[RolloutRow]) -> list[list[int]]:
    return [row.response_token_ids for row in rows]
