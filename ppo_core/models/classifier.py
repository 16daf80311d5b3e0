"""Reward models: sequence classifiers with one label, in batches without one more padding token than needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from ppo_core.data.batches import microbatches
from ppo_core.data.tokenization import any_tokenizer, context_length, scored_tokens
from ppo_core.engines.vector_math import prepare_vector_math
from ppo_core.models.loading import load_whole
from ppo_core.records import InputError


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


class Classifier:
    """A model of a Hugging Face folder with its tokenizer. Raises InputError saying why it cannot score a text."""

    def __init__(self, folder: Path, *, dtype: str, trust_remote_code: bool) -> None:
        prepare_vector_math()
        self.folder = folder
        auto = transformers.AutoModelForSequenceClassification
        model = load_whole(auto, "sequence classifier", folder, dtype=dtype, trust_remote_code=trust_remote_code)
        if model.config.num_labels != 1:
            raise InputError(
                f"{folder} has num_labels={model.config.num_labels} in its config.json, but a reward model gives one "
                "score: use one that was trained with num_labels=1"
            )
        remedy = "put the reward model's own tokenizer there"
        self.tokenizer = any_tokenizer(folder, remedy, trust_remote_code=trust_remote_code)
        self.context = _positions(model) or context_length(model.config)
        self.model = model.eval().to("cuda" if torch.cuda.is_available() else "cpu")

    def tokens(self, prompt: Any, response: str) -> list[int]:
        """What it reads of a prompt and the response to it."""
        return scored_tokens(self.tokenizer, prompt, response, self.folder)

    @torch.inference_mode()
    def scores(
        self, sequences: Sequence[Sequence[int]], budget: int, progress: Callable[[int], None] = lambda _: None
    ) -> list[float]:
        """One number for each sequence; a pass has at most `budget` tokens, or one sequence."""
        scores, done, lengths = [0.0] * len(sequences), 0, [len(sequence) for sequence in sequences]
        (parts,) = microbatches(range(len(sequences)), lengths, tokens=budget, padded=True)
        for rows in reversed(parts):  # the largest first: if memory runs out, then at once
            for row, score in zip(rows, self._forward([sequences[row] for row in rows]), strict=True):
                scores[row] = score
            done += len(rows)
            progress(done)
        return scores

    def _forward(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        config, pad = self.model.config.get_text_config(), -1
        if len(set(map(len, sequences))) > 1:
            # transformers takes the last token that is not the padding's, so that must be one that is in none of these.
            used = {token for sequence in sequences for token in sequence}
            pad = next(token for token in range(len(used) + 1) if token not in used)
            if pad >= config.vocab_size:
                return [score for sequence in sequences for score in self._forward([sequence])]
        config.pad_token_id = pad
        shape = len(sequences), max(map(len, sequences))
        ids, mask = torch.full(shape, pad), torch.zeros(shape, dtype=torch.long)
        for row, sequence in enumerate(sequences):
            ids[row, : len(sequence)] = torch.tensor(sequence)
            mask[row, : len(sequence)] = 1
        device = self.model.device
        logits = self.model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits
        found: list[float] = logits[:, 0].float().tolist()
        return found
