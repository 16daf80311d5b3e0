"""What runs inside vLLM's workers: swapping weights in place so that nothing of the old ones is left, and freeing the
cache between jobs on a CPU."""

from __future__ import annotations

from typing import Any


class WeightSwap:
    """Mixed into vLLM's worker (`worker_extension_cls`); called through `collective_rpc`."""

    model_runner: Any
    cache_sizes: tuple[int, ...] = ()

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

    def drop_cache(self) -> int:
        """Free the key-value cache, which no request needs any more; returns its bytes. For workers on CPU."""
        storages = self._cache_storages()
        self.cache_sizes = tuple(storage.nbytes() for storage in storages)
        for storage in storages:
            storage.resize_(0)
        return sum(self.cache_sizes)

    def restore_cache(self) -> None:
        """Allocate it again, empty."""
        for storage, size in zip(self._cache_storages(), self.cache_sizes, strict=True):
            storage.resize_(size)
            storage.fill_(0)

    def _cache_storages(self) -> list[Any]:
        """Each once: layers may share theirs."""
        found = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in self.model_runner.kv_caches}
        return list(found.values())
