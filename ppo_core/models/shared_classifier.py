"""A reward model whose weights several ranks share by ZeRO-3 (Rajbhandari et al. 2020, arXiv:1910.02054).

    rank 0: the whole model in main memory ──one parameter at a time──► its part on each rank's device
    a pass: each layer's weights are gathered before it computes, and freed after it

So rank 0 needs main memory for the whole model and its own part while it loads; the others never have more than their
part and one parameter. Parameters of up to `PERSISTENT` numbers, such as the scales of norms, stay whole on every rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

from ppo_core.data.tokenization import model_config
from ppo_core.models.classifier import NO_PADDING, Pass, forward, passes
from ppo_core.models.deepspeed_import import deepspeed
from ppo_core.models.loading import torch_dtype
from ppo_core.processes.aside import tensors_in
from ppo_core.processes.ranks import Ranks
from ppo_core.records import InputError

PERSISTENT = 10_000
PREFETCHED = 50_000_000
NOTHING = Pass([], NO_PADDING)
FIRST_TELLS_S = 5.0


class SharedClassifier:
    """This rank's part of a reward model. Every rank must make the same calls, with the same sequences.

    Rank 0 gives the `whole` model, in main memory, which is used up; the others make an empty one of its configuration.
    """

    def __init__(
        self,
        folder: Path,
        ranks: Ranks,
        *,
        dtype: str,
        trust_remote_code: bool = False,
        whole: Any = None,
        progress: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.ranks = ranks
        model = whole
        if model is None:
            model = _empty(folder, dtype=dtype, trust_remote_code=trust_remote_code)
        model.requires_grad_(False).eval()
        config = _config(dtype)
        _share_out(model, ranks, config, progress)
        self._engine: Any = deepspeed.initialize(model=model, config=config)[0]
        self.model: Any = self._engine.module.eval()

    @torch.no_grad()
    def scores(
        self, sequences: Sequence[Sequence[int]], budget: int, progress: Callable[[int], None] = lambda _: None
    ) -> list[float]:
        """One number for each sequence, on every rank; passes are those that one process would make, to the token.

        Gathering weights is collective, so where passes do not divide evenly the last ranks read a single token.
        """
        size, mine = self.ranks.world_size, torch.zeros(len(sequences), dtype=torch.float64)
        planned, done = passes(sequences, budget, self.model.config.get_text_config().vocab_size), 0
        for first in range(0, len(planned), size):
            together = planned[first : first + size]
            rows, pad = together[self.ranks.rank] if self.ranks.rank < len(together) else NOTHING
            found = forward(self.model, [sequences[row] for row in rows] or [[0]], pad)
            mine[rows] = torch.tensor(found[: len(rows)], dtype=torch.float64)
            done += sum(len(one.rows) for one in together)
            progress(done)
        # Exact: each number is of one rank, and zero on all others.
        return list(map(float, self.ranks.sum(mine)))

    def tensors(self) -> Iterator[Tensor]:
        """All that it holds on its device between passes: its part of the weights, those that stay whole, buffers."""
        parameters = list(self.model.parameters())
        parts = [vars(parameter)["ds_tensor"] for parameter in parameters]
        return (one for one in tensors_in([parameters, parts, list(self.model.buffers())]) if one.numel())


def _config(dtype: str) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": dtype == "bfloat16"},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": PERSISTENT,
            # On a GPU weights are gathered ahead while a layer computes; on a CPU that takes memory and gains nothing.
            "stage3_prefetch_bucket_size": PREFETCHED if torch.cuda.is_available() else 0,
            # DeepSpeed's own linear layer, which saves memory in backward passes, rounds otherwise than torch's.
            "memory_efficient_linear": False,
        },
        "steps_per_print": 10**9,
    }


def _empty(folder: Path, *, dtype: str, trust_remote_code: bool) -> Any:
    """The classifier of a folder without memory for its weights."""
    config = model_config(str(folder), None, trust_remote_code=trust_remote_code)
    made_by = transformers.AutoModelForSequenceClassification
    with torch.device("meta"):
        return made_by.from_config(config, dtype=torch_dtype(dtype), trust_remote_code=trust_remote_code)


def _share_out(model: nn.Module, ranks: Ranks, config: dict[str, Any], progress: Callable[[int], None]) -> None:
    """Leave each rank its part of every parameter, and all of every buffer, as rank 0 has them."""
    _require_the_same(model, ranks)
    device, made = torch.device("cuda" if torch.cuda.is_available() else "cpu"), dict[int, nn.Parameter]()
    for number, module in enumerate(
        reversed(list(model.modules()))
    ):  # inner ones first: what is shared out already is left alone
        for name, buffer in list(module.named_buffers(recurse=False)):
            module.register_buffer(name, _as_first_has_it(buffer, ranks).to(device), persistent=False)
        own = list(module.named_parameters(recurse=False))
        for name, parameter in own:
            if parameter.is_meta:
                room = torch.empty_like(parameter, device="cpu")
                made.setdefault(id(parameter), nn.Parameter(room, requires_grad=False))
                module.register_parameter(name, made[id(parameter)])
        if own:
            deepspeed.zero.Init(module=module, config_dict_or_path=config)
        progress(number)


def _require_the_same(model: nn.Module, ranks: Ranks) -> None:
    """Raise InputError, on every rank, where one made other tensors of the configuration than rank 0 has read."""
    tensors = chain(model.named_parameters(), model.named_buffers())
    described = [[name, str(tensor.dtype), list(tensor.shape)] for name, tensor in tensors]
    others = [one for one, first in zip_longest(described, ranks.broadcast(described)) if one != first]
    if ranks.largest(float(len(others))):
        if not ranks.is_first:
            time.sleep(FIRST_TELLS_S)  # it ends the others, and says why; theirs would be an end without a reason
        raise InputError(
            "the weights of this reward model cannot be shared among ranks, since its folder holds other tensors than "
            "transformers makes of its config.json: set the reward's num_ranks to 1"
        )


def _as_first_has_it(buffer: Tensor, ranks: Ranks) -> Tensor:
    tensor = torch.empty_like(buffer, device="cpu") if buffer.is_meta else buffer.contiguous()
    dist.broadcast(tensor.reshape(-1).view(torch.uint8), 0, group=ranks.control)
    return tensor
