"""Evaluating policies outside of their runs: the same prompts and seeds for all that are compared.

What is made lies in the store like any other artifact, and comes from there where it was made before: the evaluation
that a run has made of its own policy is found again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import TypeVar

from infra.artifacts import ArtifactRef, ArtifactStore, open_store
from infra.backend import open_records
from infra.engines.protocol import OnProgress
from infra.mlflow.tracking import RunTracker
from infra.runs.lease import Heartbeat, Lease, LeaseHeld
from infra.settings import Settings
from ppo_core.records import InputError
from ppo_core.spec import ModelSpec, RunSpec
from ppo_core.spec.hub import HubCommit, exact_name
from tasks.evaluate_policy import evaluate_policy
from tasks.policies.policy import Policy
from tasks.prepare_dataset import prepare_dataset
from tasks.runs.run_state import changed_values
from tasks.stages.context import RunContext
from tasks.stages.download_source import download_sources
from tasks.stages.early_engines import SCORING_ALONE
from tasks.stages.engines import Engines
from tasks.stages.holding import PRIVATE, held
from tasks.stages.hub_names import with_commits
from tasks.stages.references import DatasetRef, EvaluationRef
from tasks.stages.table import EVALUATE_POLICY

M = TypeVar("M", bound=ModelSpec)
TRAINING = "training"
NOT_EVALUATED = ("promotion", "engines.")
"""Sections of a spec without which an evaluation is what it is, or nearly so."""
TOKENIZER, SETTINGS, TEMPLATE = "policy/tokenizer.json", "policy/tokenizer_config.json", "policy/chat_template.jinja"
OF_FILES = frozenset({"is_local", "local_files_only", "name_or_path", "processor_class", "transformers_version"})
"""Settings of a tokenizer that say where it came from, and change nothing of what it makes of texts."""


@contextmanager
def open_evaluation(policy: Policy, spec: RunSpec, title: str, on_progress: OnProgress) -> Iterator[RunContext]:
    """Means to evaluate with, beside whatever the policy's run is doing; rollout and scoring engines start at once, but
    the latter alone where the run itself has evaluated the policy in this way.

    Only what is pinned is safe from the collector, and only who has a lease can pin: so each evaluation holds one of
    its own. `title` names its MLflow run.
    """
    if not spec.dataset.evaluates:
        raise InputError(
            f"the spec of run {policy.run} has no held-out prompts (dataset.evaluation is not set): name some with "
            "--set dataset.evaluation=FILE"
        )
    settings, spec = Settings(), with_commits(spec)
    store = open_store(settings.store_root)
    with any_lease(store.root) as lease:
        context = RunContext(
            spec=spec,
            run=policy.run,
            settings=settings,
            store=store,
            records=open_records(store.root, policy.run),
            engines=Engines(spec, settings, settings.log_folder(lease.run)),
            tracker=RunTracker(settings.tracking_uri, spec.name, title, settings.mlflow_folder / "artifacts"),
            on_progress=on_progress,
            lease=lease,
        )
        with Heartbeat(lease, on_lost=context.engines.close):
            try:
                needed = SCORING_ALONE if as_in_its_run(policy, spec) else context.engines.handles.keys() - {TRAINING}
                for name in needed:  # a cluster that is away may not be needed
                    context.engines.handles[name].start()
                yield context
            finally:
                context.engines.close()


def as_in_its_run(policy: Policy, spec: RunSpec) -> bool:
    """Whether the policy's run has evaluated it as this spec says; the store has most likely kept that."""
    changed = changed_values(policy.spec, spec)
    return EVALUATE_POLICY.name in policy.record.artifacts and all(key.startswith(NOT_EVALUATED) for key in changed)


@contextmanager
def pinned(root: str, refs: Iterable[ArtifactRef]) -> Iterator[None]:
    """Keep the collector from these artifacts, which nothing names yet, while the context is open."""
    with any_lease(root) as lease, Heartbeat(lease, on_lost=lambda: None):
        for ref in refs:
            lease.pin(ref.kind, ref.key)
        yield


@contextmanager
def any_lease(root: str) -> Iterator[Lease]:
    """The first lease for evaluations, and for what is kept of them, that nobody holds; released at the end."""
    with ExitStack() as stack:
        for number in count(1):
            with suppress(LeaseHeld):
                lease = stack.enter_context(held(root, f"{PRIVATE}evaluation-{number}"))
                break
        yield lease


def evaluate_held_out(
    context: RunContext, policy: Policy, like: Policy | None = None
) -> tuple[DatasetRef, EvaluationRef]:
    """The policy's answers to the held-out prompts of the context's spec, scored by that spec's reward.

    `like` is the policy whose run has that spec; without, it is this one's.
    """
    here = context if like is None else context.with_spec(adapt_spec(context, policy, like))
    download_sources(here)
    dataset = prepare_dataset(here)
    return dataset, evaluate_policy(here, policy.checkpoint, dataset)


def adapt_spec(context: RunContext, policy: Policy, like: Policy) -> RunSpec:
    """The context's spec with what belongs to the policy and not to the test: precision, which weights, the tokenizer
    with its chat template, and the ids of its tokens that end a response."""
    rollout = context.spec.rollout
    if same_tokenizer(context.store, policy.checkpoint.bare(), like.checkpoint.bare()):
        model = context.spec.model.model_copy(update={"dtype": policy.spec.model.dtype})
    else:
        model = absolute(policy.spec.model, Path(policy.spec.folder), policy.spec.hub_commits)
        rollout = rollout.model_copy(update={"stop_token_ids": policy.spec.rollout.stop_token_ids})
    evaluation = context.spec.evaluation.model_copy(update={"weights": policy.spec.evaluation.weights})
    precision = policy.spec.rollout.compute_dtype(policy.spec.training)
    rollout = rollout.model_copy(update={"dtype": precision})
    changes = {"model": model, "rollout": rollout, "evaluation": evaluation}
    return with_commits(context.spec.model_copy(update=changes))


def same_tokenizer(store: ArtifactStore, *checkpoints: ArtifactRef) -> bool:
    """Whether the tokenizers of two policies make the same of every chat; files are looked into only if they differ."""
    one, other = (store.manifest(checkpoint).files for checkpoint in checkpoints)
    if TOKENIZER not in one or any(one.get(name) != other.get(name) for name in (TOKENIZER, TEMPLATE)):
        return False
    if one.get(SETTINGS) == other.get(SETTINGS):
        return True
    if SETTINGS not in one or SETTINGS not in other:
        return False
    read = (json.loads((store.fetch(checkpoint) / SETTINGS).read_bytes()) for checkpoint in checkpoints)
    settings, others = ({key: value for key, value in found.items() if key not in OF_FILES} for found in read)
    return settings == others


def absolute(model: M, folder: Path, commits: Iterable[HubCommit] = ()) -> M:
    """A model section whose paths start at no spec's folder any more, and whose names of the hub say their commits."""
    paths = {name: path for name in ("path", "tokenizer", "critic") if (path := vars(model).get(name)) is not None}
    at = {one.name: exact_name(one) for one in commits}
    return model.model_copy(update={name: at.get(p) or str((folder / p).absolute()) for name, p in paths.items()})
