"""What the training engine keeps warm between jobs: policy, critic and reference, and which checkpoint they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from ppo_core.data.tokenization import load_tokenizer
from ppo_core.models.loading import load_critic, load_policy
from ppo_core.records import InputError, OptimizerSettings
from ppo_core.spec import ModelSpec, TrainingSpec
from ppo_core.training.checkpoint import load_optimizer
from ppo_core.training.deepspeed_engine import Trainable
from ppo_core.training.intact import check_critic, check_policy
from ppo_core.training.ranks import Ranks
from ppo_core.training.state import CheckpointState, read_state


class LoadConfig(NamedTuple):
    """How policy and critic are held: what a warm engine cannot change without loading them anew."""

    optimizer: OptimizerSettings
    zero_stage: int
    dtype: str
    activation_checkpointing: bool

    @classmethod
    def of(cls, model: ModelSpec, optimizer: OptimizerSettings, training: TrainingSpec) -> LoadConfig:
        """That of a job."""
        return cls(optimizer, training.zero_stage, model.dtype, training.activation_checkpointing)


class Learner:
    """Holds one checkpoint at a time. Warmth is an optimisation: asked for another one, it loads that first."""

    def __init__(self, ranks: Ranks, *, trust_remote_code: bool = False) -> None:
        self.ranks = ranks
        self.trust_remote_code = trust_remote_code
        self.policy: Trainable | None = None
        self.critic: Trainable | None = None
        self.tokenizer: Any = None
        self.identity: str | None = None  # of the held checkpoint, None while it changes
        self._setting: LoadConfig | None = None
        self._reference: nn.Module | None = None
        self._reference_digest: str | None = None

    def holds(self, identity: str, setting: LoadConfig) -> bool:
        """Whether `checkpoint` of that identity, held so, would load nothing."""
        return (self.identity, self._setting) == (identity, setting) and self.policy is not None

    def checkpoint(
        self, folder: Path, *, model: ModelSpec, optimizer: OptimizerSettings, training: TrainingSpec
    ) -> tuple[Trainable, Trainable]:
        """Policy and critic with their optimizers, exactly as the full checkpoint in `folder` has them.

        A thin one is good enough where its training state is held already. Raises InputError for a bad checkpoint.
        """
        state, setting = read_state(folder), LoadConfig.of(model, optimizer, training)
        if not self.holds(state.identity, setting):
            self.forget()
            self._load(folder, state, model, optimizer, training)
            self.identity, self._setting = state.identity, setting
        return self.trainables()

    def trainables(self) -> tuple[Trainable, Trainable]:
        """Policy and critic as they are held."""
        assert self.policy is not None
        assert self.critic is not None
        return self.policy, self.critic

    def reference(self, folder: Path, digest: str, *, model: ModelSpec) -> nn.Module:
        """The frozen policy in `folder`."""
        if self._reference is None or self._reference_digest != digest:
            self._reference = None
            reference = load_policy(folder, dtype=model.dtype, trust_remote_code=self.trust_remote_code)
            device = self.policy.device if self.policy is not None else "cpu"
            self._reference = reference.requires_grad_(False).to(device)
            self._reference_digest = digest
        return self._reference

    def invalidate(self) -> None:
        """Say that the held weights are about to change: until `mark_loaded`, they are no checkpoint."""
        self.identity = None

    def mark_loaded(self, identity: str) -> None:
        """Say which checkpoint the held weights are now."""
        self.identity = identity

    def forget(self) -> None:
        """Free the held checkpoint."""
        for trainable in (self.policy, self.critic):
            if trainable is not None:
                trainable.close()
        self.policy = self.critic = self.identity = None

    def _load(
        self,
        folder: Path,
        state: CheckpointState,
        model: ModelSpec,
        optimizer: OptimizerSettings,
        training: TrainingSpec,
    ) -> None:
        if not state.full:
            raise InputError(f"{folder} is a thin checkpoint, without critic and optimizer: give the last full one")
        trusted = self.trust_remote_code
        if self.ranks.is_first:
            check_policy(folder, trust_remote_code=trusted)
            check_critic(folder, trust_remote_code=trusted)
        self.tokenizer = load_tokenizer(folder / "policy", trust_remote_code=trusted)
        policy = load_policy(folder / "policy", dtype=model.dtype, trust_remote_code=trusted)
        critic = load_critic(folder / "critic", dtype=model.dtype, trust_remote_code=trusted)
        self.policy = Trainable(policy, optimizer, training, dtype=model.dtype)
        self.critic = Trainable(critic, optimizer, training, dtype=model.dtype)
        load_optimizer(folder, "policy", self.policy, state.num_policy_steps)
        load_optimizer(folder, "critic", self.critic, state.num_critic_steps)
        self.policy.skipped_in_a_row = state.skipped_steps.policy
        self.critic.skipped_in_a_row = state.skipped_steps.critic
