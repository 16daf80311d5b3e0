"""The reward models of a store, each on a page that is written once: what is named there, nobody collects."""

from __future__ import annotations

import json
from collections.abc import Sequence
from uuid import uuid4

from infra.artifacts import ArtifactRef
from infra.backend import open_log
from infra.runs.checksummed_json import RecordCorrupted
from ppo_core.records import content_digest

REWARD_MODELS = "reward-models"


def keep(root: str, run: str, made: Sequence[ArtifactRef]) -> None:
    """Name what a run has made; the last one is the reward model. The same again changes nothing."""
    all_of_it = content_digest([ref.digest for ref in made])[:16]
    page = {"run": run, "artifacts": [ref.model_dump() for ref in made], "nonce": uuid4().hex}
    open_log(root, REWARD_MODELS).create(f"{run}-{made[-1].key[:16]}-{all_of_it}.json", json.dumps(page).encode())


def kept(root: str) -> set[tuple[str, str]]:
    """Kind and key of what all pages name. Raises RecordError for a page that cannot be read."""
    pages, found = open_log(root, REWARD_MODELS), set()
    for name in pages.names():
        try:
            refs = [ArtifactRef.model_validate(ref) for ref in json.loads(pages.read(name) or b"")["artifacts"]]
        except (ValueError, TypeError, KeyError) as error:
            raise RecordCorrupted(
                f"page {name} of {REWARD_MODELS} is damaged ({type(error).__name__}): remove it, and give the same "
                "command that trained the reward model again"
            ) from None
        found |= {(ref.kind, ref.key) for ref in refs}
    return found
