"""A reward model in processes of its own, which share its weights: what the scoring engine knows of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ppo_core.models.classifier import ScoredText, check_gpus, on_gpu
from ppo_core.processes.permissions import ranks_environment
from ppo_core.processes.turns import GIB
from ppo_core.records import MAKE_ROOM, InputError
from ppo_core.scoring import reward_ranks
from ppo_core.spec.reward.kinds import ModelRewardSpec


class RanksFailed(RuntimeError):
    """A rank of a reward model failed or ended, so all of them have been ended: the next job starts them anew."""


class RankedModel:
    """`num_ranks` processes below this one, which end with it.

    `loading` is called while they load. Raises InputError where the folder holds no reward model, or where there are
    fewer GPUs than ranks.
    """

    def __init__(
        self,
        folder: Path,
        spec: ModelRewardSpec,
        *,
        trust_remote_code: bool,
        loading: Callable[[int], None] = lambda _: None,
    ) -> None:
        gpu = on_gpu(spec.device)
        if gpu:
            check_gpus(spec.num_ranks, spec.component)
        self._text = ScoredText(folder, trust_remote_code=trust_remote_code)
        self._spec, self._folder, self._jobs = spec, folder, 0
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", reward_ranks.__name__, f"--num-ranks={spec.num_ranks}"),
                f"--parent={os.getpid()}",
                *(["--trust-remote-code"] if trust_remote_code else []),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=ranks_environment(_place(spec.num_ranks, gpu=gpu)),
            text=True,
            encoding="utf-8",
        )
        model = {"model": {"path": str(folder), "digest": ""}}
        found = self._ask(reward_ranks.LOAD, {"dtype": spec.dtype}, model, progress=loading)
        self.context: int | None = found["context"]

    def tokens(self, prompt: Any, response: str) -> list[int]:
        """What the model reads of a prompt and the response to it."""
        return self._text.tokens(prompt, response)

    def scores(self, sequences: Sequence[Sequence[int]], budget: int, progress: Callable[[int], None]) -> list[float]:
        """One number for each sequence; a pass of a rank has at most `budget` tokens, or one sequence."""
        spec = {"sequences": sequences, "microbatch_tokens": budget}
        scores: list[float] = self._ask(reward_ranks.SCORE, spec, progress=progress)["scores"]
        return scores

    def make_room(self) -> int:
        """Leave the GPUs to other engines, until the next scores; returns the bytes that the first has more of now."""
        return int(self._ask(MAKE_ROOM, {})["freed_gib"] * GIB)

    def close(self) -> None:
        """End all ranks: the others end with the first one."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):  # of a job that it did not read to its end
                    pipe.close()

    def _ask(
        self,
        name: str,
        spec: Mapping[str, Any],
        inputs: Mapping[str, Any] = {},
        progress: Callable[[int], None] = lambda _: None,
    ) -> dict[str, Any]:
        """The result of a job. After anything else all ranks are ended: their next line would answer this job."""
        self._jobs += 1
        try:
            return self._answer(
                {"id": self._jobs, "name": name, "inputs": inputs, "output": None, "spec": spec}, progress
            )
        except BaseException:
            self.close()
            raise

    def _answer(self, job: Mapping[str, Any], progress: Callable[[int], None]) -> dict[str, Any]:
        jobs, replies = self._process.stdin, self._process.stdout
        assert jobs is not None
        assert replies is not None
        try:
            print(json.dumps(job), file=jobs, flush=True)
        except BrokenPipeError:
            raise self._ended() from None
        for line in replies:
            reply = json.loads(line)
            if reply["event"] == "progress":
                progress(reply["done"])
            elif reply["event"] == "result":
                result: dict[str, Any] = reply["result"]
                return result
            elif reply["error"]["type"] == "InputError":
                raise InputError(reply["error"]["message"])
            else:
                raise RanksFailed(f"{self._who()} failed: {reply['error']['message']}")
        raise self._ended()

    def _who(self) -> str:
        return f"the reward model {self._folder} on num_ranks={self._spec.num_ranks} ranks"

    def _ended(self) -> RanksFailed:
        status = self._process.wait()
        return RanksFailed(f"{self._who()} ended with status {status}: the log of the scoring engine says why")


def _place(num_ranks: int, *, gpu: bool) -> dict[str, str]:
    """What the first rank must find; the ranks speak to each other on this machine alone."""
    loopback = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    # Where they shall not use GPUs they see none: by what they see, torch and DeepSpeed choose where to compute.
    seen = {} if gpu else {"CUDA_VISIBLE_DEVICES": ""}
    return {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(num_ranks), **loopback, **seen}
