"""The training code under DeepSpeed, a process for each rank.

`python -m tests.ppo_core.training.programs.training_program NAMES DIR [MEETING]`
RANK, LOCAL_RANK and WORLD_SIZE must be set; several ranks inherit the descriptor MEETING. NAMES are scenarios like
trained/resume, and what each makes goes below DIR/trained, its facts to DIR/trained/resume-RANKS.json. It judges
nothing: that is the tests' part.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path

import torch

from ppo_core.processes.ranks import Ranks
from ppo_core.training import deepspeed_engine
from tests.ppo_core.engines import device_program
from tests.ppo_core.scoring import shared_rewards_program
from tests.ppo_core.training.programs import (
    averages_program,
    carry_program,
    deepspeed_program,
    dpo_program,
    held_program,
    lora_program,
    replay_program,
    reward_model_program,
    rloo_program,
    shared_program,
    skip_program,
    threads_program,
    vapo_program,
)

PROGRAMS = {
    "trained": deepspeed_program.SCENARIOS,
    "device": device_program.SCENARIOS,
    "replayed": replay_program.SCENARIOS,
    "skipped": skip_program.SCENARIOS,
    "rloo": rloo_program.SCENARIOS,
    "adapted": lora_program.SCENARIOS,
    "averaged": averages_program.SCENARIOS,
    "carried": carry_program.SCENARIOS,
    "shared": shared_program.SCENARIOS,
    "vapo": vapo_program.SCENARIOS,
    "reward_model": reward_model_program.SCENARIOS,
    "dpo": dpo_program.SCENARIOS,
    "held": held_program.SCENARIOS,
    "threaded": threads_program.SCENARIOS,
    "scored": shared_rewards_program.SCENARIOS,
}


def main(names: str, root: Path, meeting: int | None = None) -> None:
    torch.set_num_threads(1)
    deepspeed_engine.PERSISTENT = 0  # so that ranks share the weights of tiny models too
    ranks = Ranks(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), meeting=meeting)
    for program, _, name in (scenario.partition("/") for scenario in names.split(",")):
        # DeepSpeed collects garbage for each engine in stage 3, and would look at all that was imported until now.
        gc.collect()
        gc.freeze()
        (root / program).mkdir(exist_ok=True)
        facts = PROGRAMS[program][name](root / program, ranks)
        if ranks.is_first:
            (root / program / f"{name}-{ranks.world_size}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # as the engines end: to tear gloo down may abort a process whose work is done
