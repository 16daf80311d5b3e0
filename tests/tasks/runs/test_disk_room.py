"""How much of the disk the next iteration is taken to need, of artifacts of known sizes."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, NoReturn

import pytest

from infra.artifacts import ArtifactRef
from tasks.runs import guards
from tasks.runs.errors import DiskSpaceError
from tasks.runs.guards import check_disk, iteration_bytes
from tasks.runs.iteration_record import IterationRecord
from tasks.stages.context import RunContext
from tasks.stages.references import CheckpointRef, RolloutsRef, StageRef
from tests.flows.samples import record
from tests.tasks.run_contexts import QuickFiles, run_context, smoke_spec
from tests.tasks.toy_runs import ToyRun

START, FULL, THIN, ROLLOUTS = 50, 1000, 300, 20
"""Bytes, in two files each, one of them in a folder."""


class Disk(NamedTuple):
    """As `shutil.disk_usage` tells of one."""

    total: int
    used: int
    free: int


def stored(context: RunContext, kind: str, size: int) -> ArtifactRef:
    folder = context.store.scratch() / "made"
    (folder / "part").mkdir(parents=True)
    (folder / "one").write_bytes(b"1" * (size // 2))
    (folder / "part/other").write_bytes(b"2" * (size - size // 2))
    return context.store.put(folder, kind, f"{size:064x}")


def records(context: RunContext) -> dict[str, IterationRecord]:
    """Of iterations 0 to 2: the start, and what was sampled beside a full checkpoint and beside a thin one."""
    start, full, thin = (
        CheckpointRef.model_validate(stored(context, "checkpoint", size).model_dump()) for size in (START, FULL, THIN)
    )
    rollouts = RolloutsRef.model_validate(
        {**stored(context, "rollouts", ROLLOUTS).model_dump(), "num_responses": 1, "num_response_tokens": 1}
    )
    made: dict[str, dict[str, StageRef]] = {
        "start": {"start_policy": start},
        "full": {"generate_rollouts": rollouts, "update_policy": full},
        "thin": {"generate_rollouts": rollouts, "update_policy": thin},
    }
    return {
        name: record(iteration, {}).model_copy(update={"artifacts": refs, "base": full if name == "thin" else None})
        for iteration, (name, refs) in enumerate(made.items())
    }


@pytest.mark.parametrize(
    ("name", "expected"),
    [("start", 3 * START), ("full", FULL + ROLLOUTS), ("thin", FULL + ROLLOUTS)],
)
def test_an_iteration_takes_what_one_with_a_full_checkpoint_takes(name: str, expected: int, tmp_path: Path) -> None:
    """At first the policy, the critic and two moments of each: three times checkpoint 0, which has the two."""
    context = run_context(smoke_spec(), tmp_path)
    assert iteration_bytes(context, records(context)[name]) == expected


def test_what_is_missing_takes_nothing(tmp_path: Path) -> None:
    context = run_context(smoke_spec(), tmp_path)
    found = records(context)["full"]
    shutil.rmtree(tmp_path / "store" / "rollouts")
    assert iteration_bytes(context, found) == FULL


@pytest.mark.parametrize("free", [2.5 * (FULL + ROLLOUTS), 2.5 * (FULL + ROLLOUTS) - 1])
def test_a_byte_too_few_is_refused(free: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context, asked = run_context(smoke_spec("guards.min_free_disk=2.5"), tmp_path), list[Path]()

    def disk_usage(place: Path) -> Disk:
        asked.append(place)
        return Disk(0, 0, int(free))

    monkeypatch.setattr(guards.shutil, "disk_usage", disk_usage)
    full = records(context)["full"]
    if free == 2.5 * (FULL + ROLLOUTS):
        check_disk(context, full)
    else:
        with pytest.raises(DiskSpaceError, match=r"iteration 2 may take 0\.00 GiB \(guards\.min_free_disk=2\.5 times"):
            check_disk(context, full)
    assert asked == [Path(context.store.root)]


class FullDisk(QuickFiles):
    """No room for the record of iteration 2, while `full`."""

    full = True

    def write(self, path: Path, blocks: Iterable[bytes]) -> None:
        """As the kernel refuses it, which names no file."""
        with pytest.MonkeyPatch.context() as patch:
            if self.full and "partial/000002" in str(path):
                patch.setattr("os.write", no_room)
            super().write(path, blocks)


def no_room(*_: object) -> NoReturn:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.usefixtures("prefect_server")
def test_a_record_that_finds_no_room_is_a_message_and_the_run_goes_on_once_there_is(tmp_path: Path) -> None:
    files = FullDisk()
    run = ToyRun(tmp_path, ("iterations=3", "evaluation.every=9"), files=files)
    expected = r"the record of iteration 2 of run toy could not be written to .*/000002.*No space left .*: make room"
    with pytest.raises(DiskSpaceError, match=expected):
        run.train()
    files.full = False
    assert [record.iteration for record in run.train()] == [0, 1, 2, 3]
