"""One DeepSpeed engine around one module: the same code for every ZeRO stage, on CPU (gloo) and on GPU (nccl)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ppo_core.models.activations import keep_less, may_keep_less, rotate_in_one, train_what_recomputes
from ppo_core.models.deepspeed_import import deepspeed
from ppo_core.models.forward import Models
from ppo_core.models.packing import enable_packing
from ppo_core.models.precision import multiply_in
from ppo_core.processes.aside import emptied, tensors_in
from ppo_core.processes.ranks import BUCKET
from ppo_core.processes.threads import Threads, twin_of
from ppo_core.records import OptimizerSettings
from ppo_core.spec import TrainingSpec

MOMENTS = ("exp_avg", "exp_avg_sq")
PERSISTENT = 100_000
"""Parameters of fewer numbers, such as the scales of norms, stay whole on every rank in ZeRO stage 3."""
SHARED_PARAMETERS = 100_000_000  # in a larger module, threads' own gradients cost more memory than they save time
SHARED_IN_BF16 = 4_000_000  # in a larger one each thread would round the weights for itself, which costs what it saves


class Trainable:
    """A module with its optimizer under DeepSpeed. Gradients accumulate over `backward` calls until `step`.

    `modules` are what threads pass rows through, at most `threads` of them: the first is DeepSpeed's, the others are
    twins of the module. It is that one alone where ranks share the weights out, for weights in bf16, and for many
    (fewer where products are in bf16).
    """

    def __init__(
        self, module: Any, settings: OptimizerSettings, training: TrainingSpec, *, dtype: str, threads: int = 1
    ) -> None:
        zero_stage, recompute = training.zero_stage, training.activation_checkpointing
        self.zero_stage = zero_stage
        self.dtype = next(module.parameters()).dtype
        self.module: nn.Module = module
        enable_packing(module)
        rotate_in_one(module)
        rounded = multiply_in(module, training.compute_dtype)
        if recompute:
            module.gradient_checkpointing_enable({"use_reentrant": False})
        if may_keep_less(training):
            keep_less(module)
        whole = zero_stage == 0 and dtype == "float32"
        shared = whole and shares_rows(sum(p.numel() for p in module.parameters()), rounded=rounded)
        twins = [twin_of(module) for _ in range(threads - 1)] if shared else []
        learns = [p for p in module.parameters() if p.requires_grad]
        config = _config(settings, zero_stage, dtype, sum(full_shape(p).numel() for p in learns))
        self._engine: Any = deepspeed.initialize(model=module, model_parameters=learns, config=config)[0]
        self.modules: list[Any] = [self._engine, *twins]
        for one in self.modules:
            one.train(recompute)
            train_what_recomputes(one)
        self._beside: list[list[Tensor]] = [[] for _ in twins]
        if zero_stage == 0:
            self._engine.enable_backward_allreduce = False  # step() below reduces first, to see the true gradient norm
        self.skipped_in_a_row = 0
        self._start_optimizer_state()

    def backward(self, loss: Tensor, module: int = 0) -> None:
        """Add the gradient of `loss`, which `modules[module]` made: this rank's share of the global loss, times the
        number of ranks. Calls for other modules may be made at the same time."""
        if module == 0:
            self._engine.backward(loss)
            return
        found = torch.autograd.grad(loss, [p for _, p in self.parameters()], materialize_grads=True)
        beside = self._beside[module - 1]
        if beside:
            torch._foreach_add_(beside, found)
        else:
            beside += found

    def step(self, learning_rate: float) -> float:
        """Clip by the global norm and update. Returns the gradient norm before clipping, the same on every rank.

        Where that is not finite the step is skipped: weights, moments and step count stay as they are, to the bit, and
        the gradients are dropped.
        """
        for group in self._engine.optimizer.param_groups:
            group["lr"] = learning_rate
        self._add_gradients_of_twins()
        norm = self._step_unsharded() if self.zero_stage == 0 else self._step_sharded()
        self.skipped_in_a_row = 0 if math.isfinite(norm) else self.skipped_in_a_row + 1
        return norm

    def _add_gradients_of_twins(self) -> None:
        for beside in self._beside:
            for (_, parameter), gradient in zip(self.parameters(), beside, strict=bool(beside)):
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
            beside.clear()

    def _step_unsharded(self) -> float:
        """Without ZeRO DeepSpeed would apply any gradient."""
        self._average_gradients()
        norm = float(torch.nn.utils.get_total_norm([p.grad for p in self.module.parameters() if p.grad is not None]))
        if math.isfinite(norm):
            self._engine.step()
        else:
            self._engine.zero_grad()
        return norm

    def _average_gradients(self) -> None:
        """Over ranks, in place: DeepSpeed would copy them all into a new buffer and back, which is slower than to send
        them. What has none gets zeros, on one rank too."""
        gradients = list[Tensor]()
        for _, parameter in self.parameters():
            if parameter.grad is None:  # the optimizer would not count a step for it; another rank may have one
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        if self._engine.world_size == 1:
            return
        for sent in [dist.all_reduce(gradient, async_op=True) for gradient in gradients]:
            sent.wait()
        torch._foreach_div_(gradients, self._engine.world_size)

    def _step_sharded(self) -> float:
        """ZeRO itself drops a gradient whose norm over all ranks is not finite, and then reports infinity."""
        self._engine.step()
        return float(self._engine.get_global_grad_norm())

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Trained parameters by name, each once (tied ones under their first name), in a fixed order."""
        return ((name, p) for name, p in self.module.named_parameters() if p.requires_grad)

    def frozen(self, *, keep: bool) -> dict[str, Tensor]:
        """Untrained weights by name, in full, on the CPU, for ranks that `keep` them; every rank must call this.

        Where the module is on the CPU too they may be its own, until `close`.
        """
        found = {}
        for name, parameter in self.module.named_parameters():
            if not parameter.requires_grad:
                with deepspeed.zero.GatheredParameters(parameter, enabled=self.zero_stage == 3):
                    if keep:
                        found[name] = parameter.detach().to("cpu", copy=self.zero_stage == 3)
        return found

    def weight(self, parameter: nn.Parameter) -> Tensor:
        """The full fp32 master weight, gathered from all ranks (every rank must call this), on the CPU."""
        full = parameter.detach() if self.zero_stage == 0 else deepspeed.utils.safe_get_full_fp32_param(parameter)
        return _copied(full.reshape(full_shape(parameter)))

    def moment(self, parameter: nn.Parameter, key: str) -> Tensor:
        """A full fp32 optimizer moment, gathered from all ranks, on the CPU."""
        if self.zero_stage == 0:
            full = self._inner.state[parameter][key]
        else:
            full = deepspeed.utils.safe_get_full_optimizer_state(parameter, key)
        return _copied(full.reshape(full_shape(parameter)))

    def set_weight(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Set the fp32 master; the module's own copy must already hold its rounding."""
        if self.zero_stage == 0:
            parameter.data.copy_(value)
        else:
            deepspeed.utils.safe_set_full_fp32_param(parameter, value.to(self.device))

    def set_moment(self, parameter: nn.Parameter, key: str, value: Tensor) -> None:
        """Set a full optimizer moment."""
        if self.zero_stage == 0:
            self._inner.state[parameter][key].copy_(value)
        else:
            deepspeed.utils.safe_set_full_optimizer_state(parameter, value.to(self.device), key)

    @property
    def num_steps(self) -> int:
        """Optimizer steps so far (for Adam's bias correction)."""
        return int(next(iter(self._inner.state.values()))["step"])

    @num_steps.setter
    def num_steps(self, count: int) -> None:
        for state in self._inner.state.values():
            state["step"].fill_(count)

    @property
    def device(self) -> torch.device:
        """Where the module computes."""
        return torch.device(self._engine.device)

    def tensors(self) -> Iterator[Tensor]:
        """All that it holds on its device: weights, buffers, gradients, masters, moments, and DeepSpeed's own."""
        held = [self._own(), *self.module.buffers()]
        return (tensor for tensor in tensors_in(held) if tensor.device.type == self.device.type)

    def close(self) -> None:
        """Free all memory but that of buffers, whoever refers to it: the module has no weights from here on.

        DeepSpeed keeps modules of stage 3 in variables of its own, and an engine lies in a cycle with its hooks.
        """
        self._engine.destroy()
        own, kept = set(self.module.modules()), deepspeed.runtime.zero.parameter_offload.FWD_MODULE_STACK
        kept[:] = [module for module in kept if module not in own]
        for tensor in tensors_in(self._own()):
            emptied(tensor)

    def _own(self) -> list[Any]:
        """Tensors, in lists and mappings, but for the module's buffers."""
        parameters = list(self.module.parameters())
        shares = [vars(parameter).get("ds_tensor") for parameter in parameters]
        kept_by = [vars(self._engine.optimizer), vars(self._inner)]
        buckets = [vars(bucket) for bucket in kept_by[0].get("ipg_buckets", {}).values()]
        return [parameters, [p.grad for p in parameters], shares, kept_by, buckets, self._beside]

    @property
    def _inner(self) -> torch.optim.Optimizer:
        """The torch optimizer below DeepSpeed's."""
        return self._engine.optimizer if self.zero_stage == 0 else self._engine.optimizer.optimizer

    def _start_optimizer_state(self) -> None:
        """Zero moments at step 0 from the start, so that they can be saved and loaded before the first step."""
        if self.zero_stage == 3:
            updated = self._engine.optimizer.fp32_partitioned_groups_flat
        else:
            updated = [tensor for group in self._inner.param_groups for tensor in group["params"]]
        for tensor in updated:
            zeros = {key: torch.zeros_like(tensor, memory_format=torch.preserve_format) for key in MOMENTS}
            # The fused optimizer wants the count beside the weights.
            self._inner.state[tensor] = {"step": torch.zeros((), device=tensor.device), **zeros}
        if self.zero_stage in (1, 2):
            self._engine.optimizer._lazy_init_hp_params_optimizer_state()


def shares_rows(parameters: int, *, rounded: bool) -> bool:
    """Whether threads pass rows through a module of so many parameters, each its own; else all work on each operation.

    `rounded`: its products are in bf16.
    """
    return parameters <= (SHARED_IN_BF16 if rounded else SHARED_PARAMETERS)


def models_of(
    trainables: Mapping[str, Trainable],
    threads: Threads,
    *,
    temperature: float,
    reference: Any = None,
) -> list[Models]:
    """The networks under training, and the frozen reference, behind the port for forward passes: for each thread that
    can run them."""
    count = threads.usable(*(len(trainable.modules) for trainable in trainables.values()))
    return [
        Models(
            {name: trainable.modules[thread] for name, trainable in trainables.items()},
            temperature,
            reference if thread == 0 or reference is None else twin_of(reference),
        )
        for thread in range(count)
    ]


def _copied(tensor: Tensor) -> Tensor:
    """In fp32 on the CPU."""
    return tensor.to("cpu", torch.float32, copy=True)


def full_shape(parameter: nn.Parameter) -> torch.Size:
    """The shape of a parameter on all ranks together."""
    return torch.Size(vars(parameter).get("ds_shape", parameter.shape))


def _config(settings: OptimizerSettings, zero_stage: int, dtype: str, count: int) -> dict[str, Any]:
    """DeepSpeed's settings for `count` trained parameters.

    Gradients of weights in bf16 add up in fp32 over microbatches: in bf16, 1 added to 256 is 256. In stage 1 DeepSpeed
    would do that by another optimizer, so such weights are trained in stage 2.
    """
    betas, eps, decay = list(settings.betas), settings.eps, settings.weight_decay
    rounded = dtype == "bfloat16"
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 0.0, "betas": betas, "eps": eps, "weight_decay": decay, "torch_adam": True, "fused": True},
        },
        "gradient_clipping": settings.max_grad_norm,
        "zero_optimization": {
            "stage": max(zero_stage, 2) if rounded else zero_stage,
            "overlap_comm": False,
            "contiguous_gradients": True,
            "reduce_bucket_size": min(BUCKET, count),  # it takes room for so many, however few there are
            "stage3_param_persistence_threshold": PERSISTENT,
        },
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": rounded, "check_grad_overflow": True},
        **({"data_types": {"grad_accum_dtype": "fp32"}} if rounded else {}),
        "steps_per_print": 10**9,
    }
