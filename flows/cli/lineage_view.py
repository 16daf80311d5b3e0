"""A lineage as text: the version, its chain from the last iteration down to the prompts, and its promotions."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

from tasks.policies.lineage import Lineage, Step


def lines(lineage: Lineage) -> Iterator[str]:
    """From the version down."""
    policy, record = lineage.policy, lineage.policy.record
    yield policy.name
    if policy.version is not None:
        made = datetime.fromtimestamp(policy.version.created_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M UTC")
        aliases = f", aliases {', '.join(lineage.aliases)}" if lineage.aliases else ""
        yield f"  version    {policy.version.version} of {policy.version.name}, registered {made}{aliases}"
        yield f"  source     {policy.version.source}"
    forked = f", forked from {record.forked_from}" if record.forked_from else ""
    yield f"  run        {policy.run}, iteration {policy.iteration}{forked}"
    yield f"  spec       {record.spec_digest[:12]}  seed {policy.spec.seed}, reward {policy.spec.reward.labels}"
    for step in lineage.steps:
        yield from step_lines(step)
    yield f"  prompts    {lineage.dataset.line()}"
    yield from (f"  hub        {link.line()}" for link in lineage.downloads)
    if lineage.moves:
        yield "  promotions of this model"
        yield from (f"    {move}" for move in lineage.moves)


def step_lines(step: Step) -> Iterator[str]:
    """One iteration: the checkpoint first, then what it was made from."""
    for number, link in enumerate(step.links):
        head = f"iteration {step.iteration}" if number == 0 else ""
        arrow = "" if number == 0 else "-> " if link.kind == "evaluation" else "<- "
        yield f"  {head:<14} {arrow}{link.line()}"
    yield from (f"  ! {complaint}" for complaint in step.complaints)
