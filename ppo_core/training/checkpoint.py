"""A checkpoint as files: everything that moves, by parameter name, loadable into any ZeRO stage and rank count.

policy/     Hugging Face folder with the tokenizer
critic/     trunk as Hugging Face folder, value_head.safetensors, where the algorithm trains one
optimizer/  <network>-00000.safetensors: exp_avg/<name>, exp_avg_sq/<name>, and master/<name> where weights are not fp32
state.json  identity, step counts, and in a policy-only checkpoint how to make the rest again
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, float32

from ppo_core.models.adapter_files import save_adapters
from ppo_core.models.loading import INSIDE_POLICY, VALUE_HEAD, add_value_head, save_policy
from ppo_core.models.lora import adapt, adapters_of, merged
from ppo_core.processes.ranks import Ranks
from ppo_core.records import Replay, derive_seed
from ppo_core.spec import LoraSpec
from ppo_core.training.checkpoint_checks import optimizer_shards
from ppo_core.training.deepspeed_engine import MOMENTS, Trainable, full_shape
from ppo_core.training.networks import NETWORKS
from ppo_core.training.state import CheckpointState

SHARD_BYTES = 2 << 30
ADAPTERS, EMA = "adapters", "ema"
HEAD = f"{INSIDE_POLICY}.weight"


def write_checkpoint(
    folder: Path,
    trainables: Mapping[str, Trainable],
    tokenizer: Any,
    ranks: Ranks,
    *,
    identity: str,
    replay: Sequence[Replay] = (),
) -> None:
    """Write `folder`: all ranks gather, rank 0 writes. `identity` names the content by its derivation.

    With `replay`, the updates since the last full checkpoint, a policy-only one: the policy without its optimizer.
    """
    written = {"policy": trainables["policy"]} if replay else trainables
    for name, trainable in written.items():
        weights = write_network(folder, name, trainable, tokenizer, ranks)
        if HEAD in weights and not replay:
            save_file({"weight": weights[HEAD]}, folder / VALUE_HEAD)
    if not replay:
        if ranks.is_first:
            (folder / "optimizer").mkdir()
        for name, trainable in trainables.items():
            _write_shards(folder / "optimizer", name, _optimizer_tensors(trainable), ranks)
    if ranks.is_first:
        _state(identity, trainables, replay).write(folder)
    ranks.barrier()


def write_network(folder: Path, name: str, trainable: Trainable, tokenizer: Any, ranks: Ranks) -> Mapping[str, Tensor]:
    """Write the network, and adapters that it has: all ranks gather, rank 0 writes, and gets all of its weights."""
    trained, frozen = trained_weights(trainable, ranks), trainable.frozen(keep=ranks.is_first)
    if not ranks.is_first:
        return {}
    weights = merged(trainable.module, frozen, trained)
    NETWORKS[name].save(trainable.module, without_head(weights), tokenizer, folder / name)
    if adapters_of(trainable.module):
        save_adapters(trainable.module, trained, folder / ADAPTERS / name)
    return weights


def write_start(
    folder: Path,
    policy: Any,
    weights: dict[str, Tensor],
    tokenizer: Any,
    *,
    identity: str,
    networks: Sequence[str],
    dtype: str,
    lora: LoraSpec | None = None,
    seed: int = 0,
    ema: bool = False,
    value_head: bool = False,
    origins: Mapping[str, Path] = {},
    trust_remote_code: bool = False,
) -> None:
    """Write checkpoint 0: the policy, the other `networks` as they begin, no optimizer steps. On rank 0 only.

    With `lora` the adapters too, by `seed`; with `ema` the policy as the average of itself;
    with `value_head` one. `origins` are folders of models that networks begin as, by name, in place of the policy.
    """
    save_policy(policy, weights, tokenizer, folder / "policy")
    if ema:
        save_policy(policy, {name: weight.to(float32) for name, weight in weights.items()}, tokenizer, folder / EMA)
    for name in networks:
        network, module = NETWORKS[name], policy
        if network.begin is not None:
            origin = origins.get(name, folder / "policy")
            module = network.begin(origin, dtype=dtype, trust_remote_code=trust_remote_code)
            network.save(module, {key: p.detach() for key, p in module.named_parameters()}, tokenizer, folder / name)
        if lora is not None:
            adapt(module, lora, seed=derive_seed(seed, "adapters", name))
            learns = {key: p.detach() for key, p in module.named_parameters() if p.requires_grad}
            save_adapters(module, learns, folder / ADAPTERS / name)
    if value_head:
        save_file({"weight": add_value_head(policy).weight.detach()}, folder / VALUE_HEAD)
    none = dict.fromkeys(networks, 0)
    CheckpointState(identity=identity, full=True, num_steps=none, skipped_steps=none, replay=()).write(folder)


def trained_weights(trainable: Trainable, ranks: Ranks, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """What learns, in full and in the module's dtype or another, gathered by all ranks, kept on rank 0 only."""
    weights = {}
    for name, parameter in trainable.parameters():
        full = trainable.weight(parameter)
        if ranks.is_first:
            weights[name] = full.to(dtype or trainable.dtype).contiguous()
    return weights


def full_weights(trainable: Trainable, ranks: Ranks, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """The same of the whole network, with adapters added to the weights that they change."""
    trained, frozen = trained_weights(trainable, ranks, dtype), trainable.frozen(keep=ranks.is_first)
    return without_head(merged(trainable.module, frozen, trained)) if ranks.is_first else {}


def without_head(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those of a policy as others load it: its value head lies beside it."""
    return {name: weight for name, weight in weights.items() if name != HEAD}


def load_optimizer(folder: Path, part: str, trainable: Trainable, num_steps: int) -> None:
    """Put moments (and masters) of `folder/optimizer` into a fresh engine that holds the checkpoint's weights.

    Raises InputError where they are missing, or those of another architecture.
    """
    if num_steps == 0:
        return
    parameters = dict(trainable.parameters())
    shapes = {f"{kind}/{name}": tuple(full_shape(p)) for name, p in parameters.items() for kind in MOMENTS}
    for shard in optimizer_shards(folder, part, shapes):
        with safe_open(shard, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 (a safetensors handle is no mapping)
                kind, _, name = key.partition("/")
                if kind == "master":
                    trainable.set_weight(parameters[name], tensors.get_tensor(key))
                else:
                    trainable.set_moment(parameters[name], kind, tensors.get_tensor(key))
    trainable.num_steps = num_steps


def _state(identity: str, trainables: Mapping[str, Trainable], replay: Sequence[Replay]) -> CheckpointState:
    return CheckpointState(
        identity=identity,
        full=not replay,
        num_steps={name: trainable.num_steps for name, trainable in trainables.items()},
        skipped_steps={name: trainable.skipped_in_a_row for name, trainable in trainables.items()},
        replay=tuple(replay),
    )


def _optimizer_tensors(trainable: Trainable) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in trainable.parameters():
        if trainable.dtype is not float32:
            yield f"master/{name}", trainable.weight(parameter)
        for key in MOMENTS:
            yield f"{key}/{name}", trainable.moment(parameter, key)


def _write_shards(folder: Path, part: str, tensors: Iterator[tuple[str, Tensor]], ranks: Ranks) -> None:
    """Bounded files, so that rank 0 never holds a whole optimizer."""
    shard: dict[str, Tensor] = {}
    count, size = 0, 0
    for key, tensor in tensors:
        if not ranks.is_first:
            continue
        if shard and size + tensor.nbytes > SHARD_BYTES:
            save_file(shard, folder / f"{part}-{count:05d}.safetensors")
            shard, count, size = {}, count + 1, 0
        shard[key] = tensor
        size += tensor.nbytes
    if shard:
        save_file(shard, folder / f"{part}-{count:05d}.safetensors")
