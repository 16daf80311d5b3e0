"""A reward model in processes of its own below the scoring engine: it scores as one process, fails aloud, ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ppo_core.records import InputError
from ppo_core.scoring import reward_ranks
from ppo_core.scoring.held_models import held_models
from ppo_core.scoring.ranked_model import RankedModel, RanksFailed
from ppo_core.spec.reward.kinds import ModelRewardSpec
from tests.ppo_core.engines.engine_jobs import open_engine
from tests.ppo_core.scoring.scoring_jobs import prepare, score, write_lines
from tests.ppo_core.scoring.test_model_reward import SAMPLES, alone, reward_model, rewards, scores
from tests.ppo_core.tiny_models import tiny_folder
from tests.processes import adopting, command_line, outlived

pytestmark = pytest.mark.thorough
SECRETS = {"PPO_JUDGE_API_KEY": "s3cret", "TORCH_TOKEN": "s3cret", "SOME_SETTING": "s3cret"}


def rank_processes() -> list[psutil.Process]:
    """Below this process, the first one first."""
    children = psutil.Process().children(recursive=True)
    found = [child for child in children if command_line(child)[1:3] == ["-m", reward_ranks.__name__]]
    return sorted(found, key=lambda child: any(word == "--rank" for word in command_line(child)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With the reward model `rm`."""
    reward_model(tmp_path / "rm")
    return tmp_path


@pytest.fixture(autouse=True)
def none_left() -> Iterator[None]:
    """Not even one whose first rank has ended before it."""
    with adopting():
        yield
        held_models().close()
        assert outlived([child.pid for child in rank_processes()]) == []


def test_ranks_score_as_one_process_and_start_anew_after_one_was_killed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    whole, shared = rewards(folder), rewards(folder, num_ranks=2)
    expected = scores(whole)
    assert scores(shared) == pytest.approx(expected, abs=1e-6)
    processes = rank_processes()
    assert len(processes) == 2
    for process in processes:
        assert not SECRETS.keys() & process.environ().keys()
        listening = [c.laddr.ip for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
        assert set(listening) <= {"127.0.0.1"}
    assert scores(shared) == pytest.approx(expected, abs=1e-6)
    assert rank_processes() == processes
    processes[1].send_signal(signal.SIGKILL)
    with pytest.raises(RanksFailed, match=r"the reward model .*rm on num_ranks=2 ranks (ended with status|failed: )"):
        shared.score(SAMPLES)
    assert outlived([process.pid for process in processes]) == []
    assert scores(shared) == pytest.approx(expected, abs=1e-6)


def test_what_is_no_reward_model_is_refused(tmp_path: Path) -> None:
    reward_model(tmp_path / "rm", labels=2)
    with pytest.raises(InputError, match=r"has num_labels=2 in its config.json, but a reward"):
        rewards(tmp_path, num_ranks=2).score(SAMPLES)
    assert outlived([child.pid for child in rank_processes()]) == []


def test_an_error_of_one_rank_alone_fails_the_job(folder: Path) -> None:
    spec = ModelRewardSpec(path="rm", num_ranks=2)
    model = RankedModel(folder / "rm", spec, trust_remote_code=False)
    with pytest.raises(RanksFailed, match=r"num_ranks=2 ranks (ended with status|failed: )"):
        # With one sequence in each pass the second rank gets the one with a token that the model does not have.
        model.scores([[3, 4, 5], [3, 99]], 1, lambda _: None)


def test_all_ranks_end_when_the_scoring_engine_is_killed(folder: Path) -> None:
    write_lines(folder / "train.jsonl", [{"prompt": "w9 w8 ", "answer": n} for n in range(3)])
    tiny_folder(folder / "policy", "llama")
    client = open_engine("scoring", folder)
    reward = {"sources": [{"kind": "model", "path": "rm", "num_ranks": 2}]}
    dataset = prepare(client, folder, folder / "policy", reward=reward)
    rows = score(client, folder, dataset, reward, ["w3", "w4", "w5"])
    expected = alone(folder / "rm", ["w9 w8 w3", "w9 w8 w4", "w9 w8 w5"])
    assert [row["score"] for row in rows] == pytest.approx(expected, abs=1e-5)
    ranks = rank_processes()
    assert len(ranks) == 2
    assert client.run("make_room", {}, {}, None).result["freed_gib"] == 0
    first = ranks[0].parent()
    assert first is not None
    os.kill(first.pid, signal.SIGKILL)
    assert outlived([rank.pid for rank in ranks]) == []
    client.engine.close()
