"""The kinds of networks that an algorithm may train: how each is begun, loaded and saved, and its rate."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor

from ppo_core.models.critic_start import critic_from
from ppo_core.models.loading import load_critic, load_policy, save_critic, save_policy


class Network(NamedTuple):
    """One kind. Each lies in a checkpoint's folder of its name.

    `begin` makes it of a model's folder, checkpoint 0's policy if the spec names no other; None: it is the policy.
    `load` and `save` see that folder. `rate` is the key of its learning rate in a spec's
    `update` section.
    """

    begin: Callable[..., Any] | None
    load: Callable[..., Any]
    save: Callable[[Any, dict[str, Tensor], Any, Path], None]
    rate: str


def _save_critic(module: Any, weights: dict[str, Tensor], _: Any, folder: Path) -> None:
    save_critic(module, weights, folder)


NETWORKS = MappingProxyType(
    {
        "policy": Network(None, partial(load_policy, exact=True), save_policy, "learning_rate"),
        "critic": Network(critic_from, load_critic, _save_critic, "critic_learning_rate"),
    }
)
