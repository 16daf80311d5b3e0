"""Switches without effect, and names that mean something else here: what a person wrote is refused, a record is not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ppo_core.spec import RunSpec, SpecError
from ppo_core.spec import promotion as spec_promotion
from tests.ppo_core.spec.refused_learning import ONE_STEP, PAIRS
from tests.ppo_core.spec.refused_specs import SMALLEST
from tests.ppo_core.spec.test_spec import ROOT, loaded

HELD_OUT = {"dataset": {"train": "prompts.jsonl", "evaluation": "held_out.jsonl"}}
STEPPED: dict[str, Any] = {"advantages": {"reference": {"kind": "every", "iterations": 5}}}
NAMED = [{"kind": "number", "name": "accuracy"}, {"kind": "length", "max": 9, "name": "score", "weight": 0}]
GOLD = {"gold_reward": "correct", "gold_window": 3}
GROUPS = {"rollout": {"samples_per_prompt": 4}}
WITHOUT_EFFECT: list[tuple[dict[str, Any], str]] = [
    (
        {**ONE_STEP, "guards": {"max_clip_fraction": 0.5}},
        "max_clip_fraction=0.5 has no effect with update.num_ppo_epochs=1 and num_minibatches=1, which clips no ratio",
    ),
    (
        {"advantages": {"gae_lambda": 0.95, "gae_lambda_alpha": 0.05}},
        "gae_lambda=0.95 has no effect with gae_lambda_alpha=0.05, .*: leave one of them out",
    ),
    (
        {"algorithm": {"kind": "vapo", "lm_coef": 0, "correct_score": 2}},
        "correct_score=2 has no effect with lm_coef=0: leave it out, or set lm_coef above 0",
    ),
    (
        {**STEPPED, "promotion": {"max_kl": 5}},
        "promotion.max_kl=5 lets no policy pass with advantages.reference.kind=every, with which its KL to the start",
    ),
    (
        {"update": {"ema_decay": 0.9}, "evaluation": {"weights": "ema"}, "promotion": {"max_kl": 5}},
        "promotion.max_kl=5 lets no policy pass with evaluation.weights=ema, .*: leave it out, or change that",
    ),
    (
        {"algorithm": {"kind": "grpo"}, **GROUPS, "advantages": {"score_norm": "std", "kl": {"coef": 0}}},
        "score_norm=std has no effect with algorithm.kind=grpo, .*: leave it out, or set algorithm.scale to none",
    ),
    (
        {"algorithm": {"kind": "grpo"}, **GROUPS, "advantages": {"score_norm": "std"}},
        "score_norm=std has no effect with algorithm.kind=grpo, .*: leave it out, or set algorithm.scale to none",
    ),
    (
        {"algorithm": {"kind": "grpo"}, **GROUPS, "advantages": {"score_norm": "mean_std"}},
        "score_norm=mean_std subtracts a mean that cancels with algorithm.kind=grpo, .* one prompt: leave it out",
    ),
    (
        {
            "algorithm": {"kind": "rloo"},
            **GROUPS,
            "advantages": {"score_norm": "std", "whiten": True, "whiten_centred": False, "kl": {"coef": 0}},
        },
        "score_norm=std has no effect with algorithm.kind=rloo, whose whitening .*: leave it out, or set",
    ),
    *(
        ({"algorithm": {"kind": "reinforce"}, "advantages": {"score_norm": norm, "kl": {"coef": 0}}}, words)
        for norm, words in (
            ("std", "score_norm=std has no effect with algorithm.kind=reinforce, whose whitening divides .*: leave it"),
            ("mean_std", "score_norm=mean_std has no effect with algorithm.kind=reinforce, whose whitening .*: leave"),
        )
    ),
    (
        {"algorithm": {"kind": "reinforce"}, "advantages": {"score_norm": "mean_std", "whiten": False}},
        "score_norm=mean_std subtracts a mean that cancels with algorithm.kind=reinforce, .*: set it to std or none",
    ),
    (
        {"model": {"path": "folder", "dtype": "bfloat16"}, "training": {"compute_dtype": "float32", "zero_stage": 1}},
        "compute_dtype=float32 with model.dtype=bfloat16, .*: set model.dtype to float32, or leave compute_dtype out",
    ),
    (
        {
            "model": {"path": "folder", "dtype": "bfloat16"},
            "rollout": {"dtype": "float32"},
            "training": {"zero_stage": 1},
        },
        "rollout.dtype=float32 with model.dtype=bfloat16, .*: set model.dtype to float32, or leave rollout.dtype out",
    ),
    (
        {"dataset": {"train": [{"path": "a.jsonl"}, {"path": "b.jsonl"}], "evaluation": "b.jsonl"}},
        "evaluation=b.jsonl is in train too, so that nothing would be held out: give another file, or evaluation_frac",
    ),
    (
        {"registry": {"metric": "system/cpu"}},
        "metric=system/cpu is of the machine, not of an iteration: set it to eval",
    ),
    ({"registry": {"metric": "sft/loss"}}, "metric=sft/loss is measured at the start alone: set it to evaluation/sc"),
    ({"registry": {"metric": "gold/change"}}, "metric=gold/change needs guards.gold_reward, which names none: set it"),
    (
        {"algorithm": {"kind": "reinforce"}, "registry": {"metric": "critic/loss"}},
        "registry.metric=critic/loss needs a critic, and none is trained: set it to evaluation/score, or to another",
    ),
    (
        {"guards": {"on_divergence": "rollback", "rollback_rate_factor": 0}},
        r"rollback_rate_factor=0 would leave learning rates of 0 .*: set it above 0 \(0.5\), or on_divergence to stop",
    ),
    (
        {"update": {"importance_correction": "mask", "importance_floor": 1, "importance_cap": 1}},
        "importance_floor=1 and importance_cap=1 leave out every token .*: lower the floor .*, or raise the cap",
    ),
    (
        {"checkpoint": {"keep_every": 5}},
        "keep_every=5 has no effect with keep_last=none, .*leave it out, or set keep",
    ),
]
MEANT_OTHERWISE: list[tuple[dict[str, Any], str]] = [
    ({"algorithm": {"kind": "dpo"}}, "algorithm: kind=dpo learns from preferences, .*: `ppoflow dpo` .docs/dpo.md.$"),
    (
        {"algorithm": {"kind": "reinforce", "baseline": "leave_one_out"}},
        "algorithm.baseline: leave_one_out is an algorithm of its own here: set algorithm.kind to rloo, and rollout",
    ),
    (
        {"update": {"kl_loss_coef": 0.1}, "advantages": {"kl": {"kind": "adaptive", "target": 6}}},
        "the default advantages.kl.coef=0.05 prices it in the reward too: set advantages.kl.coef to 0 with kind fixed "
        "for the loss alone, or to 0.05 to have both",
    ),
]
TWO_MEANINGS = [
    (
        {"reward": {"sources": NAMED}, "promotion": {"metric": name}},
        f"promotion.metric={name} is ambiguous, for a reward is called {name} too: give that reward another `name`, or",
    )
    for name in ("accuracy", "score")
]


@pytest.mark.parametrize(("changes", "message"), WITHOUT_EFFECT + MEANT_OTHERWISE + TWO_MEANINGS)
def test_what_would_be_ignored_or_taken_for_something_else_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        loaded(tmp_path, changes)


def test_an_override_is_refused_like_the_file(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="algorithm: kind=dpo learns from preferences"):
        loaded(tmp_path, PAIRS, ("algorithm.kind=dpo",))


@pytest.mark.parametrize("changes", [changes for changes, _ in WITHOUT_EFFECT + TWO_MEANINGS])
def test_a_record_with_such_a_setting_is_read(changes: dict[str, Any]) -> None:
    assert RunSpec.model_validate({**SMALLEST, **changes}).document()


@pytest.mark.parametrize(
    "changes",
    [
        {"update": {**ONE_STEP["update"], "clip_low": 0.1}, "advantages": {"old_logprobs": "sampler"}},
        {**ONE_STEP, "advantages": {"old_logprobs": "sampler"}, "guards": {"max_clip_fraction": 0.5}},
        ONE_STEP,
        {"advantages": {"gae_lambda_alpha": 0.2}},
        {
            "algorithm": {"kind": "vapo", "correct_score": 2},
            "update": {"critic_warmup_iterations": 2},
            "advantages": {"gae_lambda_alpha": 0.2},
        },
        {"checkpoint": {"keep_last": 2, "keep_every": 5}},
        {**HELD_OUT, "evaluation": {"num_prompts": 64, "every": 2, "pass_score": 0.5}},
        {"update": {"kl_loss_coef": 0.1}, "advantages": {"kl": {"kind": "adaptive", "target": 6, "coef": 0.05}}},
        {"reward": {"sources": NAMED}, "guards": {"gold_reward": "accuracy"}},
        {"reward": {"sources": [{"kind": "number", "name": "score"}]}, "promotion": {"metric": "score"}},
        {**STEPPED, "iterations": 6},
        {"guards": GOLD, "iterations": 6},
        {**STEPPED, "iterations": 6, "promotion": {"min_gain": 0.1}},
        {"algorithm": {"kind": "grpo"}, **GROUPS, "advantages": {"score_norm": "std", "score_clip": 5}},
        {"algorithm": {"kind": "reinforce"}, "advantages": {"score_norm": "std"}},
        {"algorithm": {"kind": "reinforce"}, "advantages": {"score_norm": "mean_std", "gamma": 0.9}},
        {"algorithm": {"kind": "grpo", "scale": "none"}, **GROUPS, "advantages": {"score_norm": "std"}},
        {"algorithm": {"kind": "ppo_shared"}, "registry": {"metric": "critic/explained_variance"}},
        {"reward": {"sources": NAMED}, "guards": {"gold_reward": "accuracy", "max_gold_fall": 0.1}},
        {"engines": {"backend": "ray", "address": "head:6379", "rollout_resources": {"GPU": 1}}},
    ],
)
def test_beside_what_they_need_they_are_taken_without_a_word(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert loaded(tmp_path, changes).notes() == []


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        (
            {"update": {**ONE_STEP["update"], "clip_low": 0.2, "clip_high": 0.3}},
            "update.clip_low=0.2 and update.clip_high=0.3 without effect: .* step begins at the old policy",
        ),
        ({**STEPPED, "iterations": 5}, "reference.iterations=5 is not below iterations=5: the reference stays the st"),
        ({"guards": GOLD, "iterations": 5}, "guards.gold_window=3 compares .* 6 in all, and iterations=5: gold/change"),
        (
            {"evaluation": {"num_prompts": 64, "every": 2, "pass_score": 0.5}},
            "and evaluation.every=2 and evaluation.num_prompts=64 and evaluation.pass_score=0.5 without effect: set ",
        ),
        (
            {"advantages": {"gae_lambda_alpha": 0.05}},
            r"lambda_alpha=0.05 .*max_response_tokens=48\) lambda 0.58, and those of up to 20 tokens 0: .*; 0.42 gives",
        ),
        ({"advantages": {"whiten_rewards": True}}, "whiten_rewards=true adds a constant to every token's reward,"),
        (
            {"algorithm": {"kind": "vapo"}, "update": {"critic_warmup_iterations": 2}},
            r"lambda_alpha=0.05 \(the algorithm's own\) .*max_response_tokens=48\) lambda 0.58, and those of up to 20",
        ),
        (
            {"algorithm": {"kind": "vapo"}, "advantages": {"gae_lambda_alpha": 0.2}},
            "vapo without critic warm-up: .*; set update.critic_warmup_iterations, 50",
        ),
        (
            {"engines": {"address": "head:6379", "training_resources": {"GPU": 2}}},
            "^engines.address and engines.training_resources without effect: engines.backend=local runs all engines h",
        ),
        (
            {"registry": {"metric": "evaluation/accuracy"}},
            "no prompts are held out, so that registry.metric=evaluation/accuracy is not measured and the last",
        ),
        (
            {"reward": {"sources": [NAMED[0]]}, "guards": {"gold_reward": "accuracy", "max_gold_fall": 0.1}},
            "max_gold_fall=0.1 is never reached: guards.gold_reward=accuracy is the whole score .*; name a reward of w",
        ),
        ({"registry": {"metric": "kl/reference"}}, "metric=kl/reference: the best policy is that of the highest value"),
    ],
)
def test_what_a_longer_run_held_out_prompts_or_the_paper_would_change_is_noted(
    tmp_path: Path, changes: dict[str, Any], note: str
) -> None:
    (said,) = loaded(tmp_path, changes).notes()
    assert re.search(note, said)


def test_every_documented_metric_may_choose_the_best_policy(tmp_path: Path) -> None:
    cells = [line.split("|")[1] for line in (ROOT / "docs" / "metrics.md").read_text().splitlines() if "|" in line]
    named = [name for cell in cells for name in re.findall(r"`([a-z]+/\w+(?:/<name>)?)", cell)]
    assert {name.partition("/")[0] for name in named} == set(spec_promotion.MEASURED)
    rewards = {"reward": {"sources": [{"kind": "number", "name": "gold"}, {"kind": "length", "max": 9}]}}
    beside = ("score/gold", "score/gold/acc", "evaluation/score/gold/acc", "evaluation/greedy_score/length")
    measured = {**rewards, "guards": {"gold_reward": "gold"}}
    for name in (*named, *beside):
        metric = name.replace("<name>", "gold")
        if metric.startswith(tuple(spec_promotion.NOT_RECORDED)):
            continue  # see test_switches
        assert loaded(tmp_path, {**measured, "registry": {"metric": metric}}).registry.metric == metric
    recorded = RunSpec.model_validate({**SMALLEST, "folder": "", "registry": {"metric": "toy/nothing"}})
    assert recorded.registry.metric == "toy/nothing", "of an earlier run"
