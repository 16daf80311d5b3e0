"""Reward models: sequence classifiers with one label, in batches without one more padding token than needed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from ppo_core.data.batches import microbatches
from ppo_core.data.tokenization import any_tokenizer, context_length, scored_tokens
from ppo_core.models.loading import load_whole
from ppo_core.processes.aside import Aside
from ppo_core.processes.turns import gpu_bytes_free
from ppo_core.processes.vector_math import prepare_vector_math
from ppo_core.records import InputError

NO_PADDING = -1
CPU_TOKENS = 1024
"""More in a pass are slower on a CPU: what a layer writes leaves its cores' caches before the next one reads it."""


class Pass(NamedTuple):
    """Sequences, by their numbers, that go through the model together, and the token that fills up the shorter ones."""

    rows: list[int]
    pad: int


def passes(sequences: Sequence[Sequence[int]], budget: int, vocab_size: int) -> list[Pass]:
    """All sequences once; a pass has at most `budget` tokens, or one sequence.

    The largest comes first: if memory runs out, then at once.
    """
    (parts,) = microbatches(range(len(sequences)), [len(one) for one in sequences], tokens=budget, padded=True)
    found: list[Pass] = []
    for rows in reversed(parts):
        pad = _padding([sequences[row] for row in rows])
        found += [Pass(rows, pad)] if pad < vocab_size else [Pass([row], NO_PADDING) for row in rows]
    return found


def _padding(sequences: Sequence[Sequence[int]]) -> int:
    """transformers takes the last token that is not the padding's, so that must be one that is in none of these."""
    if len(set(map(len, sequences))) == 1:
        return NO_PADDING
    used = {token for sequence in sequences for token in sequence}
    return next(token for token in range(len(used) + 1) if token not in used)


def forward(model: Any, sequences: Sequence[Sequence[int]], pad: int) -> list[float]:
    """The model's one number for each sequence, of which the shorter ones are filled up with `pad`."""
    model.config.get_text_config().pad_token_id = pad
    shape = len(sequences), max(map(len, sequences))
    ids, mask = torch.full(shape, pad), torch.zeros(shape, dtype=torch.long)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = torch.tensor(sequence)
        mask[row, : len(sequence)] = 1
    device = model.device
    logits = model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits
    found: list[float] = logits[:, 0].float().tolist()
    return found


def require_device(device: str, whose: str) -> None:
    """Raise InputError where `device` is a GPU and there is none; `whose` is the key of the spec that says so."""
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError(
            f"{whose}=cuda, but this machine has no GPU that can be used: set it to cpu, or to auto, which takes a GPU "
            "where there is one"
        )


def check_gpus(num_ranks: int, whose: str) -> None:
    """Raise InputError where the ranks of the reward `whose` are more than this machine's GPUs."""
    gpus = torch.cuda.device_count()
    if num_ranks > gpus:
        raise InputError(
            f"num_ranks={num_ranks} of the reward {whose} is more than the {gpus} GPUs here, and each rank has one: "
            f"lower it to {gpus}, or set its device to cpu"
        )


def on_gpu(device: str) -> bool:
    """Whether a reward model of `device` computes on a GPU here."""
    return device != "cpu" and torch.cuda.is_available()


def load_classifier(folder: Path, *, dtype: str, trust_remote_code: bool) -> Any:
    """A classifier with one label, in main memory. Raises InputError where the folder holds no such model."""
    auto = transformers.AutoModelForSequenceClassification
    model = load_whole(auto, "sequence classifier", folder, dtype=dtype, trust_remote_code=trust_remote_code)
    require_one_label(model.config, folder)
    return model.eval()


def require_one_label(config: Any, folder: Path) -> None:
    """Raise InputError where the classifier in `folder` has several."""
    if config.num_labels != 1:
        raise InputError(
            f"{folder} has num_labels={config.num_labels} in its config.json, but a reward model gives one score: use "
            "one that was trained with num_labels=1"
        )


def readable_tokens(model: Any) -> int | None:
    """The length of the model's context; None where nothing limits it."""
    return _positions(model) or context_length(model.config)


def _positions(model: Any) -> int | None:
    """How many tokens a model reads whose positions begin after that of padding, as RoBERTa's do; None: from 0."""
    tables = [table for name, table in model.named_modules() if name.rpartition(".")[2] == "position_embeddings"]
    return min(
        (
            table.num_embeddings - table.padding_idx - 1
            for table in tables
            if isinstance(table, torch.nn.Embedding) and table.padding_idx is not None
        ),
        default=None,
    )


class ScoredText:
    """How the model of a folder reads a text. Raises InputError where the folder has no tokenizer."""

    def __init__(self, folder: Path, *, trust_remote_code: bool) -> None:
        self.folder = folder
        remedy = "put the reward model's own tokenizer there"
        self.tokenizer = any_tokenizer(folder, remedy, trust_remote_code=trust_remote_code)

    def tokens(self, prompt: Any, response: str) -> list[int]:
        """What it reads of a prompt and the response to it. Raises InputError for messages that it cannot read."""
        return scored_tokens(self.tokenizer, prompt, response, self.folder)


class Classifier:
    """A model of a Hugging Face folder with its tokenizer. Raises InputError saying why it cannot score a text.

    It computes in this process, on the first GPU where `device` is auto or cuda and there is one.
    """

    def __init__(self, folder: Path, *, dtype: str, trust_remote_code: bool, device: str = "auto") -> None:
        prepare_vector_math()
        model = load_classifier(folder, dtype=dtype, trust_remote_code=trust_remote_code)
        self._text = ScoredText(folder, trust_remote_code=trust_remote_code)
        self.context = readable_tokens(model)
        self.model = model.to("cuda" if on_gpu(device) else "cpu")
        self._aside = Aside()

    def tokens(self, prompt: Any, response: str) -> list[int]:
        """See `ScoredText`."""
        return self._text.tokens(prompt, response)

    def scores(
        self, sequences: Sequence[Sequence[int]], budget: int, progress: Callable[[int], None] = lambda _: None
    ) -> list[float]:
        """One number for each sequence; a pass has at most `budget` tokens, or one sequence."""
        self._aside.bring_back()
        with torch.inference_mode():
            return self._scores(sequences, budget, progress)

    def _scores(self, sequences: Sequence[Sequence[int]], budget: int, progress: Callable[[int], None]) -> list[float]:
        scores, done = [0.0] * len(sequences), 0
        if self.model.device.type == "cpu":
            budget = min(budget, CPU_TOKENS)
        for rows, pad in passes(sequences, budget, self.model.config.get_text_config().vocab_size):
            for row, score in zip(rows, forward(self.model, [sequences[row] for row in rows], pad), strict=True):
                scores[row] = score
            done += len(rows)
            progress(done)
        return scores

    def make_room(self) -> int:
        """Leave the GPU to other engines, until the next scores; returns the bytes that it has more of now.

        On a CPU there is no other place.
        """
        if self.model.device.type == "cpu":
            return 0
        before = gpu_bytes_free()
        self._aside.move([*self.model.parameters(), *self.model.buffers()])
        gc.collect()
        torch.cuda.empty_cache()
        return gpu_bytes_free() - before

    def close(self) -> None:
        """Free what it holds of a GPU; there are no more scores."""
        self.model = None
        gc.collect()
        torch.cuda.empty_cache()
