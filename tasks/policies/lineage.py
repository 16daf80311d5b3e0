"""Where a policy is from, down to the prompts: read from the registry, the run's records and the store's manifests."""

from __future__ import annotations

from dataclasses import dataclass, field

from infra.artifacts import open_store
from infra.mlflow.registry import aliases_of
from infra.settings import Settings
from tasks.policies.policy import Policy, find_policy
from tasks.policies.promote_policy import history
from tasks.runs.made_from import Link, Step, link_to, step_of
from tasks.runs.run_state import committed


@dataclass(frozen=True)
class Lineage:
    """The whole chain of a policy, the latest iteration first; at its end the dataset, and what came from the hub."""

    policy: Policy
    aliases: list[str]
    steps: list[Step]
    dataset: Link
    moves: list[str]
    downloads: list[Link] = field(default_factory=list)

    @property
    def complaints(self) -> list[str]:
        """Everything that does not fit together."""
        return [complaint for step in self.steps for complaint in step.complaints]


def trace(name: str) -> Lineage:
    """The lineage of what `name` means. Raises InputError, RegistryError, RecordError or ArtifactError."""
    settings = Settings()
    policy = find_policy(name)
    store = open_store(settings.store_root)
    records = committed(policy.run).records[: policy.iteration + 1]
    steps = [step_of(store, made, before) for made, before in zip(records, [None, *records], strict=False)][::-1]
    dataset = policy.record.dataset
    counts = ", ".join(f"{count} {split}" for split, count in sorted(dataset.counts.items()))
    sources = " and ".join(filter(None, (policy.spec.dataset.label, policy.spec.dataset.evaluation)))
    aliases: list[str] = []
    moves: list[str] = []
    if policy.version is not None:
        known = aliases_of(settings.tracking_uri, policy.version.name)
        aliases = sorted(alias for alias, version in known.items() if version == policy.version.version)
        moves = history(policy.version.name)
    prompts = link_to(store, dataset.bare(), f"{counts} prompts of {sources}")
    downloads = [link_to(store, ref.bare(), ref.in_words()) for ref in policy.record.downloads]
    return Lineage(policy, aliases, steps, prompts, moves, downloads)
