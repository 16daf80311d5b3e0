"""Promotion on toy engines and a real registry: gates, evidence, rollback, lineage, and what the collector leaves."""

from __future__ import annotations

import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.flow_runs import resume_flow_run
from typer.testing import CliRunner

from flows.cli import app
from flows.promotion import HOUR_S, PromotionReport, ask, refused
from infra.backend import open_collector
from infra.mlflow.alias_journal import Journals
from ppo_core.spec import PromotionSpec
from tasks.policies.gates import Gate, check_gates, passed
from tasks.policies.held_out import pinned
from tasks.policies.lineage import trace
from tasks.policies.policy import find_policy
from tasks.policies.promote_policy import Approval
from tasks.runs.reachability import Reachability
from tests.flows.hand_over import MODEL, HandOver
from tests.tasks.toy_runs import lose_it
from tests.waiting import LONG_S, until

pytestmark = pytest.mark.usefixtures("prefect_server")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, prefect_server: None) -> HandOver:
    return HandOver.made_in(tmp_path_factory.mktemp("made") / "home")


@pytest.fixture
def given(made: HandOver, monkeypatch: pytest.MonkeyPatch) -> HandOver:
    """Shared by tests that move nothing."""
    made.settings(monkeypatch)
    return made


@pytest.fixture
def own(made: HandOver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HandOver:
    """A copy to change."""
    copy = HandOver(made.run.copy(tmp_path / "home"))
    copy.settings(monkeypatch)
    return copy


def cli(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output


def gate(gates: list[Gate], name: str) -> Gate:
    return next(found for found in gates if found.name == name)


def test_a_version_carries_its_lineage(given: HandOver) -> None:
    policy = given.policy(3)
    record = given.run.records()[2]
    assert policy.version is not None
    tags = policy.version.tags
    assert (tags["ppoflow.run"], tags["ppoflow.iteration"]) == ("toy", "2")
    assert tags["ppoflow.spec_digest"] == record.spec_digest
    assert tags["ppoflow.dataset_digest"] == record.dataset.digest
    assert record.evaluation is not None
    assert record.evaluation.digest in tags["ppoflow.evaluation"]
    assert policy.checkpoint == record.checkpoint


def test_the_runs_own_evaluations_are_compared_and_nothing_is_made_again(given: HandOver) -> None:
    done = len(given.run.engines.done)
    trial = given.trial(3, 2)
    assert set(given.run.engines.done[done:]) <= {"describe_sources", "compare_evaluations"}
    records = given.run.records()
    assert trial.candidate_evaluation == records[2].evaluation
    assert trial.champion_evaluation == records[1].evaluation
    scores = [record.metrics["evaluation/score"] for record in records]
    assert trial.comparison is not None
    assert trial.comparison.metrics["promotion/gain"] == pytest.approx(scores[2] - scores[1])
    assert gate(trial.gates, "min_gain").passed == (scores[2] > scores[1])


@pytest.mark.parametrize(
    ("overrides", "failing"),
    [
        (["promotion.min_gain=1"], "min_gain"),
        (["promotion.min_gain=-1", "promotion.max_length_growth=0.9"], "max_length_growth"),
        (["promotion.min_gain=-1", "promotion.max_kl=0.0000001"], "max_kl"),
        (["promotion.min_gain=-1", "promotion.max_kl=9", "promotion.max_length_growth=1.0"], None),
    ],
)
def test_each_gate_can_refuse(overrides: list[str], failing: str | None, given: HandOver) -> None:
    gates = given.trial(2, 1, *overrides).gates
    assert [found.name for found in gates if found.passed is False] == ([] if failing is None else [failing])
    assert passed(gates) == (failing is None)


def test_without_a_champion_what_can_be_checked_is_checked(given: HandOver) -> None:
    gates = given.trial(2, None, "promotion.max_kl=0.0000001").gates
    assert [found.passed for found in gates] == [None, False, None]
    assert passed(given.trial(2, None).gates)


def test_a_kl_that_nobody_measured_does_not_pass(given: HandOver) -> None:
    policy = given.policy(3)
    assert policy.divergence() is not None
    unknown = policy.record.model_copy(update={"metrics": {}})
    blind = type(policy)(policy.name, policy.run, unknown, policy.checkpoint, policy.spec)
    assert gate(check_gates(PromotionSpec(max_kl=5.0), blind, None), "max_kl").passed is False
    assert gate(check_gates(PromotionSpec(), blind, None), "max_kl").passed is None


def test_kl_is_that_of_the_policys_own_responses_where_there_are_any(given: HandOver) -> None:
    records = given.run.records()
    assert given.policy(2).divergence() == (records[2].metrics["kl/reference"], "on its own responses, in iteration 2")
    assert given.policy(1).divergence() == (0.0, "it is the reference")


@pytest.mark.parametrize(
    "override",
    [
        ["advantages.reference={kind: every, iterations: 1}"],
        ["advantages.reference={kind: ema}"],
        ["evaluation.weights=ema", "update.ema_decay=0.9"],
    ],
)
def test_a_kl_to_another_reference_or_of_other_weights_opens_no_gate(override: list[str], given: HandOver) -> None:
    """The record has a number all the same: to a reference that moved, or of the policy without its average."""
    policy = given.policy(2)
    other = replace(policy, spec=policy.spec.with_overrides(override))
    assert gate(check_gates(PromotionSpec(max_kl=9.0), policy, None), "max_kl").passed is True
    assert other.divergence() is None
    refused = gate(check_gates(PromotionSpec(max_kl=9.0), other, None), "max_kl")
    assert (refused.passed, refused.text) == (False, "its run measured none; must be at most 9")


def test_promotions_and_rollbacks_are_on_record_with_their_evidence(own: HandOver) -> None:
    assert "promote of version 1 in place of no version" in own.promote(1)
    assert "promote of version 3 in place of version 1" in own.promote(3)
    [first, second] = Journals(str(own.run.home / "store")).of(MODEL).moves()
    assert (first.before, second.before, second.version) == (None, "1", "3")
    assert second.evidence["candidate"]["run"] == "toy"  # type: ignore[index,call-overload]
    assert [kept.kind for kept in second.artifacts] == ["checkpoint", "evaluation", "evaluation", "comparison"]
    code, said = cli("rollback", MODEL, "--reason", "it swears")
    assert (code, find_policy(f"models:/{MODEL}@champion").iteration) == (0, 0)
    assert "rollback of version 1 in place of version 3 by" in said
    code, said = cli("rollback", MODEL)
    assert code == 2
    code, said = cli("rollback", MODEL, "--alias", "champon", "--to", "1")
    assert (code, said.endswith("); did you mean champion?\n")) == (2, True), said
    code, said = cli("rollback", MODEL, "--to", "2")
    assert (code, find_policy(f"models:/{MODEL}@champion").iteration) == (0, 1)
    code, said = cli("lineage", f"models:/{MODEL}@champion")
    assert code == 0
    for expected in ("iteration 1    checkpoint", "50 train prompts of generate.py:prompts", "it swears"):
        assert expected in said


def test_rolling_back_to_what_is_gone_is_refused(own: HandOver) -> None:
    own.promote(1)
    own.promote(3)
    lose_it(own.run.place(own.run.records()[0].checkpoint))
    result = CliRunner().invoke(app, ["rollback", MODEL])
    assert result.exit_code == 2
    assert "its checkpoint" in result.stderr
    assert find_policy(f"models:/{MODEL}@champion").iteration == 2


def test_the_way_back_stays_open_whatever_became_of_the_run(own: HandOver) -> None:
    own.promote(1)
    own.promote(3)
    shutil.rmtree(own.run.folder)
    code, said = cli("rollback", MODEL)
    assert (code, "rollback of version 1 in place of version 3 by" in said) == (0, True), said


def test_the_collector_leaves_champions_and_evidence_also_of_a_run_that_is_gone(own: HandOver) -> None:
    own.promote(1)
    own.promote(3)
    moves = Journals(str(own.run.home / "store")).of(MODEL).moves()
    evidence = {(ref.kind, ref.key) for move in moves for ref in move.artifacts}
    shutil.rmtree(own.run.folder)
    store = own.run.context().store
    shutil.rmtree(own.run.folder)
    needed = Reachability(store).of_all()
    assert evidence <= needed
    assert {kind for kind, _ in evidence} == {"checkpoint", "evaluation", "comparison"}
    kinds = {found.kind for found in open_collector(store.root).artifacts()}
    assert "promotions" not in kinds


def test_what_a_comparison_rests_on_stays_while_a_person_thinks(own: HandOver) -> None:
    refs = own.trial(2, 1).artifacts()
    root, names = str(own.run.home / "store"), {(ref.kind, ref.key) for ref in refs}
    collector = open_collector(root)
    with pinned(root, refs):
        assert collector.collect(names, set) == []
    assert {(gone.kind, gone.key) for gone in collector.collect(names, set)} == names


def test_lineage_finds_what_does_not_fit(own: HandOver) -> None:
    assert trace(f"models:/{MODEL}/3").complaints == []
    lose_it(own.run.place(own.run.records()[1].checkpoint))
    found = trace("toy@2")
    assert found.complaints == []
    assert [link.made_from for link in found.steps[1].links if link.kind == "checkpoint"] == [None]
    records = own.run.records()
    scores = {"score_rollouts": records[1].model_dump(mode="json")["artifacts"]["score_rollouts"]}
    own.run.forge(2, artifacts=records[2].model_dump(mode="json")["artifacts"] | scores)
    complaints = trace("toy@2").complaints
    assert [complaint.partition(" was")[0].rpartition(" ")[0] for complaint in complaints] == [
        "iteration 2: experience",
        "iteration 2: scores",
    ]
    status, said = cli("lineage", "toy@2")
    assert status == 1
    assert "\n".join(["the lineage is inconsistent:", *complaints]) in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lineage", "models:/nothing@champion"], "could not find models:/nothing@champion"),
        (["lineage", "toy@9"], "run toy has no iteration 9: it has 0..2"),
        (["lineage", "toy@x"], "does not name a policy: write models:/NAME@ALIAS"),
        (["evaluate", "nowhere"], "there is no run nowhere"),
        (["evaluate", "toy", "--set", "evaluation.num_prompts=0"], "evaluation.num_prompts=0"),
        (["promote", "toy@2"], "'toy@2' is no registered version"),
        (["promote", f"models:/{MODEL}/2", "--set", "promotion.alias=latest"], "MLflow reserves latest"),
        (["promote", f"models:/{MODEL}/7"], "could not find"),
        (["rollback", "no such"], f"aliases of 'no such': no model is registered as no such (registered: {MODEL})"),
        (["rollback", "models:/a/b/c"], "does not name a registered model"),
        (["rollback", f"models:/{MODEL}@candidate"], f"names a version: give the model's name alone, {MODEL}"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(arguments: list[str], message: str, given: HandOver) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2, result.output
    assert message in result.stderr


def test_nobody_answers_in_time(given: HandOver) -> None:
    trial = given.trial(2, 1)
    spec = PromotionSpec(approval_timeout_h=1.5 / HOUR_S)

    asked: list[str] = []

    @flow(persist_result=False)
    def promotes() -> PromotionReport:
        from prefect.runtime import flow_run

        asked.append(str(flow_run.id))
        assert ask(trial, spec) is None
        return refused(PromotionReport(trial=None, moved=None, verdict="nobody answered"))

    assert promotes().verdict == "nobody answered"
    with get_client(sync_client=True) as client:
        assert client.read_flow_run(UUID(asked[0])).state_name == "NotPromoted"


@pytest.mark.parametrize(("champion", "alias"), [(1, "champion"), (None, "champion"), (1, "prod_EU")])
def test_a_person_is_asked_in_prefects_ui(champion: int | None, alias: str, given: HandOver) -> None:
    trial = given.trial(2, champion).model_copy(update={"alias": alias})
    asked: dict[str, Any] = {}

    @flow(persist_result=False)
    def promotes() -> str:
        from prefect.runtime import flow_run

        asked["id"] = flow_run.id
        approval = ask(trial, PromotionSpec())
        assert approval is not None
        return f"{approval.approve} {approval.by}"

    answers: list[str] = []
    thread = threading.Thread(target=lambda: answers.append(promotes()), daemon=True)
    thread.start()
    with get_client(sync_client=True) as client:

        def is_asked() -> bool:
            """Prefect pauses a flow run first, and then says in which form it wants an answer."""
            state = client.read_flow_run(asked["id"]).state if "id" in asked else None
            form = state.state_details.run_input_keyset if state is not None and state.name == "Paused" else None
            return bool(form and client.filter_flow_run_input(asked["id"], form["schema"], 1, set()))

        until(lambda: not thread.is_alive() or is_asked(), "the flow run is paused and takes an answer")
        resume_flow_run(asked["id"], run_input=Approval(approve=True, by="anna").model_dump())
    thread.join(LONG_S)
    assert answers == ["True anna"]
