"""Adapters that learned something, and what vLLM answers with them.

`python -m tests.ppo_core.engines.served_adapters_program` with `train DIR` (RANK, LOCAL_RANK and WORLD_SIZE must be
set), then with `answer DIR`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.ppo_core.tiny_policies import make_policy

PROMPTS = [[4 + (13 * n + k) % 60 for k in range(3 + n)] for n in range(8)]
RANK = 8


def train(root: Path) -> None:
    """Leave a run's start and its checkpoint after an update whose steps are large."""
    from ppo_core.processes.ranks import Ranks
    from ppo_core.records import StartPolicyJob
    from ppo_core.spec import LoraSpec
    from ppo_core.training.checkpoint import write_checkpoint
    from ppo_core.training.learner import Learner, LoadConfig
    from ppo_core.training.service import TrainingEngine
    from ppo_core.training.update import Update
    from tests.ppo_core.training.programs.deepspeed_program import silent
    from tests.ppo_core.training.programs.replay_program import do, given
    from tests.ppo_core.training.update_cases import make_experience, update_job

    ranks, model = Ranks(0, 1), make_policy(root / "model")
    job = update_job(num_ppo_epochs=6, learning_rate=2e-2)
    lora = LoraSpec(rank=RANK, alpha=64.0)
    job = job.model_copy(update={"model": job.model.model_copy(update={"lora": lora})})
    start = StartPolicyJob(seed=1, model=job.model)
    do(TrainingEngine(ranks), "start_policy", given(tokenizer=model, model=model), root / "start", start, [])
    learner = Learner(ranks)
    networks = learner.checkpoint(root / "start", LoadConfig.of(job), root / "start")
    Update(networks, make_experience(), job, ranks).run(silent)
    write_checkpoint(root / "after", networks, learner.tokenizer, ranks, identity="after")


def answer(root: Path) -> None:
    """Leave in answers.json the greedy tokens of the start, of the start with the adapter, and of the merged policy."""
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    greedy = SamplingParams(temperature=0, max_tokens=12, detokenize=False, ignore_eos=True)
    adapter = LoRARequest("adapter", 1, str(root / "after/adapters/policy"))

    def started(policy: Path, **options: Any) -> Any:
        own: dict[str, Any] = {"max_model_len": 64, "kv_cache_memory_bytes": 2**28, "enforce_eager": True, **options}
        return LLM(str(policy), dtype="float32", distributed_executor_backend="uni", **own)

    def tokens(llm: Any, lora: Any = None) -> list[list[int]]:
        asked = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        return [list(said.outputs[0].token_ids) for said in llm.generate(asked, greedy, lora_request=lora)]

    start = started(root / "start/policy", enable_lora=True, max_lora_rank=RANK)
    found = {"start": tokens(start), "with the adapter": tokens(start, adapter)}
    found["merged"] = tokens(started(root / "after/policy"))
    (root / "answers.json").write_text(json.dumps(found))


if __name__ == "__main__":
    {"train": train, "answer": answer}[sys.argv[1]](Path(sys.argv[2]))
