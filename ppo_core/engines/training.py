"""The training engine: DeepSpeed ranks holding the networks that are trained, and the reference.

Jobs: finetune_policy, train_reward_model, train_dpo, start_policy, compute_advantages, update_policy. `python -m
ppo_core.engines.training --num-ranks N` serves them on rank 0 and starts the other ranks itself; they get every job by
broadcast and do their share. RANK, LOCAL_RANK and WORLD_SIZE must be set.
"""

from __future__ import annotations

from typing import Annotated

import typer

from ppo_core.processes.permissions import Permissions
from ppo_core.processes.protocol import serve, take_over_stdout


def main(
    num_ranks: Annotated[int, typer.Option(min=1)] = 1,
    rank: Annotated[int, typer.Option(min=0)] = 0,
    meeting: Annotated[int | None, typer.Option(help="A descriptor that rank 0 hands on", min=0)] = None,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code")] = False,
    offload_reference: Annotated[bool, typer.Option("--offload-reference")] = False,
) -> None:
    """Serve training jobs on standard input and output (rank 0), or follow rank 0."""
    replies = take_over_stdout()
    # DeepSpeed prints while it is imported, so only now that the protocol's stream is safe.
    from ppo_core.processes.ranks import Ranks, follow, leading, open_meeting, start_other_ranks

    options = ["--trust-remote-code"] if trust_remote_code else []
    options += ["--offload-reference"] if offload_reference else []
    children = []
    if rank == 0 and num_ranks > 1:
        meeting = open_meeting()
        children = start_other_ranks("ppo_core.engines.training", num_ranks, meeting, *options)
    from ppo_core.processes.threads import Threads
    from ppo_core.training.service import TrainingEngine

    ranks = Ranks(rank, num_ranks, children, meeting, Threads.of_machine())
    engine = TrainingEngine(ranks, trust_remote_code=trust_remote_code, offload_reference=offload_reference)
    if rank > 0:
        follow(engine)
    engine.ranks.end_with_children()
    serve({name: leading(engine, name) for name in engine.handlers}, replies, Permissions())


if __name__ == "__main__":
    typer.run(main)
