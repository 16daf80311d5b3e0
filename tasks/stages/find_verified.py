"""Looking in the store, so that what is damaged there is made again."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from prefect.logging import get_run_logger

from infra.artifacts import ArtifactCorrupted, ArtifactRef
from tasks.stages.context import RunContext


def pin_all(context: RunContext, refs: Iterable[ArtifactRef]) -> None:
    """Pin artifacts whose record is about to go, and look for each: a collector that is about to take one sees that."""
    for ref in refs:
        context.pin(ref.kind, ref.key)
        with suppress(ArtifactCorrupted):  # found again, and mended, where it is needed
            context.store.find(ref.kind, ref.key)


def find_verified(context: RunContext, kind: str, key: str) -> ArtifactRef | None:
    """What the store has, checked; a damaged artifact is set aside, so that the stage makes it again."""
    try:
        ref = context.store.find(kind, key)
        if ref is not None:
            context.store.fetch(ref)
        return ref
    except ArtifactCorrupted as error:
        kept = context.store.set_aside(kind, key)
        get_run_logger().warning("%s; set aside at %s, making it again", error, kept)
        return None
