"""What exactness buys: iterations are verified, forked and done again."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import FinishedRun
from tests.e2e.launch import SMOKE, artifact, flip_a_bit, one_server, policy_bytes, ppoflow, records

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def copied(smoke: FinishedRun, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The store of the finished run, somewhere else, with a Prefect server there."""
    home = tmp_path_factory.mktemp("copied")
    shutil.copytree(smoke.home / "store", home / "store")
    with one_server(home):
        yield home


def test_a_recorded_iteration_is_verified_in_a_fresh_process(copied: Path) -> None:
    before = files_of(copied / "store")
    done = ppoflow(copied, "verify", "first", "--iterations", "2..2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all 6 stages reproduced the recorded bytes" in done.stdout
    assert files_of(copied / "store") == before


def files_of(store: Path) -> dict[Path, tuple[int, int]]:
    """When each was written, and its size."""
    stats = {path: path.stat() for path in store.rglob("*") if path.is_file()}
    return {path: (found.st_mtime_ns, found.st_size) for path, found in stats.items()}


def test_what_is_damaged_is_found_and_made_again_by_real_engines(copied: Path) -> None:
    third = records(copied, "first")[3]
    before = policy_bytes(copied, third)
    place = copied / "store" / "checkpoint" / artifact(third, "checkpoint")["uri"].rpartition("/")[2]
    flip_a_bit(place / "policy" / "model.safetensors")
    (copied / "store" / "runs" / "first" / "spec.json").unlink()
    found = ppoflow(copied, "fsck", "first")
    assert found.returncode == 1
    assert "! spec: run first has lost its spec" in found.stdout
    assert "! checkpoint of iteration 3: " in found.stdout
    repaired = ppoflow(copied, "fsck", "first", "--repair")
    assert repaired.returncode == 0, repaired.stdout + repaired.stderr
    assert "checkpoint of iteration 3 is undamaged again, with the same digest" in repaired.stdout
    assert policy_bytes(copied, third) == before
    assert repaired.stdout.rstrip().endswith("all intact")


def test_a_fork_shares_what_was_before_and_goes_its_own_way(copied: Path) -> None:
    done = ppoflow(copied, "fork", "first@2", "forked", "--set", "update.learning_rate=3e-4")
    assert done.returncode == 0, done.stdout + done.stderr
    whole, forked = records(copied, "first"), records(copied, "forked")
    assert [artifact(record, "checkpoint")["digest"] for record in forked[:3]] == [
        artifact(record, "checkpoint")["digest"] for record in whole[:3]
    ]
    assert artifact(forked[3], "rollouts")["digest"] == artifact(whole[3], "rollouts")["digest"]  # not sampled again
    assert policy_bytes(copied, forked[3]) != policy_bytes(copied, whole[3])
    assert {record["forked_from"] for record in forked[:3]} == {"first@2"}
    assert len(forked) == 5


def test_changed_reward_code_is_applied_to_the_samples_that_are_there(copied: Path, tmp_path: Path) -> None:
    before = records(copied, "first")
    sources = tmp_path / "sources"
    shutil.copytree(SMOKE.parent, sources)
    reward = sources / "reward.py"
    code = reward.read_text()
    assert "1.0 * is_right + 0.1 * is_formed" in code
    reward.write_text(code.replace("1.0 * is_right + 0.1 * is_formed", "2.0 * is_right + 0.2 * is_formed"))
    done = ppoflow(copied, "rerun", "first@4", "--from", "score", "--folder", str(sources))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"ppoflow resume first --folder {sources} --set iterations=14" in done.stdout
    after = records(copied, "first")
    assert after[:4] == before[:4]
    assert artifact(after[4], "rollouts") == artifact(before[4], "rollouts")
    assert after[4]["metrics"]["score/mean"] == pytest.approx(2 * before[4]["metrics"]["score/mean"])
    assert policy_bytes(copied, after[4]) != policy_bytes(copied, before[4])
