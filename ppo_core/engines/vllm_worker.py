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
        self.model_runner.reload_weights(weights_path=folder)
        head = vars(self.model_runner.model)["_modules"].get("lm_head")
        quant_method = vars(head).get("quant_method") if head is not None else None
        if quant_method is not None:
            quant_method.process_weights_after_loading(head)
