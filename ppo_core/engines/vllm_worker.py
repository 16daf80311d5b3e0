"""What runs inside vLLM's workers: swapping weights in place so that nothing of the old ones is left."""

from __future__ import annotations

from typing import Any


class WeightSwap:
    """Mixed into vLLM's worker (`worker_extension_cls`); called through `collective_rpc`."""

    model_runner: Any

    def swap_weights(self, folder: str) -> None:
        """Load the weights in `folder` into the running model.

        On the CPU vLLM packs the output embedding; with tied embeddings reloading refreshes the embedding but not the
        packed copy, and it would sample from a mixture of old and new weights without a word.
        """
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        self.model_runner.reload_weights(weights_path=folder)
        # get_model() looks behind the wrapper that holds CUDA graphs; the head may lie deep, as in multimodal models.
        for module in self.model_runner.get_model().modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)
