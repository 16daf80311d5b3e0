"""What was learned from preferences, each on a page that is written once: what is named there, nobody collects."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from uuid import uuid4

from infra.artifacts import ArtifactRef, ArtifactStore
from infra.backend import open_log
from infra.runs.checksummed_json import RecordCorrupted
from ppo_core.records import content_digest
from ppo_core.spec.hub import HubCommit
from tasks.stages.hub_names import Spec, hub_sources, with_commits
from tasks.stages.references import StageRef

REWARD_MODELS, DPO_POLICIES = "reward-models", "dpo-policies"


def keep(root: str, run: str, made: Sequence[ArtifactRef], pages: str = REWARD_MODELS) -> None:
    """Name what a run has made so far; the last one is the latest. The same again changes nothing."""
    all_of_it = content_digest([ref.digest for ref in made])[:16]
    page = {"run": run, "artifacts": [ref.model_dump() for ref in made], "nonce": uuid4().hex}
    open_log(root, pages).create(f"{run}-{made[-1].key[:16]}-{all_of_it}.json", json.dumps(page).encode())


def with_inputs(store: ArtifactStore, made: Sequence[StageRef]) -> list[ArtifactRef]:
    """The same, bare and each once, behind what they were made of: of answers, say, that an evaluation scores."""
    refs = [given for ref in made for given in store.manifest(ref.bare()).inputs]
    return list({(ref.kind, ref.key): ref for ref in [*refs, *(ref.bare() for ref in made)]}.values())


def with_own_commits(
    root: str, spec: Spec, run: str, flow: str, *, keep: bool, known: Iterable[HubCommit] = ()
) -> Spec:
    """The spec with the commits that its names of the hub had when the run began; to `keep` them they are written down.

    What is `known` of them is not asked.

    Raises what `with_commits` raises, and RecordError for a page that cannot be read.
    """
    names = sorted(hub_sources(spec))
    if not names:
        return spec
    folder = f"{flow}-commits"
    pages, name = open_log(root, folder), f"{run}-{content_digest(names)[:16]}.json"
    told = pages.read(name)
    if told is None:
        resolved = with_commits(spec, known)
        page = {"commits": [one.model_dump() for one in resolved.hub_commits], "nonce": uuid4().hex}
        if not keep or pages.create(name, json.dumps(page).encode()):
            return resolved
        told = pages.read(name)
    try:
        found = [HubCommit.model_validate(one) for one in json.loads(told or b"")["commits"]]
    except (ValueError, TypeError, KeyError) as error:
        raise RecordCorrupted(
            f"page {name} of {folder} is damaged ({type(error).__name__}): remove it, and write commits into the "
            "spec, as in hf://OWNER/NAME@COMMIT"
        ) from None
    return with_commits(spec, found)


def kept(root: str, folder: str = REWARD_MODELS) -> set[tuple[str, str]]:
    """Kind and key of what all pages in a folder name. Raises RecordError for a page that cannot be read."""
    pages, found = open_log(root, folder), set()
    for name in pages.names():
        try:
            refs = [ArtifactRef.model_validate(ref) for ref in json.loads(pages.read(name) or b"")["artifacts"]]
        except (ValueError, TypeError, KeyError) as error:
            raise RecordCorrupted(
                f"page {name} of {folder} is damaged ({type(error).__name__}): remove it, and give the same "
                "command that trained what it names again"
            ) from None
        found |= {(ref.kind, ref.key) for ref in refs}
    return found
