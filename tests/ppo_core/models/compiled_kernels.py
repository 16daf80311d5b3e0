"""Compiles the GPU's kernels of the output layer, where there need be no GPU."""

from __future__ import annotations

from triton import compile as compiled
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ppo_core.models import head_kernels

TENSORS = {"temperature": "*fp32", "targets": "*i64", "total": "*fp32", "output": "*fp32", "gradient": "*fp32"}
VOCABULARY = 151_936


def compile_kernels(capability: int) -> None:
    """For NVIDIA's GPUs of a compute capability such as 90, in both types of logits."""
    for dtype, own, entropy in (("*bf16", 0, True), ("*bf16", 1, False), ("*fp32", 1, True)):
        constants = {"vocabulary": VOCABULARY, "own": own, "entropy": entropy, "block": head_kernels.BLOCK}
        kinds = {"logits": dtype, "stride": "i32", **TENSORS, **dict.fromkeys(constants, "constexpr")}
        for kernel in (head_kernels._statistics, head_kernels._gradient):
            signature = {name: kinds[name] for name in kernel.arg_names}
            source = ASTSource(kernel, signature, {(kernel.arg_names.index(k),): v for k, v in constants.items()})
            compiled(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": head_kernels.WARPS})
