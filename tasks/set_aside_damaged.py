"""Reads what a run goes on from, byte for byte; what is damaged leaves its place, so that it is made again."""

from __future__ import annotations

from prefect.logging import get_run_logger

from infra.artifacts import ArtifactCorrupted, ArtifactMissing, ArtifactRef
from tasks.stages.context import RunContext
from tasks.stages.stage import stage


@stage("set_aside_damaged")
def set_aside_damaged(context: RunContext, ref: ArtifactRef) -> str | None:
    """None for an undamaged artifact; else what is wrong, and where the damaged one is kept now."""
    try:
        if context.store.find(ref.kind, ref.key) is None:  # a copy on this machine is of no use to another one
            return f"the store {context.store.root} holds no artifact {ref.kind}/{ref.key}"
        context.store.fetch(ref.bare())
    except ArtifactMissing as error:
        return str(error)
    except ArtifactCorrupted as error:
        kept = context.store.set_aside(ref.kind, ref.key, digest=ref.digest)
        get_run_logger().warning("%s; set aside at %s", error, kept)
        return f"{error}; it was set aside at {kept}"
    return None
