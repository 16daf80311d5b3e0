"""What a model's configuration says it is, told without its weights."""

from __future__ import annotations

from typing import Any

from ppo_core.records import InputError

CLASSIFIER = "ForSequenceClassification"


def is_classifier(config: Any) -> bool:
    """Whether it is a sequence classifier, as reward models are."""
    return any(str(name).endswith(CLASSIFIER) for name in config.architectures or ())


def trunk_width(config: Any) -> int:
    """Numbers in a hidden state as the model without its head gives it: OPT's may be those of its embeddings."""
    text = config.get_text_config()
    return int(text.to_dict().get("word_embed_proj_dim") or text.hidden_size)


def require_causal(config: Any, source: str) -> None:
    """Raise InputError for a sequence classifier: with tied embeddings transformers makes a causal LM of its trunk."""
    if is_classifier(config):
        raise InputError(
            f"model {source} is a sequence classifier ({config.architectures[0]}), such as a reward model, and "
            "training starts from a causal LM: give that"
        )
