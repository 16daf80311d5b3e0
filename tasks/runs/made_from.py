"""What the artifacts of an iteration were made from, by their manifests and by its record.

A record names what its iteration made; the manifest of each artifact names what it was made from. Both must say the
same. What retention has removed is known from the record alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from infra.artifacts import ArtifactError, ArtifactMissing, ArtifactRef, ArtifactStore
from tasks.runs.iteration_record import IterationRecord
from tasks.stages.references import RolloutsRef
from tasks.stages.table import BY_NAME, EVALUATE_POLICY

SHOWN_DIGITS = 12


@dataclass(frozen=True)
class Link:
    """One artifact of the chain: `made_from` are the digests of its inputs as its manifest has them; None: removed."""

    kind: str
    digest: str
    made_from: tuple[str, ...] | None
    fact: str = ""

    def line(self) -> str:
        """As people read it."""
        gone = "  (removed by retention; as its record says)" if self.made_from is None else ""
        fact = f"  {self.fact}" if self.fact else ""
        return f"{self.kind:<11}{self.digest[:SHOWN_DIGITS]}{fact}{gone}"


@dataclass(frozen=True)
class Step:
    """What one iteration made, the latest first, and what is wrong with its chain."""

    iteration: int
    links: list[Link]
    complaints: list[str] = field(default_factory=list)


def step_of(store: ArtifactStore, record: IterationRecord, previous: IterationRecord | None) -> Step:
    """One iteration's part of the chain, checked against the manifests."""
    metrics = record.metrics
    # The latest first, but for the evaluation: it is of the checkpoint, and nothing is made of it.
    latest_first = list(record.artifacts.values())[::-1]
    made = sorted(latest_first, key=lambda ref: ref.kind == EVALUATE_POLICY.kind)
    facts = {
        "experience": _shown("KL", metrics, "kl/reference"),
        "scores": _shown("mean score", metrics, "score/mean"),
        "evaluation": _shown("held-out score", metrics, "evaluation/score"),
        "checkpoint": "the start" if previous is None else "",
    }
    facts |= {ref.kind: f"{ref.num_responses} responses" for ref in made if isinstance(ref, RolloutsRef)}
    links = [link_to(store, ref.bare(), facts.get(ref.kind, "")) for ref in made]
    complaints = [
        f"iteration {record.iteration}: {link.kind} {link.digest[:SHOWN_DIGITS]} was made from other inputs than its "
        f"record says: {', '.join(sorted(digest[:SHOWN_DIGITS] for digest in unexpected))}"
        for link in links
        if (unexpected := set(link.made_from or ()) - expected_inputs(link.kind, record, previous))
    ]
    return Step(record.iteration, links, complaints)


def expected_inputs(kind: str, record: IterationRecord, previous: IterationRecord | None) -> set[str]:
    """The digests of what an artifact of this kind can have been made from, by the records."""
    sources = record.sources(previous)
    stages = [BY_NAME[name] for name in record.artifacts]
    named = {source for stage in stages if stage.kind == kind for source in stage.inputs.values()}
    return {sources[name].digest for name in named if name in sources}


def link_to(store: ArtifactStore, ref: ArtifactRef, fact: str = "") -> Link:
    """An artifact with its inputs; without them where the store has it no more. ArtifactError for a damaged one."""
    try:
        manifest = store.manifest(ref)
        if manifest.digest != ref.digest:
            raise ArtifactError(f"what the store has under this key has the digest {manifest.digest[:SHOWN_DIGITS]}")
        inputs = [given for one in manifest.inputs for given in answers_of(store, ref, one)]
    except ArtifactMissing:
        return Link(ref.kind, ref.digest, None, fact)
    except ArtifactError as error:
        raise ArtifactError(f"the lineage ends at {ref.kind} {ref.digest[:SHOWN_DIGITS]}: {error}") from error
    return Link(ref.kind, ref.digest, tuple(given.digest for given in inputs), fact)


def answers_of(store: ArtifactStore, made: ArtifactRef, given: ArtifactRef) -> tuple[ArtifactRef, ...]:
    """An input; of an evaluation's answers, which no record names, what they were sampled from."""
    if made.kind == "evaluation" and given.kind == "rollouts":
        return store.manifest(given).inputs
    return (given,)


def _shown(name: str, metrics: dict[str, float], key: str) -> str:
    return f"{name} {metrics[key]:.4f}" if key in metrics else ""
