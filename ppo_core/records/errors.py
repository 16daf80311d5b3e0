"""What is wrong with a user's input."""

from __future__ import annotations


class InputError(ValueError):
    """The user's input cannot be used; trying again would not help."""


def needs_own_code(path: object) -> InputError:
    """The refusal of a model or tokenizer that transformers reads only with code from its folder."""
    return InputError(
        f"{path} can be read only with code that its files name (auto_map), and such code does not run here: use a "
        "model whose type transformers knows, or have the owner of this machine allow it for all runs, by "
        "PPOFLOW_TRUST_REMOTE_CODE=1 in ppoflow's environment on the machine itself; no spec can"
    )
