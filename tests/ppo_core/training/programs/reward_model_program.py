"""What the training of reward models leaves, in a process of its own; see `training_program`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ppo_core.data.rankings import Ranking
from ppo_core.data.tables import SOURCES, write_sources
from ppo_core.models.packing import packs
from ppo_core.models.reward_model import ClassifierFolder, reward_model_of, scores_of
from ppo_core.processes.ranks import Ranks
from ppo_core.records import TrainRewardModelJob
from ppo_core.spec import FitSpec, ModelSpec, TrainingSpec
from ppo_core.training.checkpoint import full_weights
from ppo_core.training.deepspeed_engine import Trainable
from ppo_core.training.reward_model import train_reward_model
from ppo_core.training.service import TrainingEngine
from ppo_core.training.supervised import supervised_settings
from tests.ppo_core.tiny_models import EOS, VOCABULARY, tiny_folder, tiny_policy, tiny_tokenizer
from tests.ppo_core.training.programs.replay_program import do, given
from tests.ppo_core.written_tables import write_rankings

Facts = dict[str, Any]
SEED = 3
FIT = FitSpec(num_steps=1, batch_size=4, warmup_steps=0, learning_rate=5e-4, label_smoothing=0.1, centring=0.05)


def rankings() -> list[Ranking]:
    """Two pairs, one with a margin, and two rankings of three and four; texts of 1 to 9 tokens, one ends with EOS."""
    generator = torch.Generator().manual_seed(5)

    def text() -> list[int]:
        length = int(torch.randint(1, 10, (), generator=generator))
        return torch.randint(2, VOCABULARY, (length,), generator=generator).tolist()

    rows = [Ranking([text() for _ in range(size)], 0.0) for size in (2, 3, 4)]
    return [Ranking([text(), [*text(), EOS]], 0.5), *rows]


def fit(root: Path, ranks: Ranks, name: str, case: str, spec: FitSpec, training: TrainingSpec) -> Facts:
    """Train, and save as the engine does; with what the weights in memory say of every text."""
    job = TrainRewardModelJob(seed=1, model=ModelSpec(path="policy"), fit=spec, training=training)
    policy, rows, tokenizer = tiny_policy(name), rankings(), tiny_tokenizer()
    texts = [text for row in rows for text in row.responses]
    folder = ClassifierFolder(policy.config, name, tokenizer.pad_token_id, {text[-1] for text in texts})
    model = reward_model_of(policy, seed=SEED)
    settings, threads = supervised_settings(spec), ranks.threads.count
    trainable = Trainable(model, settings, training, dtype="float32", threads=threads)
    losses: list[float] = []
    metrics = train_reward_model(trainable, rows, job, ranks, lambda *_: None, losses)
    with torch.no_grad():
        scores = scores_of(trainable.modules[0], texts).tolist()
    weights = full_weights(trainable, ranks)
    if ranks.is_first:
        folder.write(model, weights, tokenizer, root / case)
    packed = packs(trainable.modules[0])
    trainable.close()
    return {**metrics, "losses": losses, "scores": scores, "packed": packed}


def fits(root: Path, ranks: Ranks) -> Facts:
    """One step on all rows: packed and padded, in one backward pass and in several, in two ZeRO stages."""
    cases = {
        "llama": ("llama", TrainingSpec()),
        "tied": ("llama-tied", TrainingSpec(microbatch_tokens=8)),
        "gpt2": ("gpt2", TrainingSpec(microbatch_tokens=24)),
        "sharded": ("llama", TrainingSpec(zero_stage=3)),
    }
    return {case: fit(root, ranks, name, case, FIT, training) for case, (name, training) in cases.items()}


def learns(root: Path, ranks: Ranks) -> Facts:
    """Sixty steps on the same rows, twice."""
    spec = FIT.model_copy(update={"num_steps": 60, "label_smoothing": 0.0, "learning_rate": 3e-3})
    return {case: fit(root, ranks, "llama", case, spec, TrainingSpec()) for case in ("first", "again")}


def weighed(root: Path, ranks: Ranks) -> Facts:
    """One step by the engine itself: of four draws three are from a source of one row, and one from the other's."""
    data, model = root / "weighed data", tiny_folder(root / "weighed model", "llama")
    data.mkdir()
    write_rankings(data / "train.parquet", rankings())
    write_sources(
        data / SOURCES, [{"split": "train", "rows": rows, "draws": drawn} for rows, drawn in ((1, 3), (3, 1))]
    )
    job = TrainRewardModelJob(seed=1, model=ModelSpec(path="policy"), fit=FIT, training=TrainingSpec())
    inputs = given(tokenizer=model, model=model, dataset=data)
    return do(TrainingEngine(ranks), "train_reward_model", inputs, root / "weighed", job, [])


SCENARIOS: dict[str, Callable[[Path, Ranks], Facts]] = {"fits": fits, "learns": learns, "weighed": weighed}
