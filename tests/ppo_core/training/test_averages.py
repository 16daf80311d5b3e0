"""What follows the policy in checkpoints, against a float64 loop; the same over restarts and replays."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.ppo_core.plain_torch import plain_logprobs
from tests.ppo_core.tiny_models import EOS
from tests.ppo_core.training.programs.averages_program import CASES, DECAY, REFERENCE_DECAY, STEP
from tests.ppo_core.training.test_replay import assert_same_files, bytes_of

MODEL = "model.safetensors"
AVERAGES = [("ema", case, DECAY) for case in CASES] + [("reference", "ema", REFERENCE_DECAY)]
AVERAGES.append(("reference", "bfloat16", REFERENCE_DECAY))


def checkpoints(averaged: Path, case: str) -> list[Path]:
    return [averaged / f"begun-{case}", *(averaged / case / f"full{number}" for number in range(1, 5))]


def policy_of(checkpoint: Path, case: str) -> dict[str, Tensor]:
    """In float64, of the fp32 weights that the optimizer moves."""
    weights = load_file(checkpoint / "policy" / MODEL)
    if case == "bfloat16" and (checkpoint / "optimizer").is_dir():
        tensors = load_file(checkpoint / "optimizer/policy-00000.safetensors")
        weights = {name: tensors[f"master/{name}"] for name in weights}
    return {name: weight.double() for name, weight in weights.items()}


@pytest.mark.parametrize(("folder", "case", "decay"), AVERAGES)
def test_an_average_is_that_of_the_policies_so_far(averaged: Path, folder: str, case: str, decay: float) -> None:
    start, *later = checkpoints(averaged, case)
    expected = policy_of(start, case)
    for checkpoint in later:
        now = policy_of(checkpoint, case)
        expected = {name: decay * weight + (1 - decay) * now[name] for name, weight in expected.items()}
        stored = load_file(checkpoint / folder / MODEL)
        assert stored.keys() == expected.keys()
        for name, weight in stored.items():
            assert weight.dtype == torch.float32
            torch.testing.assert_close(weight.double(), expected[name], rtol=0, atol=1e-6)
    assert max(float((expected[name] - now[name]).abs().max()) for name in now) > 1e-3


@pytest.mark.parametrize("case", CASES)
def test_checkpoint_0_is_its_own_average(averaged: Path, case: str) -> None:
    begun, ema = (load_file(averaged / f"begun-{case}" / part / MODEL) for part in ("policy", "ema"))
    assert all(torch.equal(weight.float(), ema[name]) for name, weight in begun.items())
    assert not (averaged / f"begun-{case}/reference").exists()


def test_a_stepped_reference_is_the_policy_of_the_last_step(averaged: Path) -> None:
    _, *later = checkpoints(averaged, "every")
    assert STEP == 2
    assert not (later[0] / "reference").exists(), "until the first step it is the start"
    for number, taken_at in ((2, 2), (3, 2), (4, 4)):
        reference = (later[number - 1] / "reference" / MODEL).read_bytes()
        assert reference == (later[taken_at - 1] / "policy" / MODEL).read_bytes()
    assert (later[1] / "policy" / MODEL).read_bytes() != (later[2] / "policy" / MODEL).read_bytes()


@pytest.mark.parametrize("case", ["ema", "every", "bfloat16"])
def test_divergence_is_from_the_reference_of_the_checkpoint(averaged: Path, case: str) -> None:
    """Also where the engine has just held a later one; in iteration 2 a stepped one has not moved yet."""
    sequences = [([3, 4], [5, 6 + i, EOS]) for i in range(4)]
    seen = []
    for name in ("full4", "full1", "full3", "thin3"):
        folder = averaged / case / name / "reference"
        if (case, name) == ("every", "full1"):
            folder = averaged / f"begun-{case}" / "policy"
        dtype = torch.bfloat16 if case == "bfloat16" else torch.float32
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).float()
        experience = load_file(averaged / case / f"of-{name}/experience.safetensors")
        with torch.no_grad():
            expected = plain_logprobs(model, sequences, 1.0)
        close = {"rtol": 0, "atol": 0.1 if case == "bfloat16" else 1e-5}  # bf16 has eight bits
        torch.testing.assert_close(experience["reference_logprobs"].double(), expected, **close)
        seen.append(experience["reference_logprobs"])
    assert torch.equal(seen[2], seen[3])
    assert min(float((one - other).abs().max()) for one, other in ((seen[0], seen[1]), (seen[0], seen[2]))) > 1e-3


@pytest.mark.parametrize("case", CASES)
def test_a_restart_and_a_replay_change_no_byte(averaged: Path, case: str) -> None:
    root = averaged / case
    assert_same_files(root / "full4", root / "full4-cold")
    assert_same_files(root / "full4", root / "full4-warm")
    full3, thin3 = bytes_of(root / "full3"), bytes_of(root / "thin3")
    following = [name for name in full3 if name.partition("/")[0] in ("ema", "reference")]
    assert len({name.partition("/")[0] for name in following}) == (1 if case == "adapters" else 2)
    assert all(full3[name] == thin3[name] for name in following)


@pytest.mark.parametrize("case", CASES)
def test_an_average_is_a_policy_like_any_other(averaged: Path, case: str) -> None:
    folder = averaged / case / "full4"
    assert {path.name for path in (folder / "ema").iterdir()} == {path.name for path in (folder / "policy").iterdir()}
    configs = [json.loads((folder / part / "config.json").read_text()) for part in ("ema", "policy")]
    assert configs[0] == configs[1], "vLLM swaps weights between them without a new start"
    AutoModelForCausalLM.from_pretrained(folder / "ema")
