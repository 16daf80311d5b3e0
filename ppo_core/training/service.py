"""The handlers of the training engine's jobs, the same on every rank."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from ppo_core.algorithms.registry import algorithm_of
from ppo_core.data.rankings import read_rankings
from ppo_core.data.tables import check_aligned, read_examples, read_rollouts, read_scores, read_shares
from ppo_core.data.tokenization import load_tokenizer
from ppo_core.models.adapter_files import load_adapters
from ppo_core.models.critic_start import require_tokens
from ppo_core.models.loading import load_policy, save_policy, starting_policy
from ppo_core.models.lora import adapt, target_layers
from ppo_core.models.reward_model import ClassifierFolder, reward_model_of
from ppo_core.processes.protocol import Handler, Job
from ppo_core.processes.ranks import Ranks, first_rank_only
from ppo_core.processes.turns import free_unused, gpu_bytes_free, room_made
from ppo_core.processes.vector_math import prepare_vector_math
from ppo_core.records import (
    FORGET,
    MAKE_ROOM,
    ComputeAdvantagesJob,
    FinetunePolicyJob,
    Replay,
    StartPolicyJob,
    TokenSequence,
    TrainDpoJob,
    TrainRewardModelJob,
    UpdatePolicyJob,
    content_digest,
    derive_seed,
)
from ppo_core.spec import DescentSpec, SupervisedSpec, TrainingSpec
from ppo_core.training.averages import reference_folder, write_averages
from ppo_core.training.checkpoint import ADAPTERS, full_weights, write_checkpoint, write_network, write_start
from ppo_core.training.deepspeed_engine import Trainable, models_of
from ppo_core.training.determinism import deterministic
from ppo_core.training.dpo import train_dpo
from ppo_core.training.experience import (
    build_experience,
    coefficient_after,
    coefficient_at,
    needed,
    predict,
    require_some,
    temperatures_of,
    trained_on,
)
from ppo_core.training.learner import Learner, LoadConfig
from ppo_core.training.replay import hold_checkpoint, run_update
from ppo_core.training.reward_model import train_reward_model
from ppo_core.training.shaping import moments_with
from ppo_core.training.state import derivation, read_state
from ppo_core.training.supervised import supervised_settings, train_supervised
from ppo_core.training.update import KL_TO_OLD

StartingJob = FinetunePolicyJob | StartPolicyJob | TrainRewardModelJob


class TrainingEngine:
    """Does jobs on one rank: reads inputs, computes its share, and on rank 0 writes the output."""

    def __init__(self, ranks: Ranks, *, trust_remote_code: bool = False, offload_reference: bool = False) -> None:
        prepare_vector_math()
        self.ranks = ranks
        self.trust_remote_code = trust_remote_code
        self.learner = Learner(ranks, trust_remote_code=trust_remote_code)
        self.offload_reference = offload_reference and torch.cuda.is_available()
        jobs: tuple[Handler, ...] = (
            *(self.finetune_policy, self.train_reward_model, self.train_dpo, self.start_policy),
            *(self.compute_advantages, self.update_policy),
        )
        self.handlers = {job.__name__: self._with_all_back(job) for job in jobs}
        self.handlers[MAKE_ROOM] = self.make_room
        self.handlers[FORGET] = self.forget

    def finetune_policy(self, job: Job) -> dict[str, Any]:
        """The model of the spec, trained on the examples, as a Hugging Face folder."""
        spec = FinetunePolicyJob.model_validate(job.spec)
        self.ranks.require(spec.training.num_ranks)
        self.learner.free_all()
        tokenizer = load_tokenizer(job.inputs["tokenizer"].path, trust_remote_code=self.trust_remote_code)
        policy = self._start_model(job, spec, tokenizer)
        examples, losses = read_examples(job.inputs["dataset"].path / "sft.parquet"), list[float]()
        with closing(self._trainable(policy, spec.sft, spec.training, dtype=spec.model.dtype)) as trainable:
            with deterministic(spec.deterministic):
                metrics = train_supervised(trainable, examples, spec, self.ranks, job.progress, losses)
            weights = full_weights(trainable, self.ranks)
            if self.ranks.is_first:
                with first_rank_only():
                    save_policy(policy, weights, tokenizer, job.output)
        self.ranks.barrier()
        return {"metrics": metrics, "losses": losses}

    def train_reward_model(self, job: Job) -> dict[str, Any]:
        """The model of the spec with a new head, trained on preferences, as a Hugging Face folder in `model/`."""
        spec = TrainRewardModelJob.model_validate(job.spec)
        self.ranks.require(spec.training.num_ranks)
        self.learner.free_all()
        tokenizer = load_tokenizer(job.inputs["tokenizer"].path, trust_remote_code=self.trust_remote_code)
        data = job.inputs["dataset"].path
        rankings, shares = read_rankings(data / "train.parquet"), read_shares(data, "train")
        policy = self._start_model(job, spec, tokenizer)
        endings = {text[-1] for row in rankings for text in row.responses}
        folder = ClassifierFolder(policy.config, str(spec.model.path), tokenizer.pad_token_id, endings)
        model = reward_model_of(policy, seed=derive_seed(spec.seed, "reward head"))
        losses: list[float] = []
        with closing(self._trainable(model, spec.fit, spec.training, dtype=spec.model.dtype)) as trainable:
            with deterministic(spec.deterministic):
                metrics = train_reward_model(trainable, rankings, spec, self.ranks, job.progress, losses, shares)
            weights = full_weights(trainable, self.ranks)
            if self.ranks.is_first:
                with first_rank_only():
                    folder.write(model, weights, tokenizer, job.output / "model")
        self.ranks.barrier()
        return {"metrics": metrics, "losses": losses}

    def train_dpo(self, job: Job) -> dict[str, Any]:
        """The policy of checkpoint 0, trained on preferences, as a Hugging Face folder in `policy/`.

        With `model.lora` its adapters are trained, which are added to its weights there, and lie in `adapters/policy/`.
        """
        spec = TrainDpoJob.model_validate(job.spec)
        self.ranks.require(spec.training.num_ranks)
        self.learner.free_all()
        start, data = job.inputs["checkpoint"].path, job.inputs["dataset"].path
        tokenizer = load_tokenizer(start / "policy", trust_remote_code=self.trust_remote_code)
        policy = load_policy(start / "policy", dtype=spec.dtype, trust_remote_code=self.trust_remote_code)
        if spec.lora is not None:
            adapt(policy, spec.lora)
            load_adapters(policy, start / ADAPTERS / "policy")
        train, held_out = (read_rankings(data / f"{split}.parquet") for split in ("train", "eval"))
        with closing(self._trainable(policy, spec.dpo, spec.training, dtype=spec.dtype)) as trainable:
            with deterministic(spec.deterministic):
                shares = read_shares(data, "train")
                found = train_dpo(trainable, train, held_out, spec, self.ranks, job.progress, shares)
            with first_rank_only():
                write_network(job.output, "policy", trainable, tokenizer, self.ranks)
                if self.ranks.is_first:
                    pq.write_table(pa.Table.from_pylist(found.responses), job.output / "held_out.parquet")
        self.ranks.barrier()
        return {"metrics": found.metrics, "curves": found.curves}

    def start_policy(self, job: Job) -> dict[str, Any]:
        """Checkpoint 0: the model of the spec, or the one fine-tuned from it, and what is trained beside it."""
        spec = StartPolicyJob.model_validate(job.spec)
        self.learner.free_all()
        tokenizer = load_tokenizer(job.inputs["tokenizer"].path, trust_remote_code=self.trust_remote_code)
        origins = {name: job.inputs[name].path for name in ("critic",) if name in job.inputs}
        for folder in origins.values():
            require_tokens(folder, tokenizer, trust_remote_code=self.trust_remote_code)
        policy = self._start_model(job, spec, tokenizer)
        algorithm = algorithm_of(spec.algorithm)
        if spec.model.lora is not None:
            target_layers(policy, spec.model.lora)
        weights = {name: p.detach() for name, p in policy.named_parameters()}
        if self.ranks.is_first:
            identity = content_digest(["start_policy", job.spec, {name: i.digest for name, i in job.inputs.items()}])
            with first_rank_only():
                write_start(
                    job.output,
                    policy,
                    weights,
                    tokenizer,
                    identity=identity,
                    networks=algorithm.networks,
                    dtype=spec.model.dtype,
                    lora=spec.model.lora,
                    seed=spec.seed,
                    ema=spec.ema,
                    value_head=algorithm.value_head,
                    origins=origins,
                    trust_remote_code=self.trust_remote_code,
                )
        self.ranks.barrier()
        return {"num_parameters": sum(tensor.numel() for tensor in weights.values())}

    def compute_advantages(self, job: Job) -> dict[str, Any]:
        """Experience from rollouts and scores, and the next KL coefficient."""
        spec = ComputeAdvantagesJob.model_validate(job.spec)
        self.ranks.require(spec.training.num_ranks)
        rollouts = read_rollouts(job.inputs["rollouts"].path / "rollouts.parquet")
        scores = read_scores(job.inputs["scores"].path / "scores.parquet")
        check_aligned(rollouts, scores)
        trained = trained_on(rollouts, scores, spec.advantages)
        require_some(trained, scores)
        algorithm = algorithm_of(spec.algorithm)
        trainables = hold_checkpoint(self.learner, job.inputs, LoadConfig.of(spec), job.progress)
        start, reference = job.inputs["reference"], None
        if spec.model.lora is None:
            checkpoint = job.inputs["checkpoint"]
            folder = reference_folder(checkpoint.path, start.path, spec.advantages.reference)
            # A moved reference comes with each checkpoint; the start is held as long as the run has it.
            digest = start.digest if start.path in folder.parents else f"{checkpoint.digest}/reference"
            reference = self.learner.reference(folder, digest, model=spec.model, training=spec.training)
        models = models_of(trainables, self.ranks.threads, temperature=spec.temperature, reference=reference)
        sequences = [TokenSequence(row.prompt_token_ids, row.response_token_ids) for row in rollouts]
        with deterministic(spec.deterministic):
            own, need = temperatures_of(rollouts), needed(algorithm, spec.advantages)
            predictions = predict(models, need, sequences, spec.training, self.ranks, job.progress, own)
        moments = moments_with(spec.carried, [row for row, kept in zip(scores, trained, strict=True) if kept])
        experience, metrics = build_experience(
            rollouts,
            scores,
            predictions,
            algorithm,
            spec.advantages,
            kl_coef=coefficient_at(spec),
            max_response_tokens=spec.max_response_tokens,
            moments=moments,
        )
        counted = int(experience.response_mask.any(1).sum())
        stats: dict[str, Any] = {
            "metrics": metrics,
            "next_kl_coef": coefficient_after(
                spec.advantages, spec.kl_coef, metrics, counted, trains_policy=spec.trains_policy
            ),
            "num_tokens": int(experience.response_mask.sum()),
        }
        if spec.advantages.score_norm != "none":
            stats["carried"] = moments._asdict()
        if self.ranks.is_first:
            experience.save(job.output)
        return stats

    def update_policy(self, job: Job) -> dict[str, Any]:
        """Checkpoint k+1 from checkpoint k and experience, full or policy-only."""
        spec = UpdatePolicyJob.model_validate(job.spec)
        self.ranks.require(spec.training.num_ranks)
        before, experience = read_state(job.inputs["checkpoint"].path), job.inputs["experience"]
        trainables = hold_checkpoint(self.learner, job.inputs, LoadConfig.of(spec), job.progress)
        metrics = run_update(self.learner, experience, spec, job.progress, job.inputs.get("reference"))
        made = Replay(spec=derivation(spec), experience=experience.digest)
        write_checkpoint(
            job.output,
            trainables,
            self.learner.tokenizer,
            self.ranks,
            identity=str(self.learner.identity),
            replay=() if spec.full else (*before.replay, made),
        )
        write_averages(job.inputs["checkpoint"].path, job.output, self.learner, spec)
        carry = algorithm_of(spec.algorithm).carry
        carried = {} if carry is None else {"carried": dict(carry(metrics.get(KL_TO_OLD)))}
        return {"metrics": metrics, "full": spec.full, **carried}

    def forget(self, job: Job) -> dict[str, Any]:
        """Give up the checkpoint that is held, for the store has another one in its place."""
        self.learner.forget()
        return {}

    def make_room(self, job: Job) -> dict[str, Any]:
        """Leave the GPU to another engine; the next job has everything back. On a CPU there is no other place."""
        if not torch.cuda.is_available():
            return room_made(0)
        before = gpu_bytes_free()
        self.learner.make_room()
        free_unused()
        self.ranks.barrier()  # the others have left their GPUs too
        return room_made(gpu_bytes_free() - before)

    def _with_all_back(self, handler: Handler) -> Handler:
        def handle(job: Job) -> dict[str, Any]:
            self.learner.bring_back()
            try:
                return handler(job)
            finally:
                if self.offload_reference:
                    self.learner.offload_reference()
                if not self.learner.trainables:
                    free_unused()  # what the job has trained

        return handle

    def _trainable(
        self, module: Any, fit: SupervisedSpec | DescentSpec, training: TrainingSpec, *, dtype: str
    ) -> Trainable:
        """With new moments."""
        settings = supervised_settings(fit)
        return Trainable(module, settings, training, dtype=dtype, threads=self.ranks.threads.count)

    def _start_model(self, job: Job, spec: StartingJob, tokenizer: Any) -> Any:
        folder = job.inputs["model"].path if "model" in job.inputs else None
        seed = derive_seed(spec.seed, "weights")
        return starting_policy(spec.model, folder, tokenizer, seed=seed, trust_remote_code=self.trust_remote_code)
