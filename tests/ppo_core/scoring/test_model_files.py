"""A reward model is loaded only while its folder has the files that the key of the scores names."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.artifacts import open_store
from infra.artifacts.export import digests_of_source, export_part
from ppo_core.engines.user_code import require_same_models
from ppo_core.processes.permissions import Permissions
from ppo_core.processes.plugins import Sources
from ppo_core.processes.protocol import Job, JobInput
from ppo_core.records import FILES_OF, InputError, content_digest
from ppo_core.scoring.held_models import MOST, held_models
from ppo_core.scoring.reward import Progress, ignore_progress
from ppo_core.scoring.weighted import WeightedRewards
from ppo_core.spec import RewardSpec
from tests.ppo_core.scoring.test_model_reward import SAMPLES, reward_model

CHANGED = r"changed after this run had read it, and the scoring engine has to load it anew: give the run's command"


@pytest.fixture(autouse=True)
def none_held() -> Iterator[None]:
    held_models().close()
    yield
    held_models().close()
    held_models().compare({})


def read(*folders: Path) -> dict[Path, str]:
    """The digests that a run takes, as it does."""
    return {folder: content_digest(digests_of_source(folder)) for folder in folders}


def scores(folder: Path, known: dict[Path, str], progress: Progress = ignore_progress) -> list[float | None]:
    """What a model says in a job of a run that has read these digests."""
    inputs = {FILES_OF + path.name: JobInput(path, digest) for path, digest in known.items()}
    require_same_models(Job("score_rollouts", inputs, Path(os.devnull), {}, progress, Permissions()))
    spec = RewardSpec.model_validate({"sources": [{"kind": "model", "path": folder.name}]})
    sources = Sources(folder.parent, digest=content_digest(list(known.values())))
    return [part.scores["model"] for part in WeightedRewards(spec, sources, "answer", progress).score(SAMPLES)]


@pytest.mark.thorough
def test_files_that_changed_are_refused_once_the_model_must_be_loaded_again(tmp_path: Path) -> None:
    folders = [reward_model(tmp_path / f"rm-{number}", seed=number) for number in range(MOST + 1)]
    known = read(*folders)
    first = scores(folders[0], known)
    reward_model(folders[0], seed=9)
    assert scores(folders[0], known) == first  # it is held, and what it holds is what the key names
    for folder in folders[1:]:
        scores(folder, known)
    with pytest.raises(InputError, match=rf"rm-0 {CHANGED}"):
        scores(folders[0], known)
    assert scores(folders[0], read(*folders)) != first  # the run was started again, and has read what is there


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "more.json"])
def test_every_file_counts_that_a_run_reads_of_a_folder(tmp_path: Path, name: str) -> None:
    folder = reward_model(tmp_path / "rm")
    (folder / ".cache").mkdir()
    known = read(folder)
    (folder / ".cache" / "hidden").write_text("no part of it")
    scores(folder, known)
    held_models().close()
    with (folder / name).open("ab") as file:
        file.write(b" ")
    with pytest.raises(InputError, match=CHANGED):
        scores(folder, known)


def test_a_job_whose_key_names_no_folder_takes_what_is_there(tmp_path: Path) -> None:
    folder = reward_model(tmp_path / "rm")
    with pytest.raises(InputError, match=CHANGED):
        scores(folder, {folder: "0" * 64})
    assert len(scores(folder, {})) == len(SAMPLES)  # such as the trial of a dataset


def test_a_folder_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    folder, seen = reward_model(tmp_path / "rm"), list[str]()

    def touched(done: int, total: int, note: str) -> None:
        seen.append(note)
        if len(seen) == 2:
            for path in folder.iterdir():
                os.utime(path, ns=(1, 1))

    known = read(folder)
    with pytest.raises(InputError, match=CHANGED):
        scores(folder, known, touched)
    assert seen[:2] == ["loading the reward model model"] * 2  # while files are hashed, the engine gives signs of life
    scores(folder, known)


def test_a_copy_of_an_artifact_is_known_by_the_digest_that_a_run_takes_of_it(tmp_path: Path) -> None:
    """It does not count the manifest, which tells when the copy was made."""
    store = open_store(str(tmp_path / "store"))
    made = store.scratch()
    reward_model(made / "policy")
    ref = store.put(made, "checkpoint", "c" * 64)
    copy = tmp_path / "copy"
    export_part(store.fetch(ref), store.manifest(ref), ref, "policy", copy)
    assert json.loads((copy / "manifest.json").read_text())
    known = read(copy)
    scores(copy, known)
    held_models().close()
    (copy / "config.json").write_text((copy / "config.json").read_text() + " ")
    with pytest.raises(InputError, match=CHANGED):
        scores(copy, known)
