"""Threads that share the rows of a microbatch: the numbers of one thread, and the same bits each time."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ppo_core.models.precision import multiply_in
from ppo_core.processes.threads import Threads, twin_of
from ppo_core.spec.sections import ComputeDtype
from ppo_core.training.deepspeed_engine import shares_rows
from tests.ppo_core.tiny_models import tiny_policy
from tests.ppo_core.training.programs.threads_program import PARTS, TWICE


def weights_below(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    files = folder.rglob("*.safetensors")
    return {str(path.relative_to(folder)): load_file(path) for path in files if "start" not in path.parts}


@pytest.mark.parametrize("name", PARTS)
def test_two_threads_train_the_weights_of_one(programs: Path, name: str) -> None:
    alone, once, again = (weights_below(programs / place / name) for place in ("", "threaded/once", "threaded/again"))
    assert len(once) >= 3
    assert bool(again) == (name in TWICE)
    assert once.keys() <= alone.keys()
    for file, tensors in once.items():
        for key, tensor in tensors.items():
            torch.testing.assert_close(tensor, alone[file][key], rtol=0, atol=2e-5)
            assert name not in TWICE or torch.equal(tensor, again[file][key]), (file, key)


def test_two_threads_measure_what_one_measures(programs: Path) -> None:
    alone = json.loads((programs / "trained/updates-1.json").read_text())
    together = json.loads((programs / "threaded/trained-1.json").read_text())["updates"]
    assert len(alone) > 1
    for case, metrics in alone.items():
        for name, value in metrics.items():
            assert together[case][name] == pytest.approx(value, rel=2e-3, abs=1e-5), (case, name)


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_a_twin_has_the_same_weights_and_hooks_of_its_own(compute_dtype: ComputeDtype) -> None:
    model = tiny_policy("llama-tied")
    multiply_in(model, compute_dtype)
    twin = twin_of(model)
    assert [id(p) for p in twin.parameters()] == [id(p) for p in model.parameters()]
    model.get_output_embeddings().register_forward_hook(lambda *_: pytest.fail("a hook of the other one"))
    twin(torch.tensor([[3, 4, 5]]))


def test_results_come_in_the_order_of_the_shares_from_threads_with_the_callers_gradients() -> None:
    threads, together = Threads(3), threading.Barrier(3, timeout=60)

    def work(number: int, share: str) -> tuple[int, str, bool, int]:
        together.wait()  # passes only if all three run at the same time
        return number, share, torch.is_grad_enabled(), torch.get_num_threads()

    with torch.no_grad():
        found = threads.map(work, ["a", "b", "c"])
    assert found == [(number, share, False, 1) for number, share in enumerate("abc")]
    assert Threads().map(lambda number, share: (number, share), ["alone"]) == [(0, "alone")]


def test_an_error_comes_when_all_threads_have_ended() -> None:
    ended = []

    def work(number: int, delay: float) -> None:
        if not delay:
            raise ValueError("the first one fails")
        threading.Event().wait(delay)
        ended.append(number)

    with pytest.raises(ValueError, match="the first one fails"):
        Threads(2).map(work, [0.0, 0.3])
    assert ended == [1]


def test_threads_share_rows_of_fewer_parameters_where_each_would_round_them_all() -> None:
    assert [shares_rows(count, rounded=False) for count in (4_000_001, 100_000_000, 100_000_001)] == [True, True, False]
    assert [shares_rows(count, rounded=True) for count in (4_000_000, 4_000_001)] == [True, False]


@pytest.mark.parametrize(("counts", "expected"), [([4, 2], 2), ([1, 4], 1), ([4, 4], 3)])
def test_as_many_threads_as_every_network_has_modules_for(counts: list[int], expected: int) -> None:
    assert Threads(3).usable(*counts) == expected
