"""What the training engine keeps warm between jobs: the networks, the reference, and which checkpoint they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from ppo_core.algorithms.registry import algorithm_of
from ppo_core.data.tokenization import load_tokenizer
from ppo_core.models.activations import keep_less, may_keep_less, rotate_in_one
from ppo_core.models.adapter_files import load_adapters
from ppo_core.models.loading import VALUE_HEAD, load_policy, load_value_head
from ppo_core.models.lora import adapt
from ppo_core.models.packing import enable_packing
from ppo_core.models.precision import multiply_in
from ppo_core.processes.aside import Aside
from ppo_core.processes.ranks import Ranks
from ppo_core.processes.turns import free_unused
from ppo_core.records import ComputeAdvantagesJob, InputError, OptimizerSettings, UpdatePolicyJob
from ppo_core.spec import LoraSpec, ModelSpec, TrainingSpec
from ppo_core.spec.sections import ComputeDtype
from ppo_core.training.checkpoint import ADAPTERS, load_optimizer
from ppo_core.training.checkpoint_checks import require_network
from ppo_core.training.deepspeed_engine import Trainable
from ppo_core.training.networks import NETWORKS
from ppo_core.training.state import CheckpointState, check_networks, read_state


class LoadConfig(NamedTuple):
    """Which networks are held, and how: what a warm engine cannot change without loading them anew."""

    networks: tuple[str, ...]
    optimizer: OptimizerSettings
    dtype: str
    zero_stage: int
    activation_checkpointing: bool
    compute_dtype: ComputeDtype
    lora: LoraSpec | None
    value_head: bool

    @classmethod
    def of(cls, job: ComputeAdvantagesJob | UpdatePolicyJob) -> LoadConfig:
        """That of a job."""
        optimizer = job.optimizer if isinstance(job, ComputeAdvantagesJob) else OptimizerSettings.of(job.update)
        training, model, algorithm = job.training, job.model, algorithm_of(job.algorithm)
        return cls(
            algorithm.networks,
            optimizer,
            model.dtype,
            training.zero_stage,
            training.activation_checkpointing,
            training.compute_dtype,
            model.lora,
            algorithm.value_head,
        )

    @property
    def training(self) -> TrainingSpec:
        """What of that section matters here."""
        return TrainingSpec(
            zero_stage=self.zero_stage,
            activation_checkpointing=self.activation_checkpointing,
            compute_dtype=self.compute_dtype,
        )


class Learner:
    """Holds one checkpoint at a time. Warmth is an optimisation: asked for another one, it loads that first."""

    def __init__(self, ranks: Ranks, *, trust_remote_code: bool = False) -> None:
        self.ranks = ranks
        self.trust_remote_code = trust_remote_code
        self.trainables: dict[str, Trainable] = {}
        self.tokenizer: Any = None
        self.identity: str | None = None  # of the held checkpoint, None while it changes
        self._config: LoadConfig | None = None
        self._reference: nn.Module | None = None
        self._reference_held: tuple[str, ComputeDtype, bool] | None = None
        self._aside, self._reference_aside = Aside(), Aside()

    def holds(self, identity: str, config: LoadConfig) -> bool:
        """Whether `checkpoint` of that identity, held so, would load nothing."""
        return (self.identity, self._config) == (identity, config) and bool(self.trainables)

    def checkpoint(self, folder: Path, config: LoadConfig, start: Path | None = None) -> dict[str, Trainable]:
        """The networks with their optimizers, exactly as the full checkpoint in `folder` has them.

        A policy-only one is good enough where its training state is held already. The weights that adapters leave as
        they are come from `start`, the run's checkpoint 0. Raises InputError for a bad checkpoint.
        """
        state = read_state(folder)
        if not self.holds(state.identity, config):
            self.forget()
            self._load(folder, state, config, start)
            self.identity, self._config = state.identity, config
        return self.trainables

    def reference(self, folder: Path, digest: str, *, model: ModelSpec, training: TrainingSpec) -> nn.Module:
        """The frozen policy in `folder`."""
        wanted = digest, training.compute_dtype, may_keep_less(training)
        if self._reference is None or self._reference_held != wanted:
            self.forget_reference()
            reference = load_policy(folder, dtype=model.dtype, trust_remote_code=self.trust_remote_code)
            enable_packing(reference)
            rotate_in_one(reference)
            if may_keep_less(training):  # as in the policy, whose fast kernels on a GPU round otherwise
                keep_less(reference)
            multiply_in(reference, training.compute_dtype)
            device = self.trainables["policy"].device if self.trainables else "cpu"
            self._reference = reference.requires_grad_(False).to(device)
            self._reference_held = wanted
        self._reference_aside.bring_back()
        return self._reference

    def forget_reference(self) -> None:
        """Free it, also where it is aside."""
        self._reference = None
        self._reference_aside.drop()

    def invalidate(self) -> None:
        """Say that the held weights are about to change: until `mark_loaded`, they are no checkpoint."""
        self.identity = None

    def mark_loaded(self, identity: str) -> None:
        """Say which checkpoint the held weights are now."""
        self.identity = identity

    def make_room(self) -> int:
        """Move all that is held to the CPU, until `bring_back`; returns its bytes."""
        held = [tensor for trainable in self.trainables.values() for tensor in trainable.tensors()]
        return self._aside.move(held) + self.offload_reference()

    def bring_back(self) -> None:
        """Have all of it on the device again, to the bit; but the reference when it is asked for."""
        self._aside.bring_back()

    def offload_reference(self) -> int:
        """Move the reference to the CPU until it is asked for; returns its bytes."""
        return self._reference_aside.move(self._of_reference())

    def _of_reference(self) -> list[Tensor]:
        return [] if self._reference is None else [*self._reference.parameters(), *self._reference.buffers()]

    def free_all(self) -> None:
        """Free all that is held, the reference too: for a job that begins with other networks and uses none of it."""
        self.forget_reference()
        self.forget()
        free_unused()

    def forget(self) -> None:
        """Free the held checkpoint, also where it is aside."""
        if not self.trainables:
            return
        self.identity = None
        while self.trainables:
            self.trainables.popitem()[1].close()
        self._aside.drop()
        free_unused()

    def _load(self, folder: Path, state: CheckpointState, config: LoadConfig, start: Path | None) -> None:
        if not state.full:
            raise InputError(f"{folder} is a policy-only checkpoint, without its optimizers: give the last full one")
        check_networks(folder, state, config.networks)
        trusted, whole = self.trust_remote_code, folder if config.lora is None else start
        if whole is None:
            raise InputError(f"{folder} holds adapters beside weights of the run's start: give that as `reference`")
        with self.ranks.first_alone():
            for name in config.networks:
                require_network(whole, name)
            self.tokenizer = load_tokenizer(folder / "policy", trust_remote_code=trusted)
        for name in config.networks:
            with self.ranks.first_alone():
                module = NETWORKS[name].load(whole / name, dtype=config.dtype, trust_remote_code=trusted)
            if config.lora is not None:
                adapt(module, config.lora)
                load_adapters(module, folder / ADAPTERS / name)
            if config.value_head:
                load_value_head(module, folder / VALUE_HEAD)
            trainable = self.trainables[name] = Trainable(
                module, config.optimizer, config.training, dtype=config.dtype, threads=self.ranks.threads.count
            )
            load_optimizer(folder, name, trainable, state.num_steps[name])
            trainable.skipped_in_a_row = state.skipped_steps[name]
