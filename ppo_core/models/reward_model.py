"""A reward model while it is trained, and the Hugging Face folder that it becomes.

The trunk of a causal LM with a linear head on the last token's hidden state: what transformers calls a sequence
classifier with one label. It is trained as a critic is, packed where the architecture can, and saved by
transformers' own class, whose head is named `score`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from ppo_core.data.tokenization import shortened
from ppo_core.logprobs import response_values
from ppo_core.models.loading import Critic
from ppo_core.records import InputError, TokenSequence

HEAD = "score.weight"


def reward_model_of(policy: Any, *, seed: int) -> Critic:
    """The policy's own trunk with a new head, drawn from N(0, 1 / (hidden size + 1)).

    As in Ziegler et al. 2019, arXiv:1909.08593, section 2.1.
    """
    model = Critic(policy.base_model)
    hidden = model.value_head.weight.shape[1]
    drawn = torch.randn((1, hidden), generator=torch.Generator().manual_seed(seed)) / (hidden + 1) ** 0.5
    model.value_head.weight.data.copy_(drawn)
    return model


def scores_of(model: Any, sequences: Sequence[list[int]]) -> Tensor:
    """The score of each text `[N]` in fp32; `model` may be what DeepSpeed runs it with."""
    return response_values(model, [TokenSequence(ids, []) for ids in sequences]).final


class ClassifierFolder:
    """The sequence classifier that a reward model of this configuration is saved as; no weights yet.

    `endings` are the last tokens of the texts. Raises InputError where transformers has no such class.
    """

    def __init__(self, config: Any, name: str, pad: int | None, endings: set[int]) -> None:
        config = copy.deepcopy(config)
        config.num_labels = 1
        config.problem_type = "regression"  # else pipelines and vLLM squeeze the score between 0 and 1
        # transformers scores at the last token that is not the padding's: so that must not be one that texts end with.
        text = config.get_text_config()
        text.pad_token_id = pad if pad is not None and pad < text.vocab_size and pad not in endings else None
        if type(config) not in transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
            raise InputError(
                f"model {name}: transformers has no sequence classifier for the type {config.model_type}: use a model "
                "of another type, such as llama or qwen2"
            )
        try:
            with torch.device("meta"):
                self._shell = transformers.AutoModelForSequenceClassification.from_config(config)
        except Exception as error:
            said = f"{type(error).__name__}: {shortened(error)}"
            raise InputError(
                f"model {name}: transformers cannot make a sequence classifier from it ({said})"
            ) from error
        self._trunk = f"{self._shell.base_model_prefix}."
        if HEAD not in self._shell.state_dict():
            raise InputError(
                f"model {name}: the sequence classifier of the type {config.model_type} has more than a linear head: "
                "use a decoder, such as llama or qwen2"
            )

    @property
    def config(self) -> Any:
        """The configuration that is written."""
        return self._shell.config

    def write(self, model: Critic, weights: dict[str, Tensor], tokenizer: Any, folder: Path) -> None:
        """Write a folder that transformers and vLLM load as it is; `weights` are the full parameters by name."""
        dtype = model.value_head.weight.dtype
        state = {self._name(name): tensor for name, tensor in {**model.state_dict(), **weights}.items()}
        shell = self._shell.to(dtype).to_empty(device="cpu")
        shell.load_state_dict(state)
        shell.config.dtype = dtype
        shell.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    def _name(self, name: str) -> str:
        kind, _, rest = name.partition(".")
        return HEAD if kind == "value_head" else f"{self._trunk}{rest}"
