"""What the training of policies on preferences leaves, in a process of its own; see `tests.ppo_core.conftest`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ppo_core.data.rankings import Ranking
from ppo_core.data.tables import SOURCES, write_sources
from ppo_core.models.lora import adapt
from ppo_core.models.packing import packs
from ppo_core.processes.ranks import Ranks
from ppo_core.records import TrainDpoJob
from ppo_core.spec import DpoFitSpec, LoraSpec, TrainingSpec
from ppo_core.training.checkpoint import write_network
from ppo_core.training.deepspeed_engine import Trainable
from ppo_core.training.dpo import train_dpo
from ppo_core.training.service import TrainingEngine
from ppo_core.training.supervised import supervised_settings
from tests.ppo_core.tiny_models import EOS, VOCABULARY, tiny_folder, tiny_policy, tiny_tokenizer
from tests.ppo_core.training.programs.replay_program import do, given
from tests.ppo_core.written_tables import write_rankings

Facts = dict[str, Any]
FIT = DpoFitSpec(
    num_steps=2,
    batch_size=4,
    warmup_steps=0,
    learning_rate=5e-4,
    final_lr_fraction=1.0,
    label_smoothing=0.1,
    beta=0.5,
)
LORA = LoraSpec(rank=2, alpha=6.0)
LORA_SEED = 3
ADAPTED = {"adapted": ("llama", TrainingSpec()), "adapted and sharded": ("llama", TrainingSpec(zero_stage=3))}
NORMALISED = FIT.model_copy(update={"length_normalised": True, "beta": 3.0})


def rankings() -> list[Ranking]:
    """Two pairs, one with a margin, and rankings of three and four; prompts of 1 to 4 tokens, responses of 2 to 7."""
    generator = torch.Generator().manual_seed(5)

    def tokens(most: int) -> list[int]:
        length = int(torch.randint(1, most + 1, (), generator=generator))
        return torch.randint(2, VOCABULARY, (length,), generator=generator).tolist()

    rows = []
    for size, margin in ((2, 0.5), (2, 0.0), (3, 0.0), (4, 0.0)):
        prompt = tokens(4)
        rows.append(Ranking([[*prompt, *tokens(6), EOS] for _ in range(size)], margin, len(prompt)))
    return rows


def fit(
    root: Path,
    ranks: Ranks,
    name: str,
    case: str,
    spec: DpoFitSpec,
    training: TrainingSpec,
    lora: LoraSpec | None = None,
) -> Facts:
    """Train on all rows, two of which are also measured as held out, and save as the engine does."""
    job = TrainDpoJob(seed=1, dtype="float32", dpo=spec, training=training)
    policy, rows = tiny_policy(name), rankings()
    if lora is not None:
        adapt(policy, lora, seed=LORA_SEED)
    settings, threads = supervised_settings(spec), ranks.threads.count
    trainable = Trainable(policy, settings, training, dtype="float32", threads=threads)
    found = train_dpo(trainable, rows, rows[1:3], job, ranks, lambda *_: None)
    made = root / (case if ranks.world_size == 1 else f"{case}-{ranks.world_size}")
    write_network(made, "policy", trainable, tiny_tokenizer(), ranks)
    packed = packs(trainable.modules[0])
    trainable.close()
    return {**found._asdict(), "packed": packed}


def fits(root: Path, ranks: Ranks) -> Facts:
    """Two steps on all rows: in one backward pass and in several, in two ZeRO stages, by sums and by means."""
    cases = {
        "llama": ("llama", FIT, TrainingSpec()),
        "tied": ("llama-tied", FIT, TrainingSpec(microbatch_tokens=8)),
        "gpt2": ("gpt2", FIT, TrainingSpec(microbatch_tokens=24)),
        "sharded": ("llama", FIT, TrainingSpec(zero_stage=3)),
        "normalised": ("llama", NORMALISED, TrainingSpec()),
    }
    whole = {case: fit(root, ranks, name, case, spec, training) for case, (name, spec, training) in cases.items()}
    adapted = {case: fit(root, ranks, name, case, FIT, training, LORA) for case, (name, training) in ADAPTED.items()}
    return whole | adapted


def learns(root: Path, ranks: Ranks) -> Facts:
    """Forty steps on the same rows, twice."""
    spec = FIT.model_copy(update={"num_steps": 40, "label_smoothing": 0.0, "learning_rate": 2e-3})
    return {case: fit(root, ranks, "llama", case, spec, TrainingSpec()) for case in ("first", "again")}


def weighed(root: Path, ranks: Ranks) -> Facts:
    """One step by the engine itself: of four draws three are from a source of one row, and one from the other's."""
    data, start = root / "weighed data", root / "weighed start"
    data.mkdir()
    tiny_folder(start / "policy", "llama")
    for split in ("train", "eval"):
        write_rankings(data / f"{split}.parquet", rankings())
    write_sources(
        data / SOURCES, [{"split": "train", "rows": rows, "draws": drawn} for rows, drawn in ((1, 3), (3, 1))]
    )
    spec = FIT.model_copy(update={"num_steps": 1, "label_smoothing": 0.0})
    job = TrainDpoJob(seed=1, dtype="float32", dpo=spec, training=TrainingSpec())
    return do(TrainingEngine(ranks), "train_dpo", given(checkpoint=start, dataset=data), root / "weighed", job, [])


SCENARIOS: dict[str, Callable[[Path, Ranks], Facts]] = {"fits": fits, "learns": learns, "weighed": weighed}
