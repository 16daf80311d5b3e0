"""Scenarios of the other programs once more, on two threads; what training_program runs as threaded/NAME."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from ppo_core.processes.ranks import Ranks
from ppo_core.processes.threads import Threads
from tests.ppo_core.training.programs import (
    deepspeed_program,
    dpo_program,
    lora_program,
    reward_model_program,
    shared_program,
)
from tests.ppo_core.training.programs.deepspeed_program import Facts

Scenario = Callable[[Path, Ranks], Facts]
PARTS: dict[str, tuple[Scenario, ...]] = {
    "trained": (deepspeed_program.updates, deepspeed_program.supervised),
    "shared": (shared_program.updates,),
    "adapted": (lora_program.updates,),
    "reward_model": (reward_model_program.fits,),
    "dpo": (dpo_program.fits,),
}


TWICE = tuple(name for name in PARTS if name != "trained")  # those are many, and of the same code


def on_two_threads(name: str, root: Path, ranks: Ranks) -> Facts:
    """Into `root/once/NAME` and perhaps `root/again/NAME`."""
    facts, before, ranks.threads = Facts(), ranks.threads, Threads(2)
    for time in ("once", "again") if name in TWICE else ("once",):
        folder = root / time / name
        folder.mkdir(parents=True)
        for part in PARTS[name]:
            facts[part.__name__] = part(folder, ranks)
    ranks.threads = before
    return facts


SCENARIOS: dict[str, Scenario] = {name: partial(on_two_threads, name) for name in PARTS}
