"""The update that imitates correct responses, against plain torch; what must not change it; exact over replays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.ppo_core.plain_torch import plain_imitation, plain_policy_loss
from tests.ppo_core.training.programs.vapo_program import ALGORITHM, BY_RESPONSE, CASES, RECIPE, with_examples
from tests.ppo_core.training.test_replay import assert_same_files, bytes_of
from tests.ppo_core.training.test_update import plain_update
from tests.ppo_core.training.update_cases import facts_of, update_job

PARTS = ("policy", "critic")


def weights_of(vapo: Path, case: str, part: str, ranks: int = 1) -> dict[str, Tensor]:
    return load_file(vapo / f"{case} {part}-{ranks}.safetensors")


def assert_of_the_paper(vapo: Path, case: str, recipe: dict[str, Any], coef: float) -> None:
    imitations: list[float] = []

    def plain_loss(logprobs: Tensor, experience: Any, update: Any, entropy: Tensor) -> Tensor:
        imitation = plain_imitation(logprobs, with_examples(experience))
        imitations.append(float(imitation.detach()))
        return plain_policy_loss(logprobs, experience, update, entropy) + coef * imitation

    policy, _, _, losses = plain_update(update_job(**recipe).update, plain_loss)
    ours = weights_of(vapo, case, "policy")
    for name, parameter in policy.named_parameters():
        torch.testing.assert_close(ours[name], parameter.detach(), rtol=0, atol=3e-5)
    metrics, mean = facts_of(vapo, "updates")[case], sum(imitations) / len(imitations)
    assert metrics["policy/lm_loss"] == pytest.approx(mean, rel=1e-4)
    assert metrics["policy/loss"] + coef * mean == pytest.approx(
        sum(losses["policy"]) / len(losses["policy"]), abs=1e-4
    )
    assert metrics["policy/gradient_norm"] == pytest.approx(sum(losses["norm"]) / len(losses["norm"]), rel=1e-3)


@pytest.mark.parametrize(("case", "recipe"), [("recipe", RECIPE), ("by response", BY_RESPONSE)])
def test_the_update_is_that_of_the_paper(vapo: Path, case: str, recipe: dict[str, Any]) -> None:
    """Over the tokens of the correct responses, also where the surrogate is a mean of responses, and weighed."""
    assert_of_the_paper(vapo, case, recipe, ALGORITHM.lm_coef)
    with pytest.raises(AssertionError):
        assert_of_the_paper(vapo, case, recipe, -ALGORITHM.lm_coef)


@pytest.mark.parametrize("case", ["without weight", "nothing correct"])
def test_without_weight_or_examples_the_update_is_ppos_to_the_bit(vapo: Path, case: str) -> None:
    for part in PARTS:
        ours, theirs = (weights_of(vapo, name, part) for name in (case, "ppo"))
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    facts = facts_of(vapo, "updates")
    assert "policy/lm_loss" not in facts["ppo"]
    assert facts["nothing correct"]["policy/lm_loss"] == 0.0 < facts["without weight"]["policy/lm_loss"]


@pytest.mark.parametrize(("size", "ranks"), [(3, 1), (8, 1), (1, 2), (3, 2)])
def test_microbatches_and_ranks_change_nothing(vapo: Path, size: int, ranks: int) -> None:
    """The three examples lie in other microbatches, and on other ranks, than one another."""
    for part in PARTS:
        ours, theirs = weights_of(vapo, f"microbatch{size}", part, ranks), weights_of(vapo, "microbatch1", part)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    ours, theirs = facts_of(vapo, "updates", ranks)[f"microbatch{size}"], facts_of(vapo, "updates")["microbatch1"]
    assert ours == pytest.approx(theirs, rel=5e-5, abs=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_a_fresh_engine_replays_to_the_same_bytes(vapo: Path, case: str) -> None:
    root, fact = vapo / case, facts_of(vapo, "runs")[case]
    assert_same_files(root / "full4", root / "full4-cold")
    assert_same_files(root / "full4", root / "full4-warm")
    full3, full4, thin3 = (bytes_of(root / name)["policy/model.safetensors"] for name in ("full3", "full4", "thin3"))
    assert full3 == thin3 != full4
    assert [note for note in fact["notes"] if note.startswith("replaying update 2 of 2")]
    assert fact["full4"]["metrics"]["policy/lm_loss"] > 0
