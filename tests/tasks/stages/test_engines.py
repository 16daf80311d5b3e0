"""The engines of a run are those that its spec asks for, also where a spec of another time is served meanwhile."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from infra.engines.process import EngineClosed, EngineJob
from infra.settings import Settings
from tasks.stages.engines import Engines, LocalHandle, asked_for
from tests.tasks.run_contexts import smoke_spec


@pytest.fixture
def engines(tmp_path: Path) -> Engines:
    """Those of the smoke spec, none of them started."""
    return Engines(smoke_spec(), Settings(home=tmp_path), tmp_path / "logs")


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


def test_other_engines_take_the_place_of_those_that_a_spec_does_not_ask_for(engines: Engines) -> None:
    others, before = children(), dict(engines.handles)
    engines.handles["training"].start()
    assert children() != others
    engines.serve(smoke_spec("training.num_ranks=2"))
    assert children() == others
    assert engines.handles.keys() == before.keys()
    assert not set(map(id, engines.handles.values())) & set(map(id, before.values()))
    old = before["training"]
    assert isinstance(old, LocalHandle)
    with pytest.raises(EngineClosed, match="engine 'training' is closed"):
        old.engine.run(EngineJob("update_policy", {}, None, {}), timeout_s=1)


def test_what_a_spec_says_of_other_things_leaves_them_alone(engines: Engines) -> None:
    before = dict(engines.handles)
    engines.serve(smoke_spec("iterations=9", "engines.timeout_s=7", "training.microbatch_size=3"))
    assert engines.handles == before


def test_closed_engines_are_not_taken_up_again(engines: Engines) -> None:
    before = dict(engines.handles)
    engines.close()
    engines.serve(smoke_spec("training.num_ranks=2"))
    assert engines.handles == before


@pytest.mark.parametrize(
    "change",
    [
        ["training.num_ranks=2"],
        ["engines.rollout_engines=2"],
        ["engines.deterministic=true"],
        ["engines.backend=ray", "engines.address=head:6379"],
        ["engines.backend=ray", "engines.tensor_parallel_size=2"],
        ["engines.backend=ray", "engines.training_resources={trainer: 1}"],
    ],
)
def test_what_engines_are_started_with_and_where_tells_them_apart(change: list[str]) -> None:
    like = ["engines.backend=ray"] if change[0] == "engines.backend=ray" else []
    assert asked_for(smoke_spec(*change)) == asked_for(smoke_spec(*change))
    assert asked_for(smoke_spec(*change)) != asked_for(smoke_spec(*like))
