"""The published recipes: each is a spec that loads, and adds up to the batches that its source tells of."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ppo_core.spec import RunSpec, SteppedReference, VapoSpec

RECIPES = Path(__file__).parents[2] / "examples" / "recipes"
BATCHES = {
    "instructgpt": (512, 64, 256_000),
    "trl_tldr": (512, 512, 999_936),
    "r1_zero": (8192, 512, 650 * 8192),
    "dapo": (8192, 512, 400 * 8192),
    "vapo": (8192, 512, 363 * 8192),
}
"""Responses of an iteration, of an optimizer step, and of the run."""


def load(name: str) -> RunSpec:
    return RunSpec.from_yaml(RECIPES / f"{name}.yaml")


def test_every_recipe_is_told_of_here() -> None:
    assert {path.stem for path in RECIPES.glob("*.yaml")} == set(BATCHES)


@pytest.mark.parametrize("name", BATCHES)
def test_a_recipe_loads_and_its_batches_are_those_of_its_source(name: str) -> None:
    spec = load(name)
    responses = spec.rollout.num_responses
    assert (responses, responses // spec.update.num_minibatches, responses * spec.iterations) == BATCHES[name]
    assert spec.notes() == []
    assert RunSpec.model_validate(spec.document()).document() == spec.document()
    assert spec.update.max_grad_norm == 1.0


@pytest.mark.parametrize("name", BATCHES)
def test_every_number_of_the_algorithm_says_where_it_is_from(name: str) -> None:
    """In the sections of numbers, each line with a number has a comment; k1 and k3 are names."""
    text = (RECIPES / f"{name}.yaml").read_text()
    assert re.search(r"arXiv:\d{4}\.\d{5}|ppo_tldr\.py", text)
    sections = re.findall(r"^(?:algorithm|rollout|advantages|update):.*\n(?:(?: .*)?\n)*", text, re.MULTILINE)
    numbers = [line for section in sections for line in section.splitlines() if re.search(r"^[^#]*\b\d", line)]
    assert len(numbers) > 12
    assert not [line for line in numbers if not re.search(r"# \S", line)]
    assert not re.findall(r"^(?:algorithm|rollout|advantages|update): *[^ #\n].*\d", text, re.MULTILINE), "in one line"


def test_what_sets_them_apart() -> None:
    dapo, vapo, r1 = load("dapo"), load("vapo"), load("r1_zero")
    assert (dapo.update.clip_low, dapo.update.clip_high, dapo.update.aggregation) == (0.2, 0.28, "token_mean")
    assert dapo.advantages.overlong is not None
    assert dapo.rollout.dynamic_sampling is not None
    assert dapo.rollout.max_response_tokens - dapo.advantages.overlong.buffer == 16_384
    assert vapo.algorithm == VapoSpec(lm_coef=0.1, correct_score=1.0)
    assert (vapo.advantages.gae_lambda_alpha, vapo.advantages.critic_gae_lambda) == (None, None)  # the algorithm's own
    assert vapo.update.critic_warmup_iterations == 50
    assert (r1.update.kl_loss_coef, r1.update.kl_loss_estimator) == (0.001, "k3")
    assert r1.advantages.reference == SteppedReference(iterations=400 // r1.update.num_minibatches)
    gpt = load("instructgpt")
    assert (gpt.advantages.kl.coef, gpt.evaluation.weights) == (0.02, "ema")
    assert gpt.update.ema_decay == pytest.approx(0.992**gpt.update.num_minibatches, abs=1e-4)
    assert [load(name).update.ema_decay for name in BATCHES].count(None) == len(BATCHES) - 1
    assert [load(name).advantages.reference.kind for name in BATCHES].count("fixed") == len(BATCHES) - 1
