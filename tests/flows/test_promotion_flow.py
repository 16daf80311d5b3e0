"""`ppoflow promote` as a whole, on toy engines and a real registry: a gate, a person, and another run's champion."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import flows.promotion
from flows.cli import app
from flows.iteration import Rerun
from infra.mlflow.alias_journal import Journals, Move
from infra.mlflow.client import open_client
from ppo_core.records import InputError
from ppo_core.spec import PromotionSpec
from tasks.policies.policy import KL, find_policy
from tasks.policies.promote_policy import Approval
from tasks.register_policy import register_policy
from tests.flows.hand_over import MODEL, HandOver
from tests.tasks.toy_reward_models import toy_engines
from tests.tasks.toy_runs import ToyRun, ended_well

pytestmark = pytest.mark.usefixtures("prefect_server")
BETTER = ("--set", "promotion.min_gain=-1")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, prefect_server: None) -> HandOver:
    return HandOver.made_in(tmp_path_factory.mktemp("made") / "home")


@pytest.fixture
def own(made: HandOver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HandOver:
    """A copy of which version 1 is the champion, and engines for all commands."""
    copy = HandOver(made.run.copy(tmp_path / "home"))
    copy.settings(monkeypatch)
    copy.promote(1)
    toy_engines(monkeypatch)
    return copy


def promote(version: int, *options: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["promote", f"models:/{MODEL}/{version}", *options])
    return result.exit_code, result.output


def moves(own: HandOver) -> list[Move]:
    return Journals(str(own.run.home / "store")).of(MODEL).moves()


def answering(patch: pytest.MonkeyPatch, answer: Approval | None) -> list[str]:
    """A person who answers so; what was asked."""
    asked: list[str] = []

    def ask(trial: Any, spec: PromotionSpec) -> Approval | None:
        asked.append(f"{trial.champion} to {trial.candidate}")
        return answer

    patch.setattr(flows.promotion, "ask", ask)
    return asked


def champion() -> int:
    return find_policy(f"models:/{MODEL}@champion").iteration


def test_past_all_gates_the_alias_moves(own: HandOver) -> None:
    code, said = promote(3, *BETTER)
    assert (code, champion(), len(moves(own))) == (0, 2, 2)
    assert "promote of version 3 in place of version 1" in said


def test_too_few_prompts_are_refused_before_anything_is_evaluated(own: HandOver) -> None:
    done = len(own.run.engines.done)
    code, said = promote(3, "--set", "evaluation.num_prompts=5")
    assert code == 2
    assert "num_prompts=5 is too few to compare with promotion.confidence=0.95: at least 6 are needed" in said
    assert len(own.run.engines.done) == done


def test_where_a_gate_has_failed_nothing_moves_and_nobody_is_asked(
    own: HandOver, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = answering(monkeypatch, Approval(approve=True))
    code, said = promote(3, "--set", "promotion.min_gain=0.99", "--set", "promotion.approval=true")
    assert (code, champion(), len(moves(own)), asked) == (1, 0, 1, [])
    assert "not promoted: a gate has failed" in said


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        (None, "not promoted: nobody answered within"),
        (Approval(approve=False, by="anna", comment="it swears"), "not promoted: anna said no: it swears"),
        (Approval(approve=False), "not promoted: a person said no: without a comment"),
    ],
)
def test_without_a_yes_nothing_moves(
    answer: Approval | None, verdict: str, own: HandOver, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = answering(monkeypatch, answer)
    code, said = promote(3, *BETTER, "--set", "promotion.approval=true")
    assert (code, champion(), len(moves(own)), asked) == (1, 0, 1, ["1 to 3"])
    assert verdict in said
    assert "waiting for approval in Prefect's UI: http" in said


def test_a_yes_is_on_record(own: HandOver, monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, Approval(approve=True, by="anna", comment="well done"))
    code, _ = promote(3, *BETTER, "--set", "promotion.approval=true")
    assert (code, champion()) == (0, 2)
    last = moves(own)[-1]
    assert last.evidence["approval"] == {"by": "anna", "comment": "well done"}
    assert last.by.startswith("anna, through ")


def test_a_champion_of_another_run_is_judged_with_what_is_its_own(own: HandOver) -> None:
    """Its averaged weights, as its own run evaluated them: so nothing is made again."""
    averaged = ("iterations=2", "evaluation.every=1", "update.ema_decay=0.5", "evaluation.weights=ema")
    other = ToyRun(own.run.home, averaged, "other")
    record = other.train()[-1]
    context = other.context()
    register_policy(context, record, record.best.model_copy(update={"iteration": 2, "checkpoint": record.checkpoint}))
    assert context.lease is not None
    context.lease.release()
    assert own.policy(4).run == "other"
    trial = own.trial(2, 4)
    assert trial.champion_evaluation == record.evaluation
    own_evaluation = own.run.records()[1].evaluation
    assert own_evaluation is not None
    assert trial.candidate_evaluation.digest == own_evaluation.digest


def test_a_version_whose_iteration_was_made_again_is_refused(own: HandOver) -> None:
    """Its run and iteration tell of another policy than the one that it leads to."""
    own.run.engines.reward = "stricter"
    own.run.train(rerun=Rerun(iteration=2, start="score"))
    with pytest.raises(InputError, match=r"is not what iteration 2 of run toy made .*: the iteration was made again"):
        own.policy(3)
    result = CliRunner().invoke(app, ["promote", f"models:/{MODEL}/3", *BETTER])
    assert (result.exit_code, champion(), len(moves(own))) == (2, 0, 1)


def test_a_champion_that_was_taken_out_of_its_run_is_told_with_what_helps(own: HandOver) -> None:
    """Its iteration was rolled back: it can be sampled, and compared with nothing."""
    own.promote(3)
    with ended_well(own.run.context()) as context:
        context.supersede(1)
    gone = (
        r"is the policy of iteration 2 of run toy, which was taken out .*; it has 0..1 now: .*`ppoflow sample models:"
    )
    with pytest.raises(InputError, match=gone):
        own.policy(3)
    code, said = promote(2, *BETTER)
    assert (code, len(moves(own))) == (2, 2)
    told = " ".join(said.split())
    assert f"{MODEL}@champion is version 3, which no policy can be compared with: models:/{MODEL}/3 is" in told
    assert "Take the alias away in MLflow, or put it on a version of a run, then promote again" in told


def test_each_evaluation_has_an_mlflow_run_of_its_own(own: HandOver) -> None:
    """Of one policy on two sets of prompts, in turn: no figure of one stands beside the answers of the other."""
    for count in ("8", "4", "8"):
        result = CliRunner().invoke(app, ["evaluate", "toy@2", "--set", f"evaluation.num_prompts={count}"])
        assert result.exit_code == 0, result.output
    client = open_client(f"sqlite:///{own.run.home}/mlflow.db")
    (experiment,) = (found for found in client.search_experiments() if found.name == MODEL)
    runs = client.search_runs([experiment.experiment_id], "tags.`ppoflow.run` = 'evaluation of toy@2'")
    assert len({run.data.tags["ppoflow.evaluation"] for run in runs}) == len(runs) == 2
    points = [client.get_metric_history(run.info.run_id, "evaluation/score") for run in runs]
    assert [len(found) for found in points] == [1, 1]


def test_whose_responses_a_divergence_is_of(own: HandOver) -> None:
    records = own.run.records()
    last = own.policy(3)
    assert last.divergence() == (
        records[2].metrics[KL],
        "in iteration 2, on responses from before its last update",
    )
    sampled = replace(last, record=records[1].model_copy(update={"sampler": records[0].checkpoint}), next=records[2])
    assert sampled.divergence() == (records[2].metrics[KL], "on responses of the policy before it, in iteration 2")


@pytest.mark.parametrize(
    ("deployment", "parent", "called"), [("d", None, "suspend"), ("d", "p", "pause"), (None, None, "pause")]
)
def test_a_worker_is_let_go_while_a_person_thinks(
    deployment: str | None, parent: str | None, called: str, own: HandOver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And who said yes to one comparison has not said yes to another."""
    keys: list[str] = []

    def waiting(how: str) -> Callable[..., str]:
        def wait(*, key: str, **_: Any) -> str:
            keys.append(f"{how} {key}")
            return how

        return wait

    for how in ("suspend", "pause"):
        monkeypatch.setattr(flows.promotion, f"{how}_flow_run", waiting(how))
    monkeypatch.setattr(flows.promotion, "deployment_id", lambda: deployment)
    monkeypatch.setattr(flows.promotion, "flow_run", type("FlowRun", (), {"parent_flow_run_id": parent}))
    tries = iter((1, 1, 1, 2))
    monkeypatch.setattr(flows.promotion, "tries", lambda: next(tries))
    for candidate in (2, 2, 3, 3):
        flows.promotion.ask(own.trial(candidate, None), PromotionSpec())
    assert keys[0] == keys[1]  # it goes on where it was suspended
    assert len(set(keys)) == 3
    assert all(re.fullmatch(rf"{called} [a-z0-9-]+", key) for key in keys)
