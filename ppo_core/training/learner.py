"""What the training engine keeps warm between jobs: policy, critic and reference, and which checkpoint they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from ppo_core.models import load_critic, load_policy
from ppo_core.records import OptimizerSettings
from ppo_core.spec import ModelSpec, TrainingSpec
from ppo_core.tokenization import load_tokenizer
from ppo_core.training.checkpoint import load_optimizer, read_state
from ppo_core.training.deepspeed_engine import Trainable
from ppo_core.training.ranks import Ranks


class Learner:
    """Holds one checkpoint at a time. Warmth is an optimisation: asked for another one, it loads that first."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.policy: Trainable | None = None
        self.critic: Trainable | None = None
        self.tokenizer: Any = None
        self._held: tuple[Any, ...] | None = None
        self._moved: tuple[Any, ...] | None = None
        self._reference: nn.Module | None = None
        self._reference_digest: str | None = None

    def checkpoint(
        self, folder: Path, *, model: ModelSpec, optimizer: OptimizerSettings, training: TrainingSpec
    ) -> tuple[Trainable, Trainable]:
        """Policy and critic with their optimizers, exactly as the checkpoint in `folder` has them."""
        state = read_state(folder)
        wanted = (state["identity"], optimizer, training.zero_stage, model.dtype, training.activation_checkpointing)
        if self._held != wanted or self.policy is None or self.critic is None:
            self.forget()
            self.tokenizer = load_tokenizer(folder / "policy")
            policy = load_policy(folder / "policy", dtype=model.dtype)
            critic = load_critic(folder / "critic", dtype=model.dtype)
            self.policy = Trainable(policy, optimizer, training, dtype=model.dtype)
            self.critic = Trainable(critic, optimizer, training, dtype=model.dtype)
            load_optimizer(folder, "policy", self.policy, state["num_policy_steps"])
            load_optimizer(folder, "critic", self.critic, state["num_critic_steps"])
            self._held = wanted
        return self.policy, self.critic

    def reference(self, folder: Path, digest: str, *, model: ModelSpec) -> nn.Module:
        """The frozen policy in `folder`."""
        if self._reference is None or self._reference_digest != digest:
            self._reference = None
            reference = load_policy(folder, dtype=model.dtype).requires_grad_(False)
            self._reference = reference.to(self.policy.device if self.policy is not None else "cpu")
            self._reference_digest = digest
        return self._reference

    def moving(self) -> None:
        """Say that the held weights are about to change: until `became`, they are no checkpoint."""
        self._moved, self._held = self._held, None

    def became(self, identity: str) -> None:
        """Say which checkpoint the held weights are now."""
        assert self._moved is not None
        self._held = (identity, *self._moved[1:])

    def forget(self) -> None:
        """Free the held checkpoint."""
        for trainable in (self.policy, self.critic):
            if trainable is not None:
                trainable.close()
        self.policy = self.critic = self._held = None
