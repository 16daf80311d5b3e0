"""Checkpoints of a line each, in the folders of real ones."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from infra.engines.protocol import EngineJob
from ppo_core.records import Replay, content_digest
from ppo_core.training.state import CheckpointState

PARTS = {"policy": "policy/model.safetensors", "critic": "critic/weights", "optimizer": "optimizer/moments"}
CARD = {"config.json": {"architectures": ["ToyForCausalLM"]}, "tokenizer.json": {}, "tokenizer_config.json": {}}


@dataclass(frozen=True)
class Weights:
    """All that training moves."""

    policy: str
    critic: str
    optimizer: str

    @classmethod
    def of(cls, seed: str) -> Weights:
        """Three hashes of one."""
        return cls(*(content_digest([name, seed]) for name in PARTS))


def read_weights(folder: Path) -> Weights:
    """Those of a full checkpoint."""
    return Weights(*((folder / name).read_text() for name in PARTS.values()))


def averaged(job: EngineJob) -> bool:
    """Whether the checkpoint that a job makes has an average of the policy."""
    return bool(job.spec.get("ema") or job.spec.get("update", {}).get("ema_decay"))


def write_checkpoint(job: EngineJob, weights: Weights, identity: str, replay: tuple[Replay, ...]) -> None:
    """A full checkpoint, or with `replay` a policy-only one."""
    assert job.output is not None
    for name, text in zip(PARTS.values(), (weights.policy, weights.critic, weights.optimizer), strict=True):
        if name == PARTS["policy"] or not replay:
            (job.output / name).parent.mkdir()
            (job.output / name).write_text(text)
    if averaged(job):
        (job.output / "ema").mkdir()
        (job.output / "ema/model.safetensors").write_text(content_digest(["ema", weights.policy]))
    for name, document in CARD.items():
        for folder in ("policy", "ema") if averaged(job) else ("policy",):
            (job.output / folder / name).write_text(json.dumps(document))
    state = CheckpointState(
        identity=identity,
        full=not replay,
        num_steps={"policy": 0, "critic": 0},
        skipped_steps={"policy": 0, "critic": 0},
        replay=replay,
    )
    state.write(job.output)
