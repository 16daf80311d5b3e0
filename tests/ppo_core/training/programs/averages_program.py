"""Updates with what follows the policy, by one rank; what training_program runs as averaged/NAME."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ppo_core.data.tables import write_rollouts, write_scores
from ppo_core.processes.ranks import Ranks
from ppo_core.records import ComputeAdvantagesJob, OptimizerSettings, RolloutRow, ScoreRow, StartPolicyJob
from ppo_core.spec import AdvantageSpec, AveragedReference, SteppedReference
from ppo_core.training.service import TrainingEngine
from tests.ppo_core.tiny_models import EOS
from tests.ppo_core.training.programs.deepspeed_program import Facts, make_start
from tests.ppo_core.training.programs.lora_program import SPECS, AdaptedRun
from tests.ppo_core.training.programs.replay_program import do, experiences, given, jobs_like
from tests.ppo_core.training.update_cases import update_job

DECAY, REFERENCE_DECAY, STEP = 0.75, 0.5, 2
AVERAGED = AveragedReference(kind="ema", decay=REFERENCE_DECAY)
CASES: dict[str, dict[str, Any]] = {
    "ema": {"reference": AVERAGED},
    "every": {"reference": SteppedReference(kind="every", iterations=STEP)},
    "bfloat16": {"reference": AVERAGED, "zero_stage": 2, "dtype": "bfloat16"},
    "adapters": {"zero_stage": 1, "lora": SPECS["llama-tied"]},
}


def runs(root: Path, ranks: Ranks) -> Facts:
    """Four updates, all in full and policy-only ones between; and advantages of the start and of the last two."""
    facts: Facts = {}
    rows = [RolloutRow("p", i, [3, 4], [5, 6 + i, EOS], "w5", [-1.0] * 3, "stop") for i in range(4)]
    write_rollouts(root / "rollouts.parquet", rows)
    write_scores(root / "scores.parquet", [ScoreRow("p", i, float(i), {"f": 1.0}, False, None) for i in range(4)])
    for case, changes in CASES.items():
        settings = dict(changes)
        lora, reference = settings.pop("lora", None), settings.pop("reference", None)
        dtype = settings.get("dtype", "float32")
        policy, start = make_start(root, "llama-tied", dtype, ranks) / "policy", root / f"begun-{case}"
        model = update_job(dtype=dtype).model.model_copy(update={"lora": lora})
        begin = StartPolicyJob(seed=1, model=model, ema=True)
        do(TrainingEngine(ranks), "start_policy", given(tokenizer=policy, model=policy), start, begin, [])
        jobs = jobs_like({}, {}, {}, {}, ema_decay=DECAY, num_minibatches=2, learning_rate=1e-2, **settings)
        more = {"model": model, **({"reference": reference} if reference else {})}
        run = AdaptedRun(root / case, ranks, start, [job.model_copy(update=more) for job in jobs], experiences())
        facts[case] = {**run.warm(), **run.sparse("full4-cold")}
        advantages = AdvantageSpec(whiten=False, **({"reference": reference} if reference else {}))
        spec = ComputeAdvantagesJob(
            model=model,
            temperature=1.0,
            max_response_tokens=3,
            advantages=advantages,
            training=jobs[0].training,
            optimizer=OptimizerSettings.of(jobs[0].update),
            kl_coef=0.0,
        )
        engine = TrainingEngine(ranks)
        for name in ("full4", "full1", "full3", "thin3"):
            inputs = given(checkpoint=run.root / name, reference=start, rollouts=root, scores=root, **run.origin())
            facts[case][f"of {name}"] = do(engine, "compute_advantages", inputs, run.root / f"of-{name}", spec, [])
        engine.learner.forget()
    return facts


SCENARIOS: dict[str, Callable[[Path, Ranks], Facts]] = {"runs": runs}
