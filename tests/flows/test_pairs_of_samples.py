"""`ppoflow preferences`: the pairs that a run's samples make, and what it says where there are none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from flows.cli import app
from infra.engines.protocol import EngineJob
from ppo_core.data.preferences import read_preferences
from ppo_core.data.tables import read_rollouts, write_rollouts, write_scores
from ppo_core.processes.plugins import Sources
from ppo_core.records import InputError, PromptRow, RolloutRow, ScoreRow
from tasks.preferences.from_samples import new_file
from tests.ppo_core.written_tables import write_prompts
from tests.tasks.toy_engines import JOBS, ToyEngines
from tests.tasks.toy_runs import ToyRun, flip_a_bit, lose_it

pytestmark = pytest.mark.usefixtures("prefect_server")
Toy = Callable[[ToyEngines, EngineJob], dict[str, Any]]
GROUPS = ("iterations=3", "dataset.evaluation=null", "algorithm.kind=rloo", "rollout.samples_per_prompt=2")
ROLLOUTS = "rollouts.parquet"
PROMPTS = ["1+1=", "2+2=", "3+3="]


def with_table(job_name: str, write: Callable[[EngineJob], None]) -> Toy:
    """The toy's job, which leaves a table too, as a real engine does."""

    def done(engines: ToyEngines, job: EngineJob) -> dict[str, Any]:
        write(job)
        return JOBS[job_name](engines, job)

    return done


def prompts(job: EngineJob) -> None:
    """Three of them."""
    assert job.output is not None
    rows = [PromptRow(text, text, [5], None, {}) for text in PROMPTS]
    write_prompts(job.output / "train.parquet", rows)


def rollouts(job: EngineJob) -> None:
    """Two responses to each, which say in which iteration they were sampled; if asked for two."""
    assert job.output is not None
    count, stream = job.spec["samples_per_prompt"], job.spec["stream"]
    rows = [RolloutRow(text, n, [5], [7], f"{stream}.{n}", [-1.0], "stop") for text in PROMPTS for n in range(count)]
    write_rollouts(job.output / ROLLOUTS, rows)


def scores(job: EngineJob) -> None:
    """The second response to the first prompt is the better one, to the second the worse one, to the third neither."""
    assert job.output is not None
    given = {"1+1=": [0.0, 1.0], "2+2=": [1.0, 0.0], "3+3=": [1.0, 1.0]}
    sampled = [(row.prompt_id, row.sample_index) for row in read_rollouts(job.inputs["rollouts"].path / ROLLOUTS)]
    rows = [ScoreRow(text, number, given[text][number], {}, False, None) for text, number in sampled]
    write_scores(job.output / "scores.parquet", rows)


def engines() -> ToyEngines:
    """Which leave tables."""
    found = ToyEngines()
    tables = {"prepare_dataset": prompts, "generate_rollouts": rollouts, "score_rollouts": scores}
    found.jobs |= {name: with_table(name, write) for name, write in tables.items()}
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> ToyRun:
    """A store with a run of pairs, and one of single responses."""
    run = ToyRun(tmp_path_factory.mktemp("trained") / "home", GROUPS, engines=engines())
    run.train()
    ToyRun(run.home, ("iterations=1", "dataset.evaluation=null"), name="single", engines=engines()).train()
    return run


@pytest.fixture
def run(trained: ToyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ToyRun:
    """A copy, where ppoflow keeps its state."""
    return trained.own_copy(tmp_path / "home", monkeypatch)


def pairs(output: Path, name: str = "toy", *options: str) -> Result:
    """What the command does."""
    return CliRunner().invoke(app, ["preferences", name, "--output", str(output), *options])


def test_every_prompt_of_every_iteration_gives_its_best_response_and_its_worst(run: ToyRun, tmp_path: Path) -> None:
    output = tmp_path / "pairs.jsonl"
    done = pairs(output)
    assert done.exit_code == 0, done.output
    said = "6 pairs of 9 prompts in iterations 1..3 of run toy (3 whose responses score alike)"
    assert done.stdout == f"{output}: {said}\n"
    found = [json.loads(line) for line in output.read_text().splitlines()]
    streams = [record.iteration for record in run.records() if record.iteration]
    expected = [
        {"prompt": prompt, "chosen": f"{stream}.{better}", "rejected": f"{stream}.{1 - better}"}
        for stream in streams
        for prompt, better in (("1+1=", 1), ("2+2=", 0))
    ]
    assert found == expected
    read: list[Any] = list(read_preferences("pairs.jsonl", Sources(tmp_path)))
    assert [(row.prompt, *row.responses.values()) for row in read] == [tuple(row.values()) for row in expected]
    assert pairs(tmp_path / "again.jsonl").exit_code == 0
    assert (tmp_path / "again.jsonl").read_bytes() == output.read_bytes()
    assert pairs(tmp_path / "one.jsonl", "toy", "--iterations", "2").exit_code == 0
    assert (tmp_path / "one.jsonl").read_text().splitlines() == output.read_text().splitlines()[2:4]


def refused(done: Result, message: str, folder: Path, *there: str) -> None:
    """In words, and nothing is left beside ppoflow's state and what was `there`."""
    assert done.exit_code == 2, done.output
    assert message in " ".join(done.stderr.split())
    assert "Traceback" not in done.output
    assert sorted(path.name for path in folder.iterdir()) == sorted(("home", *there))


def test_without_a_pair_the_reason_and_the_remedy_are_named(run: ToyRun, tmp_path: Path) -> None:
    done = pairs(tmp_path / "pairs.jsonl", "single")
    why = "0 pairs of 3 prompts in iteration 1 of run single (3 with less than two scored responses)"
    refused(done, f"{why}: rollout.samples_per_prompt is 1; sample 4 in a new run", tmp_path)


@pytest.mark.parametrize(
    ("iterations", "message"),
    [
        ("0", "iteration 0 of run toy is its start, which samples nothing: name iterations from 1 on"),
        ("2..9", "iterations 2..9: run toy has 0..3"),
        ("few", "write FIRST..LAST or one number"),
    ],
)
def test_iterations_that_it_does_not_have_are_refused(
    iterations: str, message: str, run: ToyRun, tmp_path: Path
) -> None:
    refused(pairs(tmp_path / "pairs.jsonl", "toy", "--iterations", iterations), message, tmp_path)


@pytest.mark.parametrize("kind", ["rollouts", "scores"])
def test_samples_that_are_damaged_or_gone_are_named(kind: str, run: ToyRun, tmp_path: Path) -> None:
    ref = run.records()[2].made(kind)
    assert ref is not None
    flip_a_bit(run.place(ref))
    refused(pairs(tmp_path / "pairs.jsonl"), f"{kind}/{ref.key}", tmp_path)
    lose_it(run.place(ref))
    refused(pairs(tmp_path / "pairs.jsonl"), f"{kind}/{ref.key}", tmp_path)


def test_a_file_that_is_there_stays_as_it_is(run: ToyRun, tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text("mine")
    refused(pairs(tmp_path / "mine.jsonl"), "mine.jsonl exists already: remove it", tmp_path, "mine.jsonl")
    later = tmp_path / "later.jsonl"

    def written_by_both() -> None:
        with new_file(later) as ours:
            ours.write_text("ours")
            later.write_text("another's, written meanwhile")

    with pytest.raises(InputError, match=r"later.jsonl exists already: remove it"):
        written_by_both()
    assert later.read_text() == "another's, written meanwhile"
    later.unlink()
    assert (tmp_path / "mine.jsonl").read_text() == "mine"
    refused(
        pairs(tmp_path / "nowhere" / "pairs.jsonl"),
        "pairs.jsonl cannot be written: No such file",
        tmp_path,
        "mine.jsonl",
    )
