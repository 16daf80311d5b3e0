"""What has to hold on a CPU and on a GPU: the same bodies, on a GPU marked `gpu` and run by `make test-gpu`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.ppo_core.conftest import run_program
from tests.ppo_core.engines.device_program import MOVED, PASSES, RESUMED, SEQUENCES, gradient_factors, policy_of
from tests.ppo_core.plain_torch import plain_entropy, plain_logprobs
from tests.ppo_core.training.test_checkpoint import NAMES, assert_identical, largest_difference
from tests.ppo_core.training.test_update import assert_gradients_of_the_whole_batch
from tests.ppo_core.training.update_cases import TEMPERATURE, checkpoint_folder

# A GPU adds up in another order, and one of bf16 rounds each factor to 8 bits.
NEAR = {"float32": 1e-5, "deterministic": 1e-5, "bf16 products": 0.05, "bf16 weights": 0.05}


pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Where the program runs."""
    assert request.param == "cpu" or torch.cuda.is_available(), "there is no GPU that torch can use"
    return str(request.param)


@pytest.fixture(scope="module")
def ranks(device: str) -> int:
    """Two, where they have a device each: nccl takes no two ranks on one GPU."""
    return 2 if device == "cpu" else min(2, torch.cuda.device_count())


@pytest.fixture(scope="module")
def folder(device: str, ranks: int, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one rank, and then several, have left."""
    if device == "cpu":
        return Path(request.getfixturevalue("programs"))
    made = tmp_path_factory.mktemp(device)
    run_program(("device/passes", "device/resumed", "device/twice"), made, world_size=1, device=device)
    run_program(("device/where", "device/moved", "trained/spread"), made, world_size=ranks, device=device)
    return made


def test_the_program_ran_where_it_should(folder: Path, device: str, ranks: int) -> None:
    facts = json.loads((folder / f"device/where-{ranks}.json").read_text())
    assert facts["device"] == device
    assert ("nccl" in facts["backend"]) == (device == "cuda")


@pytest.mark.parametrize("rows", ["packed", "padded"])
@pytest.mark.parametrize("name", PASSES)
def test_packed_and_padded_rows_give_what_plain_passes_give(folder: Path, rows: str, name: str) -> None:
    model = policy_of(name).double()
    logprobs, entropy = (say(model, SEQUENCES, TEMPERATURE) for say in (plain_logprobs, plain_entropy))
    (gradient_factors(*logprobs.shape) * (logprobs + entropy)).sum().backward()
    observed = load_file(folder / "device" / f"{rows} {name}.safetensors")
    for key, expected in (("logprobs", logprobs), ("entropy", entropy)):
        torch.testing.assert_close(observed[key].double(), expected.detach(), rtol=0, atol=NEAR[name])
    # All of it together: that of some biases is a small difference of large numbers.
    pairs = [(observed[f"gradient {key}"].double(), p.grad) for key, p in model.named_parameters()]
    ours, expected = (torch.cat([tensor.flatten() for tensor in side]) for side in zip(*pairs, strict=True))
    assert float((ours - expected).norm() / expected.norm()) < NEAR[name]
    assert float(expected.norm()) > 1


@pytest.mark.parametrize("stage", range(4))
def test_ranks_have_the_gradient_of_the_whole_batch(folder: Path, ranks: int, stage: int) -> None:
    checkpoint = checkpoint_folder(folder / "trained", stage, "float32", f"ranks{ranks}")
    assert_gradients_of_the_whole_batch(checkpoint, tolerance=1e-5)


@pytest.mark.parametrize(("stage", "dtype"), RESUMED)
def test_a_checkpoint_goes_there_and_back_bit_for_bit(folder: Path, stage: int, dtype: str) -> None:
    first, again, second, resumed = (
        checkpoint_folder(folder / "device", stage, dtype, name) for name in ("first", "again", "second", "resumed")
    )
    assert_identical(first, again)
    assert_identical(second, resumed)
    assert largest_difference(first, second) > 1e-4


@pytest.mark.parametrize(("stage", "dtype"), MOVED)
def test_what_made_room_for_another_engine_goes_on_bit_for_bit(
    folder: Path, ranks: int, stage: int, dtype: str
) -> None:
    stayed, moved = (checkpoint_folder(folder / "device", stage, dtype, name) for name in ("stayed", "moved"))
    assert_identical(stayed, moved)
    assert largest_difference(folder / "device" / f"{moved.name}-before", moved) > 1e-4
    facts = json.loads((folder / f"device/moved-{ranks}.json").read_text())[moved.name]
    assert facts["moved"] > facts["least"] / ranks
    assert facts["left"] < facts["moved"] / 10
    assert facts["offloaded"] >= facts["reference"] > 0
    assert facts["same"]


def test_determinism_gives_the_same_bits_again(folder: Path) -> None:
    one, two = (checkpoint_folder(folder / "device", 0, "float32", name) for name in ("one", "two"))
    assert_identical(one, two)
    facts = json.loads((folder / "device/twice-1.json").read_text())
    assert facts["one"] == facts["two"]
    start = load_file(folder / "device/start-llama-tied-float32-1/policy/model.safetensors")
    trained = load_file(one / f"{NAMES[0]}.safetensors")
    assert max(float((trained[key] - start[key]).abs().max()) for key in start) > 1e-4
