"""A microbatch leaves nothing to wait for: no number of a GPU is asked for, and nothing is found by a mask there.

There need not be a GPU: what is dispatched is the same on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ppo_core.metrics import Maximum, Mean
from ppo_core.models.loading import Critic, add_value_head
from ppo_core.models.packing import enable_packing
from ppo_core.processes.threads import Threads
from ppo_core.spec import GrpoSpec, KlPenaltyPpoSpec, PpoSharedSpec, PpoSpec, ReinforceSpec, RlooSpec, VapoSpec
from ppo_core.training.update import Update
from tests.ppo_core.tiny_models import tiny_policy
from tests.ppo_core.training.update_cases import make_experience, update_job

WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique_dim", "_unique2")


class Waits(TorchDispatchMode):
    """Notes what a GPU would be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        indices = [index for part in args if isinstance(part, list | tuple) for index in part]
        by_mask = name.startswith("index") and any(isinstance(i, Tensor) and i.dtype == torch.bool for i in indices)
        if name in WAITS or by_mask:
            self.noted.append(name)
        return func(*args, **(kwargs or {}))


class Plain:
    """A network under training, without DeepSpeed."""

    def __init__(self, module: Any) -> None:
        enable_packing(module)
        self.modules = [module]

    def backward(self, loss: Tensor, _: int) -> None:
        loss.backward()


def network(name: str, *, value_head: bool) -> Plain:
    policy = tiny_policy("llama")
    if value_head:
        add_value_head(policy)
    return Plain(policy if name == "policy" else Critic(tiny_policy("llama", seed=1).model))


ALGORITHMS = [
    *(PpoSpec(), VapoSpec(), PpoSharedSpec(), KlPenaltyPpoSpec(), RlooSpec(), GrpoSpec(), ReinforceSpec()),
]
SETTINGS: dict[str, dict[str, Any]] = {
    "as by default": {},
    "KL in the loss": {"kl_loss_coef": 0.1},
    "the whole KL": {"kl_loss_coef": 0.1, "kl_loss_estimator": "full"},
    "importance": {"importance_correction": "token", "entropy_coef": 0.1, "dual_clip": 2.0, "value_clip": 0.2},
    "by response": {"importance_correction": "mask", "aggregation": "sequence_mean_token_mean"},
}


def waits_of(algorithm: Any, settings: dict[str, Any], *, own_temperatures: bool = False) -> tuple[list[str], Update]:
    """Of a microbatch of each network, and the update, whose networks have gradients."""
    experience, job = make_experience("llama"), update_job(**settings).model_copy(update={"algorithm": algorithm})
    if own_temperatures:
        experience = replace(experience, temperatures=torch.full((8,), 0.7))
    if isinstance(algorithm, VapoSpec):
        experience = replace(experience, imitated=torch.arange(8) % 2 == 0)
    names = ["policy", *(["critic"] if algorithm.kind in ("ppo", "vapo", "kl_penalty_ppo") else [])]
    networks = {name: network(name, value_head=algorithm.kind == "ppo_shared") for name in names}
    reference = tiny_policy("llama", seed=2)
    enable_packing(reference)
    update = Update(networks, experience, job, SimpleNamespace(threads=Threads(1), world_size=1), reference)  # type: ignore[arg-type]
    rows = [5, 0, 3]
    waits = Waits()
    for name in names:
        batch = update._laid_out(rows)
        for module in (networks[name].modules[0], reference):
            _ = batch.layout_for(module).inputs["packing"].groups
        minibatch = update._minibatch(rows, max(len(response) for _, response in batch.sequences))
        prepared: Callable[..., Any] = lambda *_, ready=minibatch: ready  # noqa: E731
        update._minibatch = prepared  # type: ignore[method-assign]
        with waits:
            loss, measured = update._microbatch(0, (rows, batch), name, normalizer=30)
            _ = [part + type(part)() for part in measured.values()], loss + loss
        del update._minibatch
        assert all(isinstance(part, Mean | Maximum) and isinstance(part.value, float) for part in measured.values())
    return waits.noted, update


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda algorithm: algorithm.kind)
@pytest.mark.parametrize("settings", SETTINGS)
def test_a_microbatch_asks_for_nothing(algorithm: Any, settings: str) -> None:
    noted, update = waits_of(algorithm, SETTINGS[settings])
    assert noted == []
    for trained in update.networks.values():
        assert any(parameter.grad is not None for parameter in trained.modules[0].parameters())


def test_nor_where_responses_have_temperatures_of_their_own() -> None:
    noted, _ = waits_of(PpoSpec(), {}, own_temperatures=True)
    assert noted == ["_local_scalar_dense"]  # whether those, which the CPU has, are above 0


def test_a_number_that_is_asked_for_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def over(x: Tensor, mask: Tensor) -> Mean:
        return Mean(float(x[mask].sum()), float(mask.sum()))

    monkeypatch.setattr(Mean, "over", over)
    noted, _ = waits_of(PpoSpec(), {})
    assert {"index", "_local_scalar_dense"} <= set(noted)
