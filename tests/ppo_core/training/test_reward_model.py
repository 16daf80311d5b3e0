"""Training of reward models against plain torch, and what others make of the folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import logsigmoid
from transformers import AutoModelForSequenceClassification, BertConfig

from ppo_core.models.classifier import Classifier
from ppo_core.models.reward_model import ClassifierFolder
from ppo_core.records import InputError, derive_seed
from tests.ppo_core.tiny_models import EOS, tiny_policy
from tests.ppo_core.training.programs.reward_model_program import FIT, SEED, rankings

CASES = {"llama": "llama", "tied": "llama-tied", "gpt2": "gpt2", "sharded": "llama"}


@pytest.fixture(scope="module")
def facts(programs: Path) -> dict[str, Any]:
    return json.loads((programs / "reward_model" / "fits-1.json").read_text())


def one_step(name: str, seed: int = SEED, rows: Sequence[int] = (0, 1, 2, 3)) -> tuple[Any, torch.Tensor, float]:
    """Trunk, head and loss after one step of torch's AdamW on the papers' loss, each text by itself."""
    trunk = tiny_policy(name).base_model
    hidden = trunk.config.hidden_size
    drawn = torch.randn((1, hidden), generator=torch.Generator().manual_seed(seed)) / (hidden + 1) ** 0.5
    head = torch.nn.Parameter(drawn)
    total = torch.zeros(())
    for row in (rankings()[number] for number in rows):
        scores = [(trunk(torch.tensor([text])).last_hidden_state[0, -1] @ head.T)[0] for text in row.responses]
        terms = [
            -0.9 * logsigmoid(better - worse - row.margin)
            - 0.1 * logsigmoid(worse - better - row.margin)
            + 0.05 * (better + worse) ** 2
            for better, worse in combinations(scores, 2)
        ]
        total = total + torch.stack(terms).mean() / 4
    total.backward()
    trained = [*trunk.parameters(), head]
    torch.nn.utils.clip_grad_norm_(trained, FIT.max_grad_norm)
    settings = {"lr": FIT.learning_rate, "betas": FIT.betas, "eps": 1e-8, "weight_decay": FIT.weight_decay}
    torch.optim.AdamW(trained, **settings).step()
    return trunk, head.detach(), float(total.detach())


@pytest.mark.parametrize("case", CASES)
def test_one_step_is_one_of_adamw_on_the_loss_of_all_pairs(programs: Path, facts: dict[str, Any], case: str) -> None:
    trunk, head, loss = one_step(CASES[case])
    assert facts[case]["reward_model/loss"] == pytest.approx(loss, abs=1e-5)
    saved = AutoModelForSequenceClassification.from_pretrained(programs / "reward_model" / case)
    torch.testing.assert_close(saved.score.weight.detach(), head, rtol=0, atol=1e-5)
    for name, parameter in trunk.named_parameters():
        if name.endswith("c_attn.bias"):
            continue  # a key's bias changes no attention: its gradient is noise, which Adam's first step makes as large
        torch.testing.assert_close(saved.base_model.get_parameter(name).detach(), parameter.detach(), rtol=0, atol=1e-5)


def test_of_sources_with_weights_each_batch_has_its_share(programs: Path) -> None:
    """Of the second source's three rows one was drawn, whichever; the head is drawn from the job's seed."""
    found = json.loads((programs / "reward_model" / "weighed-1.json").read_text())
    seed = derive_seed(1, "reward head")
    possible = [one_step("llama", seed, (0, 0, 0, other))[2] for other in (1, 2, 3)]
    nearest = min(possible, key=lambda loss: abs(loss - found["metrics"]["reward_model/loss"]))
    assert found["metrics"]["reward_model/loss"] == pytest.approx(nearest, abs=1e-5)
    assert min(abs(loss - one_step("llama", seed)[2]) for loss in possible) > 1e-3


@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_the_folder_gives_the_scores_that_the_weights_gave_in_training(
    programs: Path, facts: dict[str, Any], case: str
) -> None:
    """By transformers' own class, a batch of one text each, and by the reward kind `model`, in batches."""
    folder, texts = programs / "reward_model" / case, [text for row in rankings() for text in row.responses]
    saved = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    assert (saved.config.num_labels, saved.config.problem_type) == (1, "regression")
    assert saved.config.architectures == [type(saved).__name__]
    alone = [float(saved(torch.tensor([text])).logits[0, 0]) for text in texts]
    assert facts[case]["packed"] is True
    assert len({round(score, 4) for score in alone}) == len(alone)
    assert alone == pytest.approx(facts[case]["scores"], abs=1e-5)
    classifier = Classifier(folder, dtype="float32", trust_remote_code=False)
    assert classifier.scores(texts, 20) == pytest.approx(facts[case]["scores"], abs=1e-5)


def test_two_ranks_make_what_one_makes(programs: Path, facts: dict[str, Any]) -> None:
    both = json.loads((programs / "reward_model" / "fits-2.json").read_text())
    for case in CASES:
        assert both[case]["scores"] == pytest.approx(facts[case]["scores"], abs=1e-5)


def test_it_learns_the_preferences_and_the_same_again_to_the_bit(programs: Path) -> None:
    found = json.loads((programs / "reward_model" / "learns-1.json").read_text())
    losses, scores = found["first"]["losses"], iter(found["first"]["scores"])
    assert losses[-1] < 0.3 * losses[0]
    rows = [[next(scores) for _ in row.responses] for row in rankings()]
    assert all(row == sorted(row, reverse=True) for row in rows)
    weights = [(programs / "reward_model" / case / "model.safetensors").read_bytes() for case in ("first", "again")]
    assert weights[0] == weights[1]


def test_padding_is_named_only_where_no_text_ends_with_it() -> None:
    config, padded = tiny_policy("llama").config, {}
    for endings in ((EOS, 7), (7,)):
        folder = ClassifierFolder(config, "llama", EOS, set(endings))
        padded[endings] = folder.config.pad_token_id
    assert padded == {(EOS, 7): None, (7,): EOS}
    assert ClassifierFolder(config, "llama", 10_000, set()).config.pad_token_id is None
    assert config.num_labels == 2  # the policy's own stays as it was


def test_a_model_without_such_a_classifier_is_refused() -> None:
    with pytest.raises(InputError, match=r"the sequence classifier of the type bert has more than a linear head"):
        ClassifierFolder(BertConfig(num_hidden_layers=1, hidden_size=24, num_attention_heads=2), "b", None, set())
