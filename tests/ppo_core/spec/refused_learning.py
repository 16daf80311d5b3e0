"""Specs that cannot be run for how the policy samples and learns: algorithm, rollout, advantages, update, schedule.

Each is what it changes in the smallest spec, with the words in which it is refused.
"""

from __future__ import annotations

from typing import Any

ADAPTIVE = {"kind": "adaptive", "target": 6, "horizon": 51}
RLOO = {"algorithm": {"kind": "rloo"}}
PAIRS = {**RLOO, "rollout": {"samples_per_prompt": 2}}
FIXED_LOSS = {"kl_loss_coef": 0.1}
TOO_LARGE: list[tuple[dict[str, Any], str]] = [
    ({"update": {name: value}}, f"update.{name}={shown}: must be at most {limit} .default: ")
    for name, value, shown, limit in (
        ("learning_rate", 1e4, "10000.0", "1"),
        ("critic_learning_rate", 1.5, "1.5", "1"),
        ("weight_decay", 2.0, "2.0", "1"),
        ("clip_high", 1e9, "1000000000.0", "10"),
        ("eps", 2.0, "2.0", "1"),
        ("entropy_coef", 101.0, "101.0", "100"),
        ("kl_loss_coef", 1e3, "1000.0", "100"),
        ("num_ppo_epochs", 101, "101", "100"),
    )
]
ONE_STEP: dict[str, Any] = {"update": {"num_ppo_epochs": 1, "num_minibatches": 1}}
IN_ONE_STEP: list[tuple[dict[str, Any], str]] = [
    ({"update": {**ONE_STEP["update"], "dual_clip": 3.0}}, "dual_clip=3 has no effect .* at the old policy: leave it"),
    ({"update": {**ONE_STEP["update"], "value_clip": 0.2}}, "value_clip=0.2 has no effect .* at the old values: leave"),
    (
        {"algorithm": {"kind": "kl_penalty_ppo"}},
        "the only step begins at the old policy, where the penalty has ",
    ),
    (
        {
            "advantages": {"kl": {"coef": 0}, "reference": {"kind": "every", "iterations": 1}},
            "update": {**ONE_STEP["update"], "kl_loss_coef": 0.1},
        },
        "reference.iterations=1 makes the reference the policy .* update.num_minibatches to 2 or more",
    ),
]
REFUSED_LEARNING: list[tuple[dict[str, Any], str]] = [
    ({"dataset": {"train": "a", "id_column": "answer"}}, "id_column=answer is answer_column too: name a column of ids"),
    *TOO_LARGE,
    *((ONE_STEP | case, words) for case, words in IN_ONE_STEP),
    (
        {"advantages": {"reference": {"kind": "every", "iterations": 1}}},
        "reference.iterations=1 makes the reference the policy that each iteration begins with, .*: raise it, or set",
    ),
    (
        {**PAIRS, "advantages": {"score_norm": "mean_std"}},
        "score_norm=mean_std subtracts a mean that cancels with algorithm.kind=rloo, .*: set it to std or none",
    ),
    (
        {"algorithm": {"kind": "kl_penalty_ppo"}, "guards": {"max_clip_fraction": 0.5}},
        "guards.max_clip_fraction=0.5 has no effect with an algorithm that clips no ratio: leave it out, or set",
    ),
    (
        {"advantages": {"old_logprobs": "sampler"}, "guards": {"max_sampler_difference": 0.1}},
        "guards.max_sampler_difference=0.1 has no effect with advantages.old_logprobs=sampler, .*: leave it out, or",
    ),
    ({"guards": {"gold_window": 3}}, "gold_window=3 has no effect with gold_reward=none: leave it out, or set gold_"),
    (
        {"guards": {"max_rollbacks": 1}},
        "max_rollbacks=1 has no effect with on_divergence=stop: leave it out, or set on_divergence to rollback",
    ),
    (
        {"registry": {"metric": "evaluation/scroe"}},
        "registry.metric=evaluation/scroe is not measured by an evaluation: set it to one of evaluation/score, evaluat",
    ),
    ({"advantages": {"kl": {"coef": 1e3}}}, "advantages.kl.coef=1000.0: must be at most 100"),
    ({"advantages": {"kl": {**ADAPTIVE, "coef": 1e3}}}, "advantages.kl.coef=1000.0: must be at most 100"),
    ({"algorithm": {"kind": "ppo_shared", "value_coef": 1e3}}, "algorithm.value_coef=1000.0: must be at most 100"),
    (
        {"sft": {"data": "rows.jsonl", "learning_rate": 2.0, "weight_decay": 2.0}},
        "sft.learning_rate=2.0: must be at most 1(.|\n)*sft.weight_decay=2.0: must be at most 1",
    ),
    (
        {**PAIRS, "advantages": {"whiten": True}},
        "whiten=true subtracts a mean over all prompts, .* set it to false, or whiten_centred to false, which only",
    ),
    ({**PAIRS, "algorithm": {"kind": "grpo"}, "advantages": {"whiten": "minibatch"}}, "whiten=minibatch subtracts a "),
    (
        {**PAIRS, "advantages": {"whiten_centred": False}},
        "whiten_centred=false has no effect with algorithm.kind=rloo, .*: leave it out, or set whiten to true or mini",
    ),
    (
        {**PAIRS, "advantages": {"whiten_rewards": True}},
        "whiten_rewards=true .* depends on its length, and algorithm.kind=rloo learns from these sums: leave it out",
    ),
    ({"algorithm": {"kind": "reinforce"}, "advantages": {"whiten_rewards": True}}, "=reinforce learns from these sums"),
    (
        {"algorithm": {"kind": "reinforce", "baseline": "none"}},
        "baseline=none has no effect with centred .*: leave it out, or set advantages.whiten or whiten_",
    ),
    (
        {"algorithm": {"kind": "reinforce", "baseline": "none"}, "advantages": {"whiten": "minibatch"}},
        "baseline=none has no effect",
    ),
    (
        {"advantages": {"kl": {"kind": "adaptive"}}},
        "advantages.kl.target: is required but missing .*nats; 6 is a usual value",
    ),
    (
        {"update": FIXED_LOSS},
        "kl_loss_coef=0.1 puts the KL into the loss, .* advantages.kl.coef=0.01 prices it in the reward too: set "
        "advantages.kl.coef to 0 for the loss alone, or to 0.01 to have both",
    ),
    ({"update": FIXED_LOSS, "advantages": {"kl": {"estimator": "abs"}}}, "prices it in the reward too"),
    (
        {"advantages": {"truncated": "mask", "missing_eos_penalty": 1}},
        "missing_eos_penalty=1 has no effect with truncated=mask .*: leave it out, or set truncated to terminal",
    ),
    (
        {"advantages": {"kl": {"coef": 0, "estimator": "abs"}}},
        "advantages.kl.*: estimator=abs has no effect with coef=0: leave it out, or set coef above 0",
    ),
    (
        {"advantages": {"kl": {"coef": 0, "length_normalised": True}}},
        "length_normalised=true has no effect with coef=0: leave it out, or set coef above 0",
    ),
    (
        {"update": {"kl_loss_estimator": "k3"}},
        "update: kl_loss_estimator=k3 has no effect with kl_loss_coef=0: leave it out, or set kl_loss_coef above 0",
    ),
    (
        {"update": {"num_ppo_epochs": 1, "max_kl": 0.02}},
        "max_kl=0.02 has no effect with num_ppo_epochs=1 .*: leave it out, or set num_ppo_epochs to 2 or more",
    ),
    (
        {"update": {"schedule": "constant", "decay_iterations": 9}},
        "decay_iterations=9 has no effect with update.schedule=constant .*: leave it out, or set schedule to linear",
    ),
    (
        {"advantages": {"reference": {"kind": "ema"}, "kl": {"coef": 0}}},
        "reference.kind=ema has no effect on .* with advantages.kl.coef=0 and update.kl_loss_coef=0: leave ",
    ),
    (
        {"schedule": "overlapped"},
        "schedule=overlapped trains on responses .* set it to token, sequence or mask, or schedule to synchronous$",
    ),
    (
        {"advantages": {"old_logprobs": "sampler"}, "update": {"importance_correction": "token"}},
        "importance_correction=token needs .* set old_logprobs to trainer, or importance_correction to none$",
    ),
    (
        {"advantages": {"overlong": {"buffer": 49}}},
        r"overlong.buffer=49 is longer than a response can be \(rollout.max_response_tokens=48\): lower it to 48",
    ),
    ({"rollout": {"dynamic_sampling": {}}}, "rollout.dynamic_sampling.max_batches: is required but missing"),
    ({"rollout": {"dynamic_sampling": {"max_batches": 1}}}, "max_batches=1: must be at least 2"),
    (
        {**RLOO, "rollout": {"dynamic_sampling": {"max_batches": 2}}},
        "samples_per_prompt=1 gives algorithm.kind=rloo nothing to compare",
    ),
    (
        {"rollout": {"samples_per_prompt": 4, "dynamic_sampling": {"max_batches": 2}}},
        "dynamic_sampling drops prompts .* algorithm.kind=ppo learns from these too: leave it out, or set .* or grpo",
    ),
    (
        {
            **RLOO,
            "schedule": "overlapped",
            "rollout": {"samples_per_prompt": 4, "dynamic_sampling": {"max_batches": 2}},
            "update": {"importance_correction": "token"},
        },
        "dynamic_sampling has to score a batch .* set schedule to synchronous, or leave dynamic_sampling out",
    ),
    ({"advantages": {"overlong": {"penalty": 1}}}, "advantages.overlong.buffer: is required but missing"),
    (
        {"advantages": {"whiten": False, "whiten_centred": False}},
        "advantages: whiten_centred=false has no effect with whiten=false: leave it out, or set whiten to true or",
    ),
    (
        {"advantages": {"whiten": "batch"}},
        "advantages.whiten='batch': must be true or false, or 'minibatch'$",
    ),
    (
        {"advantages": {"gae_lambda": 1, "gae_lambda_alpha": 0.05}},
        "gae_lambda=1 has no effect with gae_lambda_alpha=0.05, .*: leave one of them out",
    ),
    (
        {"iterations": 9, "update": {"critic_warmup_iterations": 9}},
        "critic_warmup_iterations=9 leaves no iteration to train .*iterations=9, .*: lower it to 8 or less",
    ),
    ({"update": {"critic_warmup_iterations": 9, "decay_iterations": 5}}, "and its schedule ends after 5.: lower it to"),
    ({**RLOO, "advantages": {"critic_gae_lambda": 1}}, "critic_gae_lambda=1.0 has no effect with .* trains no critic"),
    ({**RLOO, "advantages": {"gae_lambda_alpha": 0.05}}, "gae_lambda_alpha=0.05 has no effect with .* without GAE"),
    ({**RLOO, "update": {"critic_warmup_iterations": 3}}, "critic_warmup_iterations=3 has no effect with .* no critic"),
    ({"update": {"kl_loss_estimator": "k1"}}, "kl_loss_estimator='k1': must be 'k2', 'k3', 'k1.', 'k3.' or 'f"),
    (
        {
            "update": {"kl_loss_coef": 0.1, "kl_loss_estimator": "full"},
            "advantages": {"reference": {"kind": "every", "iterations": 2}},
        },
        "kl_loss_estimator=full needs a reference that stays, .*kind=every replaces it: set that to fixed, or .* to k2",
    ),
    (
        {"update": {"entropy_schedule": "linear"}},
        "entropy_schedule=linear has no effect with entropy_coef=0: leave it out, or set entropy_coef above 0",
    ),
    (
        {"update": {"kl_loss_coef": 1, "final_kl_loss_fraction": 0.5}},
        "final_kl_loss_fraction=0.5 has no effect with kl_loss_schedule=constant: leave it out, or set kl_loss_sch",
    ),
    (
        {"advantages": {"kl": {"coef": 0, "schedule": "cosine"}}},
        "schedule=cosine has no effect with coef=0: leave it out",
    ),
    ({"advantages": {"kl": {"kind": "adaptive", "schedule": "linear"}}}, "advantages.kl.schedule: unknown key"),
    ({"update": {"importance_cap": 3}}, "importance_cap=3 has no effect with importance_correction=none: leave it out"),
    (
        {"update": {"importance_correction": "token", "importance_floor": 0.1}},
        "importance_floor=0.1 has no effect with importance_correction=token: leave it out, or set .* to mask$",
    ),
    (
        {"rollout": {"max_response_tokens_column": "most"}, "advantages": {"overlong": {"buffer": 8}}},
        "overlong penalises .*max_response_tokens_column=most gives prompts limits of their own: leave one",
    ),
    ({"rollout": {"temperature_column": ""}}, "rollout.temperature_column='': must not be empty"),
    ({"rollout": {"temprature": 1}}, r"rollout.temprature: unknown key; did you mean temperature\?"),
    ({"advantages": {"kl": {**ADAPTIVE, "targt": 3}}}, r"advantages.kl.targt: unknown key; did you mean target\?"),
    ({"advantages": {"kl": {"kind": "adaptve"}}}, "advantages.kl.kind='adaptve': choose one of 'fixed', 'adaptive'"),
    ({"rollout": {"temperature": float("inf")}}, "rollout.temperature=inf: must be a finite number"),
    ({"rollout": {"temperature": 0}}, "rollout.temperature=0: must be at least 0.01"),
    ({"rollout": {"stop": [""]}}, "rollout.stop.0.='': must not be empty"),
    ({"rollout": {"stop_token_ids": [-1]}}, "rollout.stop_token_ids.0.=-1: must be at least 0"),
    ({"rollout": {"top_p": 0.9}}, r"rollout: top_p=0.9, top_k=-1 cut .* Set top_p: 1 and top_k: -1"),
    ({"rollout": {"top_k": 50}}, r"rollout: top_p=1.0, top_k=50 cut .* Set top_p: 1 and top_k: -1"),
    ({"update": {"betas": [0.9, 1.0]}}, "update.betas.1.=1.0: must be less than 1$"),
    ({"update": {"num_minibatches": 3}}, r"update.num_minibatches=3 does not divide the 256 .* \[1, 2, 4, 8, 16, "),
    ({"update": {"ema_decay": 1}}, "update.ema_decay=1: must be less than 1"),
    ({"advantages": {"reference": {"kind": "every"}}}, "advantages.reference.iterations: is required but missing"),
    (
        {"algorithm": {"kind": "ppo_shared"}, "model": {"path": "a", "lora": {}}},
        "model.lora with algorithm.kind=ppo_shared: .* set algorithm.kind to ppo, rloo, grpo or reinforce",
    ),
    (
        {"algorithm": {"kind": "ppo_shared"}, "update": {"critic_learning_rate": 1.0}},
        "critic_learning_rate=1.0 has no effect with algorithm.kind=ppo_shared .* algorithm.value_coef weights",
    ),
    ({"advantages": {"kl": ADAPTIVE}}, "horizon=51 is too short for the 256 responses .* Raise it to at least 52"),
    (
        {"algorithm": {"kind": "rlo"}},
        "algorithm.kind='rlo': choose one of 'ppo', 'vapo', 'ppo_shared', 'kl_penalty_ppo', 'rloo', 'grpo', 'r",
    ),
    (
        {"algorithm": {}},
        "algorithm.kind: is required but missing: choose one of 'ppo', 'vapo', 'ppo_shared', 'kl_penalty_ppo', ",
    ),
    ({"algorithm": {"kind": "rloo", "kin": 1}}, r"algorithm.kin: unknown key; did you mean kind\?"),
    (
        RLOO,
        r"samples_per_prompt=1 gives algorithm.kind=rloo nothing .* set it to 2 or more .* or algorithm.kind to ppo",
    ),
    (
        {**RLOO, "advantages": {"truncated": "bootstrap"}},
        "bootstrap needs a critic, .* trains none: set terminal or mask",
    ),
    (
        {**RLOO, "advantages": {"gamma": 0.9}},
        "advantages.gamma=0.9 has no effect with .*rloo .*: leave it out, or set ",
    ),
    ({**RLOO, "advantages": {"gae_lambda": 1}}, "advantages.gae_lambda=1.0 has no effect with .* without GAE"),
    ({**RLOO, "update": {"value_clip": 0.2}}, "update.value_clip=0.2 has no effect with .* trains no critic"),
    ({**RLOO, "update": {"critic_learning_rate": 0.1}}, "update.critic_learning_rate=0.1 has no effect with"),
    ({"algorithm": {"kind": "grpo"}}, "samples_per_prompt=1 gives algorithm.kind=grpo nothing to compare"),
    ({"algorithm": {"kind": "grpo", "scale": "max"}}, "algorithm.scale='max': must be 'std' or 'none'"),
    (
        {"algorithm": {"kind": "kl_penalty_ppo"}, "update": {"clip_high": 0.3}},
        "update.clip_high=0.3 has no effect with algorithm.kind=kl_penalty_ppo .it clips no ratio.: leave it out",
    ),
    *(
        (
            {"algorithm": {"kind": "vapo"}, "advantages": {"gae_lambda": value}},
            f"gae_lambda={value} has no effect with algorithm.kind=vapo, .* lambda by its length .*: leave it out, or",
        )
        for value in (0.9, 0.95)
    ),
    ({"algorithm": {"kind": "vapo", "lm_coef": -0.1}}, "algorithm.lm_coef=-0.1: must be at least 0"),
    ({"algorithm": {"kind": "vapo", "lm_coef": 101}}, "algorithm.lm_coef=101: must be at most 100"),
    ({"algorithm": {"kind": "vapo", "correct_score": float("inf")}}, "correct_score=inf: must be a finite number"),
    (
        {"algorithm": {"kind": "vapo"}, "rollout": {"samples_per_prompt": 2, "dynamic_sampling": {"max_batches": 3}}},
        "dynamic_sampling drops prompts .* but algorithm.kind=vapo learns from these too: leave it out",
    ),
    ({"algorithm": {"kind": "vapo"}, "schedule": "overlapped"}, "importance_correction=none does not correct for that"),
    ({"algorithm": {"kind": "kl_penalty_ppo", "coef": 0}}, "coef=0: must be at least 1e-06"),
    (
        {"algorithm": {"kind": "reinforce"}, "advantages": {"gae_lambda": 1}},
        "gae_lambda=1.0 has no effect with .*reinf",
    ),
    (
        {"update": {"schedule": "constant", "final_lr_fraction": 0.5}},
        "update: final_lr_fraction=0.5 has no effect with schedule=constant: leave it out, or set schedule to linear",
    ),
]
