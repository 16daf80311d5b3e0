"""Updates whose numbers are not finite; what training_program runs as skipped/NAME.

Row 0, which lies with one of the ranks alone, has an advantage of infinity (`advantage`), or a return so far off that
the critic's squared error overflows while its gradient's norm does not (`return`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ppo_core.processes.ranks import Ranks
from ppo_core.records import UpdatePolicyJob
from ppo_core.training import deepspeed_engine, learner, update
from ppo_core.training.checkpoint import write_checkpoint
from ppo_core.training.experience import Experience
from ppo_core.training.learner import Learner
from tests.ppo_core.training.programs.deepspeed_program import Facts, load, make_start, silent, train
from tests.ppo_core.training.update_cases import BF16, FP32, checkpoint_folder, make_experience, update_job

FAR = 2.1e19


def spoiled(kind: str) -> Experience:
    experience = make_experience()
    advantages, returns = experience.advantages.clone(), experience.returns.clone()
    if kind == "advantage":
        advantages[0, 0] = torch.inf
    if kind == "return":
        returns[0, 0] = FAR
    return replace(experience, advantages=advantages, returns=returns)


def skip(root: Path, ranks: Ranks) -> Facts:
    """clean1 -> clean2 -> clean3; and from clean1 again: no advantage, no return, and a clean update."""
    facts: Facts = {}
    for stage, dtype in FP32 + BF16:
        job, warm = update_job(zero_stage=stage, dtype=dtype), Learner(ranks)
        start = make_start(root, "llama-tied", dtype, ranks)
        for names in (("start", "clean1", "clean2", "clean3"), ("clean1", "advantage", "return", "after")):
            folders = [checkpoint_folder(root, stage, dtype, f"{name}-{ranks.world_size}") for name in names]
            for begin, end, name in zip(folders, folders[1:], names[1:], strict=False):
                begin = start if name == "clean1" else begin
                facts[end.name] = train(warm, begin, end, job, spoiled(name))
        warm.forget()
    return facts


def give_up(root: Path, ranks: Ranks) -> Facts:
    """Spoiled updates until one says that it is enough, each by a fresh learner; and with a good one in between."""
    facts: Facts = {}
    start = make_start(root, "llama-tied", "float32", ranks)
    for kind in ("advantage", "return"):
        job = update_job().model_copy(update={"max_skipped_steps": 3})
        for name, parts in {kind: [kind] * 3, f"{kind} and back": [kind, kind, "good", kind, kind]}.items():
            folder, facts[name] = start, []
            for number, part in enumerate(parts):
                end = root / f"give-up-{name}-{number}"
                facts[name].append(said_by(folder, end, job, spoiled(part), ranks))
                folder = end
    one = update_job(num_minibatches=8).model_copy(update={"max_skipped_steps": 1})
    facts["at once"] = said_by(start, root / "at-once", one, spoiled("advantage"), ranks)
    return facts


def said_by(start: Path, end: Path, job: UpdatePolicyJob, experience: Experience, ranks: Ranks) -> str:
    """What the update said, "" where nothing."""
    cold = Learner(ranks)
    try:
        train(cold, start, end, job, experience)
        return ""
    except FloatingPointError as error:
        return str(error)
    finally:
        cold.forget()


def mutants(root: Path, ranks: Ranks) -> Facts:
    """The same spoiled updates by code without its guards."""
    facts: Facts = {}
    start, job = make_start(root, "llama-tied", "float32", ranks), update_job()
    trusting = mutated(update, "        outputs.nan_unless(torch.isfinite(value))\n", "")
    stepping = mutated(deepspeed_engine, "        if math.isfinite(norm):\n            self._engine.step()", MUTATION)
    for name, kind, updater, trainable in (
        ("trusting", "return", trusting.Update, deepspeed_engine.Trainable),
        ("stepping", "advantage", update.Update, stepping.Trainable),
    ):
        original = vars(learner)["Trainable"]
        vars(learner)["Trainable"] = trainable
        try:
            fresh = Learner(ranks)
            networks = load(fresh, start, job)
        finally:
            vars(learner)["Trainable"] = original
        updater(networks, spoiled(kind), job, ranks).run(silent)
        write_checkpoint(root / name, networks, fresh.tokenizer, ranks, identity=name)
        fresh.forget()
    return facts


MUTATION = "        if True:\n            self._engine.step()"


def mutated(module: ModuleType, original: str, replacement: str) -> Any:
    """`module` with one piece of its source exchanged."""
    source = Path(str(module.__file__)).read_text()
    assert source.count(original) == 1, f"{original!r} is not in the source exactly once: adapt the mutation"
    mutant = ModuleType(f"mutated_{module.__name__}")
    sys.modules[mutant.__name__] = mutant
    exec(compile(source.replace(original, replacement), mutant.__name__, "exec"), vars(mutant))
    return mutant


SCENARIOS: dict[str, Callable[[Path, Ranks], Facts]] = {
    scenario.__name__: scenario for scenario in (skip, give_up, mutants)
}
