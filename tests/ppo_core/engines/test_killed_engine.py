"""A training engine that is killed in the middle of an update, and started anew, makes the checkpoint it would have."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from infra.engines.process import EngineDied, EngineProgress
from infra.engines.protocol import EngineJobError
from ppo_core.records import UpdatePolicyJob
from ppo_core.spec import TrainingSpec
from tests.ppo_core.engines.engine_jobs import Client, minimal_spec, open_engine
from tests.ppo_core.tiny_models import tiny_config, tiny_tokenizer
from tests.ppo_core.training.update_cases import make_experience, save_experience, update_job
from tests.processes import command_line
from tests.waiting import until

TRAINING = TrainingSpec(num_ranks=2, zero_stage=2, microbatch_size=4)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """One engine for all tests, which starts again where one of them has ended it."""
    folder = tmp_path_factory.mktemp("engine")
    client = open_engine("training", folder, minimal_spec().model_copy(update={"training": TRAINING}))
    yield client
    client.engine.close()


@pytest.mark.thorough
def test_a_rank_that_dies_before_all_have_met_ends_the_engine(client: Client) -> None:
    client.engine.close()
    client.engine.start()
    until(lambda: len(engine_processes()) == 2, "both ranks are there")
    os.kill(engine_processes()[1], signal.SIGKILL)
    with pytest.raises(EngineDied, match="training rank 1 of 2 ended with status -9"):
        client.run("start_policy", {}, {}, client.output())


@pytest.fixture(scope="module")
def start(client: Client, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint 0."""
    tokenizer = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer().save_pretrained(tokenizer)
    spec = {"seed": 1, "model": {"config": tiny_config("llama-tied"), "tokenizer": "x"}}
    output, inputs = client.output(), {"dataset": tokenizer, "tokenizer": tokenizer}
    client.run("start_policy", inputs, spec, output)
    return output


def job(number: int, *, full: bool) -> UpdatePolicyJob:
    changes = {"training": TRAINING, "full": full}
    return update_job(iteration=number - 1, num_ppo_epochs=2, num_minibatches=2).model_copy(update=changes)


def update(client: Client, number: int, inputs: dict[str, Path], *, full: bool, **watch: Any) -> Path:
    output, spec = client.output(), job(number, full=full)
    client.run("update_policy", inputs, spec.model_dump(mode="json"), output, **watch)
    return output


def killed_update(client: Client, number: int, inputs: dict[str, Path]) -> None:
    """In its middle, which it cannot leave before the kill: nobody reads the pipe that stands for its last file."""
    output, spec = client.output(), job(number, full=False)
    os.mkfifo(output / "state.json")
    killed: list[int] = []

    def kill(_: EngineProgress) -> None:
        if not killed:  # what it had said before it died arrives still
            killed.append(engine_processes()[0])
            os.kill(killed[0], signal.SIGKILL)

    with pytest.raises(EngineDied, match="was killed by SIGKILL"):
        client.run("update_policy", inputs, spec.model_dump(mode="json"), output, on_progress=kill)
    assert killed


def engine_processes() -> list[int]:
    """Rank 0 and rank 1, below this process."""
    program = [sys.executable, "-m", "ppo_core.engines.training"]
    children = psutil.Process().children(recursive=True)
    return [child.pid for child in children if command_line(child)[:3] == program]


@pytest.mark.thorough
def test_a_damaged_checkpoint_is_refused_whichever_rank_reads_it_first(
    client: Client, start: Path, tmp_path: Path
) -> None:
    weights = tmp_path / "damaged" / "critic" / "model.safetensors"
    shutil.copytree(start, tmp_path / "damaged")
    weights.write_bytes(weights.read_bytes()[:-5])
    save_experience(make_experience(), tmp_path / "experience")
    inputs = {"checkpoint": tmp_path / "damaged", "experience": tmp_path / "experience"}
    with pytest.raises(EngineJobError, match="critic cannot be loaded"):
        update(client, 1, inputs, full=True)
    with pytest.raises(EngineJobError, match="rank 1 of 2 ended"):  # it was dismissed, and is started anew after this
        update(client, 1, inputs, full=True)
    update(client, 1, {**inputs, "checkpoint": start}, full=True)


@pytest.mark.thorough
def test_three_updates_with_thin_checkpoints_and_a_kill_in_each(client: Client, start: Path, tmp_path: Path) -> None:
    experiences = [tmp_path / f"experience{number}" for number in range(3)]
    for number, folder in enumerate(experiences):
        save_experience(make_experience(noise=0.1 + 0.1 * number), folder)
    unbroken, checkpoint = [], start
    for number in (1, 2, 3):
        checkpoint = update(
            client, number, {"checkpoint": checkpoint, "experience": experiences[number - 1]}, full=True
        )
        unbroken.append(checkpoint)
    checkpoint, origin = start, {}
    for number in (1, 2, 3):
        inputs = {"checkpoint": checkpoint, "experience": experiences[number - 1], **origin}
        killed_update(client, number, inputs)
        notes: list[str] = []
        checkpoint = update(
            client,
            number,
            inputs,
            full=number == 3,
            on_progress=lambda progress, notes=notes: notes.append(progress.note),
        )
        replays = {note for note in notes if note.startswith("replaying")}
        assert replays == {f"replaying update {i} of {number - 1}" for i in range(1, number)}
        origin |= {"base": start, f"replay_{number - 1}": experiences[number - 1]}
        policy = "policy/model.safetensors"
        assert (checkpoint / policy).read_bytes() == (unbroken[number - 1] / policy).read_bytes()
        assert (checkpoint / "optimizer").exists() == (number == 3)
    for path in unbroken[-1].rglob("*"):
        if path.is_file():
            assert path.read_bytes() == (checkpoint / path.relative_to(unbroken[-1])).read_bytes(), path
