"""What is wrong with a user's input."""

from __future__ import annotations

NOT_IN_A_TRIAL = "nothing is sampled here: a run has them"
"""Ends the reason for no score of a reward that reads sampled tokens, where it is only tried out."""


class InputError(ValueError):
    """The user's input cannot be used; trying again would not help."""


def needs_own_code(path: object) -> InputError:
    """The refusal of a model or tokenizer that transformers reads only with code from its folder."""
    return InputError(
        f"{path} needs custom code (auto_map in its files, trust_remote_code), which does not run here: use a model of "
        "a type that transformers knows, or have the owner of this machine allow such code for all runs with "
        "PPOFLOW_TRUST_REMOTE_CODE=1 in ppoflow's environment; no spec can"
    )
