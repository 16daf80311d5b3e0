"""Whether what a run goes on from is undamaged, byte for byte."""

from __future__ import annotations

from prefect.logging import get_run_logger

from infra.artifacts import ArtifactCorrupted, ArtifactMissing, ArtifactRef
from tasks.runs.iteration_record import IterationRecord
from tasks.stages.context import RunContext
from tasks.stages.stage import stage


def resume_inputs(record: IterationRecord, *, best: bool = False) -> list[tuple[int, ArtifactRef]]:
    """What going on from a record needs, each with the iteration that made it, in the order of making.

    With `best` also the best policy, which only the end of a run needs.
    """
    last = record.iteration
    needs: list[tuple[int, ArtifactRef]] = [(0, record.reference)]
    if record.base is not None:
        needs.append((last - len(record.replay), record.base))
    needs += [(last - len(record.replay) + n, ref) for n, ref in enumerate(record.replay, 1)]
    if record.sampler is not None:
        needs.append((last - 1, record.sampler))
    needs.append((last, record.checkpoint))
    if best:
        needs.append((record.best.iteration, record.best.checkpoint))
    seen: dict[tuple[str, str], tuple[int, ArtifactRef]] = {(ref.kind, ref.key): (n, ref) for n, ref in needs}
    return sorted(seen.values(), key=lambda need: (need[0], need[1].kind == "checkpoint"))


@stage("check_artifact")
def set_aside_damaged(context: RunContext, ref: ArtifactRef) -> str | None:
    """None for an undamaged artifact; else what is wrong, and where the damaged one is kept now."""
    plain = ArtifactRef(kind=ref.kind, uri=ref.uri, digest=ref.digest)
    try:
        if context.store.find(ref.kind, ref.key) is None:  # a copy on this machine is of no use to another one
            return f"the store {context.store.root} holds no artifact {ref.kind}/{ref.key}"
        context.store.fetch(plain)
    except ArtifactMissing as error:
        return str(error)
    except ArtifactCorrupted as error:
        kept = context.store.set_aside(ref.kind, ref.key, digest=ref.digest)
        get_run_logger().warning("%s; set aside at %s", error, kept)
        return f"{error}; it was set aside at {kept}"
    return None
