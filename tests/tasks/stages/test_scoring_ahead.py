"""Responses are scored while others are sampled: by whom, how often, and that nothing else of a run changes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infra.engines.protocol import EngineDied, EngineJob, EngineProgress, EngineReply
from ppo_core.records import ScoreAheadJob
from tasks.stages.engines import LocalHandle
from tests.tasks.toy_engines import ToyEngine, ToyEngines
from tests.tasks.toy_runs import ToyRun, digests
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("prefect_server")
NAMES, UNSCORED = itertools.count(), "unscored"
SHORT = ("iterations=2", "evaluation.every=2")
RULE = '{kind: regex, pattern: "x"}'
SERVER = '{kind: http, url: "http://127.0.0.1:9/score", name: server}'
FUNCTION = '{function: "reward.py:correct", while_sampling: true}'
PARTS = f"reward={{sources: [{RULE}, {SERVER}, {FUNCTION}]}}"


class Reporting:
    """A rollout engine that hands rows on, where it is asked to: two, and when these are scored one that gets no score,
    and then it goes on as soon as that is asked for."""

    def __init__(self, engine: ToyEngine, engines: ScoringEngines) -> None:
        self.name = engine.name
        self._engine = engine
        self._engines = engines

    def start(self) -> None:
        """Nothing to start."""

    def close(self) -> None:
        """Nothing to end."""

    def run(
        self, job: EngineJob, *, timeout_s: float, on_progress: Callable[[EngineProgress], None] | None = None
    ) -> EngineReply:
        """Rows, then the job."""
        if job.reports_rows:
            assert on_progress is not None
            told = itertools.count(1)
            for text, number in ((f"{next(NAMES)}", 2), (f"{next(NAMES)} {UNSCORED}", 1)):
                rows = [
                    {"prompt_id": f"p{sample}", "sample_index": sample, "response": text, "response_token_ids": [5]}
                    for sample in range(job.spec.get("first", 0), job.spec.get("first", 0) + number)
                ]
                on_progress(EngineProgress(self.name, job.name, next(told), 4, "responses", tuple(rows)))
                if not (self._engines.die and number == 1):  # after a death nothing more is asked
                    until(lambda text=text: text in self._engines.asked_ahead)
        return self._engine.run(job, timeout_s=timeout_s, on_progress=on_progress)


class ScoringEngines(ToyEngines):
    """Toy engines; `ahead` are the jobs of the scoring engine while others sample, `die` makes it die at each."""

    def __init__(self, *, rollout_engines: int = 1, die: bool = False) -> None:
        super().__init__(rollout_engines=rollout_engines)
        self.ahead: list[ScoreAheadJob] = []
        self.asked_ahead: list[str] = []
        self.die = die
        self.jobs["score_ahead"] = self._score_ahead
        for name in self.rollout_names:
            self.handles[name] = LocalHandle(Reporting(ToyEngine(name, self), self))

    def _score_ahead(self, _: ToyEngines, job: EngineJob) -> dict[str, Any]:
        spec = ScoreAheadJob.model_validate(job.spec)
        self.ahead.append(spec)
        assert {"sources", "dataset"} <= set(job.inputs)
        assert job.output is None
        self.asked_ahead += [row.response for row in spec.responses]
        if self.die:
            raise EngineDied("engine 'scoring', job 'score_ahead': the process was killed by SIGKILL")
        return {"scored": [n for n, row in enumerate(spec.responses) if UNSCORED not in row.response]}


def trained(home: Path, *overrides: str, **options: Any) -> tuple[ToyRun, ScoringEngines]:
    engines = ScoringEngines(**options)
    run = ToyRun(home / "home", (*SHORT, *overrides), engines=engines)
    run.train()
    return run, engines


def counted(run: ToyRun) -> list[float | None]:
    """The metric, record by record."""
    return [record.metrics.get("score/ahead") for record in run.records()]


def silent(home: Path, *overrides: str) -> list[dict[str, str]]:
    """The digests of a run whose rollout engine reports no rows at all."""
    run = ToyRun(home / "silent", (*SHORT, *overrides))
    run.train()
    return digests(run.records())


def test_the_parts_that_score_each_sample_alone_are_asked_and_the_run_is_the_same(tmp_path: Path) -> None:
    run, engines = trained(tmp_path, PARTS)
    assert [[reward.component for reward in job.rewards] for job in engines.ahead] == [["server", "correct"]] * 4
    assert [[row.prompt_id for row in job.responses] for job in engines.ahead] == [["p0", "p1"], ["p0"]] * 2
    assert counted(run) == [None, 2.0, 2.0]
    assert digests(run.records()) == silent(tmp_path, PARTS)


def test_an_engine_that_dies_ahead_costs_nothing_but_its_work(tmp_path: Path) -> None:
    run, engines = trained(tmp_path, PARTS, die=True)
    assert len(engines.ahead) == 2
    assert engines.asked["score_rollouts"] == 2
    assert counted(run) == [None, 0.0, 0.0]
    assert digests(run.records()) == silent(tmp_path, PARTS)


def test_several_engines_and_batches_share_one_count(tmp_path: Path) -> None:
    run, engines = trained(tmp_path, PARTS, rollout_engines=2)
    assert len(engines.asked_ahead) == 12
    assert counted(run) == [None, 4.0, 4.0]
    assert digests(run.records()) == silent(tmp_path, PARTS)


def test_batches_of_dynamic_sampling_are_scored_ahead_too(tmp_path: Path) -> None:
    dynamic = ("algorithm={kind: grpo}", "rollout.samples_per_prompt=4", "rollout.dynamic_sampling={max_batches: 3}")
    run, _ = trained(tmp_path, PARTS, *dynamic)
    batches = [record.metrics.get("rollout/batches") for record in run.records()]
    assert counted(run) == [None if number is None else 2.0 * number for number in batches]
    assert digests(run.records()) == silent(tmp_path, PARTS, *dynamic)


def test_what_is_sampled_ahead_is_scored_ahead(tmp_path: Path) -> None:
    overlapped = ("schedule=overlapped", "update.importance_correction=token")
    run, _ = trained(tmp_path, PARTS, *overlapped)
    assert counted(run) == [None, 2.0, 2.0]
    assert digests(run.records()) == silent(tmp_path, PARTS, *overlapped)


def test_without_such_a_reward_nothing_is_reported(tmp_path: Path) -> None:
    run, engines = trained(tmp_path, f"reward={{sources: [{RULE}, {{function: 'reward.py:correct'}}]}}")
    assert engines.asked_ahead == []
    assert counted(run) == [None, None, None]
