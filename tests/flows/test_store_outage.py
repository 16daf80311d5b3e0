"""The store's server goes away in the middle of a run: the run waits for it and comes to the same bytes, or crashes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect import get_client
from prefect.client.schemas.filters import FlowFilter, FlowFilterName
from prefect.client.schemas.objects import FlowRun
from prefect.flow_engine import run_flow
from prefect.states import AwaitingRetry

from flows.reward_model import reward_model
from flows.rlhf import rlhf
from infra.storage.client import Tuning, open_objects
from infra.storage.objects import Objects, StoreUnavailable
from infra.storage.telling import messages_to
from ppo_core.records import InputError
from ppo_core.spec import RewardModelSpec
from tasks.policies.held_out import any_lease
from tasks.prefect.server import EmbeddedFlow
from tests.flows.test_rlhf import HELPFUL, spec
from tests.infra.storage.s3.fault_proxy import FaultProxy
from tests.infra.storage.s3.s3_server import S3Server
from tests.tasks.bucket_runs import BucketRun
from tests.tasks.toy_reward_models import toy_engines
from tests.tasks.toy_runs import digests
from tests.waiting import LONG_S

pytestmark = pytest.mark.usefixtures("prefect_server")
SHORT = ("iterations=1",)
TUNING = Tuning(connect_s=30, read_s=60, attempts=1)
MOMENTS = 6
MIDDLE = 60
AWAY_S = 1.0


@pytest.fixture
def proxy(s3_server: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """In front of the server, and what boto3 finds."""
    proxy = FaultProxy(s3_server.port)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.uri)
    yield proxy
    proxy.close()


@pytest.fixture
def said() -> Iterator[list[str]]:
    """What was told of outages."""
    texts: list[str] = []
    with messages_to(texts.append):
        yield texts


def run_on(bucket: str, home: Path) -> BucketRun:
    """A run on a bucket behind the proxy."""
    objects: Objects = open_objects(bucket, tuning=TUNING)
    return BucketRun(home, SHORT, objects=objects)


@pytest.mark.thorough
def test_an_outage_at_any_moment_costs_its_seconds(
    proxy: FaultProxy, s3_server: S3Server, said: list[str], tmp_path: Path
) -> None:
    undisturbed = digests(run_on(s3_server.make_bucket(), tmp_path / "undisturbed").train())
    requests = len(proxy.requests)
    for moment in range(1, MOMENTS + 1):
        bucket = s3_server.make_bucket()
        run = run_on(bucket, tmp_path / str(moment))
        said.clear()
        proxy.away_before(moment * requests // (MOMENTS + 1), AWAY_S)
        assert digests(run.train()) == undisturbed
        assert [text.partition("S3 at ")[2].split()[1] for text in said] == ["does", "answers"], said


def crashing_run(bucket: str, home: Path, proxy: FaultProxy) -> Any:
    """A flow whose store goes away for good."""
    run = run_on(bucket, home)
    proxy.away_before(MIDDLE)

    def toy() -> int:
        return len(run.train())

    return EmbeddedFlow(toy, name="toy-away", persist_result=False)


def test_beyond_the_timeout_the_run_has_crashed_and_goes_on_when_it_is_started_again(
    proxy: FaultProxy, bucket: str, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PPOFLOW_STORE_TIMEOUT_S", "3")
    began = time.monotonic()
    with pytest.raises(StoreUnavailable, match=r"\(waited for 3 s\); PPOFLOW_STORE_TIMEOUT_S"):
        crashing_run(bucket, tmp_path / "before", proxy)()
    assert time.monotonic() - began < LONG_S
    assert len(said) == 1
    found = only_run_of("toy-away")
    assert found.state is not None
    assert found.state.is_crashed()
    assert "StoreUnavailable: S3 could not" in str(found.state.message)
    proxy.come_back()
    ours = digests(run_on(bucket, tmp_path / "after").train())
    assert ours == digests(BucketRun(tmp_path / "undisturbed", SHORT).train())


def only_run_of(name: str) -> FlowRun:
    """The flow run of a flow, as the server knows it."""
    with get_client(sync_client=True) as client:
        (found,) = client.read_flow_runs(flow_filter=FlowFilter(name=FlowFilterName(any_=[name])))
    return found


def test_what_was_done_stands_where_the_store_is_away_at_the_very_end(proxy: FaultProxy, bucket: str) -> None:
    """The lease is left to whoever comes next."""
    root = f"s3://{bucket}/store"
    with any_lease(root) as lease:
        proxy.go_away()
    proxy.come_back()
    with any_lease(root) as next_one:
        assert lease.run != next_one.run


@pytest.fixture
def away(proxy: FaultProxy, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FaultProxy:
    """Where all flows look for a store, which has never answered this process; at a start nobody waits for long."""
    monkeypatch.setenv("PPOFLOW_HOME", str(tmp_path))
    monkeypatch.setenv("PPOFLOW_STORE", f"s3://{bucket}/store")
    monkeypatch.setenv("PPOFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setattr("infra.storage.outage.START_S", 0.1)
    toy_engines(monkeypatch)
    proxy.go_away()
    return proxy


def started_again(flow: EmbeddedFlow[..., Any], parameters: dict[str, Any], away: FaultProxy) -> Any:
    """What a deployment's flow run ends with that crashed for want of a store, and is started again before that is
    back."""
    with get_client(sync_client=True) as client:
        deployment = client.create_deployment(client.create_flow(flow), "away", enforce_parameter_schema=False)
        flow_run = client.create_flow_run_from_deployment(deployment, parameters=parameters).id
        with pytest.raises(StoreUnavailable, match=r"is .* the right address"):
            run_flow(flow, flow_run=client.read_flow_run(flow_run))
        client.set_flow_run_state(flow_run, AwaitingRetry(), force=True)
        threading.Timer(AWAY_S, away.come_back).start()
        return run_flow(flow, flow_run=client.read_flow_run(flow_run))


def test_training_of_a_reward_model_that_is_started_again_waits_for_the_store(away: FaultProxy) -> None:
    """From its first look at it on, as in the middle of its work."""
    learned = RewardModelSpec.from_yaml(HELPFUL / "reward_model.yaml")
    report = started_again(reward_model, {"spec": learned.model_dump(mode="json"), "run": "late"}, away)
    assert report.version == "models:/helpful-reward-model/1"


def test_the_whole_way_that_is_started_again_waits_for_the_store(away: FaultProxy) -> None:
    """So that what is wrong with the spec, and not the store, is what ends it."""
    asked = spec("given.trained_policy=nowhere@1", "promote=false").model_dump(mode="json")
    with pytest.raises(InputError, match="there is no run nowhere"):
        started_again(rlhf, {"spec": asked, "run": "late"}, away)
