"""The training engine: DeepSpeed ranks holding the networks that are trained, and the reference.

Jobs: finetune_policy, train_reward_model, train_dpo, start_policy, compute_advantages, update_policy. `python -m
ppo_core.engines.training --num-ranks N` serves them on rank 0 and starts the other ranks itself; they get every job by
broadcast and do their share. RANK, LOCAL_RANK and WORLD_SIZE must be set.
"""

from __future__ import annotations

import argparse

from ppo_core.processes.permissions import Permissions
from ppo_core.processes.protocol import serve, take_over_stdout


def main() -> None:
    """Serve training jobs on standard input and output (rank 0), or follow rank 0."""
    given = _arguments()
    num_ranks, rank, meeting = given.num_ranks, given.rank, given.meeting
    replies = take_over_stdout()
    # DeepSpeed prints while it is imported, so only now that the protocol's stream is safe.
    from ppo_core.processes.lean_imports import leave_out_unused, quick_imports
    from ppo_core.processes.ranks import Ranks, follow, leading, open_meeting, start_other_ranks

    options = ["--trust-remote-code"] if given.trust_remote_code else []
    options += ["--offload-reference"] if given.offload_reference else []
    children = []
    if rank == 0 and num_ranks > 1:
        meeting = open_meeting()
        children = start_other_ranks("ppo_core.engines.training", num_ranks, meeting, *options)
    with quick_imports():
        leave_out_unused()
        from ppo_core.processes.threads import Threads
        from ppo_core.training.service import TrainingEngine

    ranks = Ranks(rank, num_ranks, children, meeting, Threads.of_machine())
    engine = TrainingEngine(ranks, trust_remote_code=given.trust_remote_code, offload_reference=given.offload_reference)
    if rank > 0:
        follow(engine)
    serve({name: leading(engine, name) for name in engine.handlers}, replies, Permissions())


def _arguments() -> argparse.Namespace:
    """By Python alone: benchmarks run on a machine that has little else than torch."""
    parser = argparse.ArgumentParser("ppo_core.engines.training", description=main.__doc__, allow_abbrev=False)
    parser.add_argument("--num-ranks", type=int, default=1)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--meeting", type=int, help="a descriptor that rank 0 hands on")
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument("--offload-reference", action="store_true")
    given = parser.parse_args()
    for name, least in (("num_ranks", 1), ("rank", 0), ("meeting", 0)):
        if (value := vars(given)[name]) is not None and value < least:
            parser.error(f"--{name.replace('_', '-')} {value} is below {least}")
    return given


if __name__ == "__main__":
    main()
