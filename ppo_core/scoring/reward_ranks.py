"""The ranks of one reward model, whose weights they share: a program below the scoring engine, which starts it.

    scoring engine ──JSON lines──► rank 0 ──gloo or nccl, on this machine──► ranks 1 to N-1

Jobs: load (input: model), score, make_room. All ranks are killed when the one that started them ends, and end when
another one does. RANK, LOCAL_RANK and WORLD_SIZE must be set.
"""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ppo_core.processes.children import end_with_parent
from ppo_core.processes.permissions import Permissions
from ppo_core.processes.protocol import Handler, Job, serve, take_over_stdout
from ppo_core.processes.turns import gpu_bytes_free, room_made
from ppo_core.records import MAKE_ROOM

if TYPE_CHECKING:
    from ppo_core.models.shared_classifier import SharedClassifier
    from ppo_core.processes.ranks import Ranks

LOAD, SCORE = "load", "score"


class RewardRanks:
    """One rank of the model: does its part of each job."""

    def __init__(self, ranks: Ranks, *, trust_remote_code: bool) -> None:
        from ppo_core.processes.aside import Aside

        self.ranks = ranks
        self.handlers: Mapping[str, Handler] = {
            LOAD: self.load,
            SCORE: self.score,
            MAKE_ROOM: self.make_room,
        }
        self._trusted = trust_remote_code
        self._whole: Any = None
        self._model: SharedClassifier | None = None
        self._aside = Aside()

    def read(self, job: Job) -> dict[str, Any]:
        """Rank 0 alone: have the whole model in main memory. Raises InputError where the folder holds none."""
        from ppo_core.models.classifier import load_classifier, readable_tokens

        folder, dtype = job.inputs["model"].path, job.spec["dtype"]
        self._whole = load_classifier(folder, dtype=dtype, trust_remote_code=self._trusted)
        job.progress(0, 0, "")
        return {"context": readable_tokens(self._whole)}

    def load(self, job: Job) -> dict[str, Any]:
        """Share the model out, which rank 0 has read."""
        from ppo_core.models.shared_classifier import SharedClassifier

        whole, self._whole = self._whole, None
        self._model = SharedClassifier(
            job.inputs["model"].path,
            self.ranks,
            dtype=job.spec["dtype"],
            trust_remote_code=self._trusted,
            whole=whole,
            progress=lambda modules: job.progress(modules, 0, ""),
        )
        return {}

    def score(self, job: Job) -> dict[str, Any]:
        """One number for each sequence of tokens."""
        assert self._model is not None
        self._aside.bring_back()
        sequences = job.spec["sequences"]
        scores = self._model.scores(
            sequences, job.spec["microbatch_tokens"], lambda done: job.progress(done, len(sequences), "")
        )
        return {"scores": scores}

    def make_room(self, job: Job) -> dict[str, Any]:
        """Leave the GPU to another engine, until the next scores. On a CPU there is no other place."""
        import torch

        if not torch.cuda.is_available() or self._model is None:
            return room_made(0)
        before = gpu_bytes_free()
        self._aside.move(self._model.tensors())
        gc.collect()
        torch.cuda.empty_cache()
        self.ranks.barrier()  # the others have left their GPUs too
        return room_made(gpu_bytes_free() - before)


def main() -> None:
    """Serve jobs on standard input and output (rank 0), or follow rank 0."""
    replies = take_over_stdout()
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-ranks", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--meeting", type=int)
    parser.add_argument("--trust-remote-code", action="store_true")
    given = parser.parse_args()
    end_with_parent(given.parent)
    import torch

    from ppo_core.processes.lean_imports import leave_out_unused, quick_imports
    from ppo_core.processes.ranks import Ranks, follow, leading, open_meeting, start_other_ranks
    from ppo_core.processes.vector_math import prepare_vector_math

    meeting, children = given.meeting, []
    if given.rank == 0:
        meeting = open_meeting()
        options = [f"--parent={os.getpid()}", *(["--trust-remote-code"] if given.trust_remote_code else [])]
        children = start_other_ranks("ppo_core.scoring.reward_ranks", given.num_ranks, meeting, *options)
    with quick_imports():
        leave_out_unused()
        from transformers import AutoModelForSequenceClassification  # noqa: F401

        from ppo_core.models.shared_classifier import SharedClassifier  # noqa: F401
    torch.set_num_threads(max(1, torch.get_num_threads() // given.num_ranks))
    prepare_vector_math()
    engine = RewardRanks(
        Ranks(given.rank, given.num_ranks, children, meeting, kind="reward model"),
        trust_remote_code=given.trust_remote_code,
    )
    if given.rank > 0:
        follow(engine)
    share_out = leading(engine, LOAD)
    jobs = {name: leading(engine, name) for name in (SCORE, MAKE_ROOM)}
    serve({LOAD: lambda job: engine.read(job) | share_out(job), **jobs}, replies, Permissions())


if __name__ == "__main__":
    main()
