"""What a critic begins as: a folder of a reward model, whose scores are its first values, or of a causal LM.

A reward model is a sequence classifier with one label: a linear head, without a bias, on the hidden state of the last
token. The critic has it on every token's. Source: Stiennon et al. 2020 (arXiv:2009.01325), section 3.4.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers

from ppo_core.data.tokenization import any_tokenizer, model_config
from ppo_core.models.architectures import is_classifier, trunk_width
from ppo_core.models.classifier import load_classifier, require_one_label
from ppo_core.models.loading import Critic, critic_from_policy, empty_model, empty_policy, prepared
from ppo_core.records import InputError

TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


def critic_from(folder: Path, *, dtype: str, trust_remote_code: bool = False) -> Critic:
    """A critic with the trunk of the model in `folder`, and with its head if that is a reward model.

    The value head of any other starts at zero. Raises InputError where the folder is of neither kind.
    """
    config = model_config(str(folder), None, trust_remote_code=trust_remote_code)
    if not is_classifier(config):
        return critic_from_policy(folder, dtype=dtype, trust_remote_code=trust_remote_code)
    model = load_classifier(folder, dtype=dtype, trust_remote_code=trust_remote_code)
    head = model.get_parameter(_head(model, folder)).detach()
    critic = Critic(prepared(model.base_model))
    critic.value_head.load_state_dict({"weight": head})
    return critic


def empty_origin(config: Any, folder: Path, *, trust_remote_code: bool) -> Any:
    """The model of `folder` without memory for its weights. Raises InputError where no critic can begin as it."""
    if not is_classifier(config):
        return empty_policy(config, str(folder), trust_remote_code=trust_remote_code)
    require_one_label(config, folder)
    made_by = transformers.AutoModelForSequenceClassification
    model = empty_model(made_by, "sequence classifier", config, str(folder), trust_remote_code=trust_remote_code)
    _head(model, folder)
    return model


def require_tokens(folder: Path, tokenizer: Any, *, trust_remote_code: bool) -> None:
    """Raise InputError where the model in `folder` was not made for the run's tokens, as far as the folder tells."""
    config = model_config(str(folder), None, trust_remote_code=trust_remote_code)
    size, remedy = int(config.get_text_config().vocab_size), "use a model with the policy's tokens"
    if size < len(tokenizer):
        raise InputError(
            f"model.critic: the vocab_size of {folder} is {size}, and the run's tokenizer has {len(tokenizer)} tokens, "
            f"which the critic reads: {remedy}"
        )
    if not any((folder / name).is_file() for name in TOKENIZERS):
        return
    own = any_tokenizer(folder, "put the policy's tokenizer there", trust_remote_code=trust_remote_code).get_vocab()
    ours = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    other = next(
        (
            f"{token!r} is {own[token]} there and {number} here"
            for token, number in ours
            if own.get(token, number) != number
        ),
        None,
    )
    if other is not None:
        raise InputError(f"model.critic: the tokenizer of {folder} has other tokens than the run's ({other}): {remedy}")


def _head(model: Any, folder: Path) -> str:
    """The name of a classifier's head. Raises InputError unless that is one row of weights for the hidden state."""
    trunk, hidden = f"{model.base_model_prefix}.", trunk_width(model.config)
    found = {name: tuple(weight.shape) for name, weight in model.named_parameters() if not name.startswith(trunk)}
    if list(found.values()) != [(1, hidden)]:
        weights = ", ".join(f"{name} {list(shape)}" for name, shape in found.items()) or "none"
        raise InputError(
            f"model.critic: the head of {folder} is not linear without a bias ({weights}), so its scores cannot be a "
            "critic's values: use a reward model made of a decoder, such as llama or qwen2"
        )
    return next(iter(found))
