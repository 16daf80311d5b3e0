"""The whole way gone on with after its training: gates, engines and folders are those of the last command."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.rlhf import rlhf
from tests.flows.test_promotion_flow import answering
from tests.flows.test_rlhf import spec
from tests.tasks.toy_engines import ToyEngines
from tests.tasks.toy_reward_models import toy_engines

pytestmark = pytest.mark.usefixtures("prefect_server")
SHORT = ("promote=false", "evaluate=false")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PPOFLOW_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PPOFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    return tmp_path / "home"


@pytest.fixture
def toys(home: Path, monkeypatch: pytest.MonkeyPatch) -> ToyEngines:
    return toy_engines(monkeypatch)


def test_a_finished_run_is_promoted_under_the_gates_that_are_given_now(
    home: Path, toys: ToyEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No record tells of them, for no iteration was made with them."""
    rlhf(spec(*SHORT), "gated")
    done, asked = len(toys.done), answering(monkeypatch, None)
    refused = rlhf(spec("run.promotion.approval=true", "run.promotion.approval_timeout_h=1.0e-5"), "gated").promotion
    assert refused is not None
    assert (asked, refused.moved) == (["None to 1"], None)
    assert refused.verdict == "nobody answered within 1e-05 h"
    moved = rlhf(spec("run.promotion.alias=released"), "gated").promotion
    assert moved is not None
    assert moved.trial is not None
    assert (moved.trial.alias, moved.moved is None) == ("released", False)
    assert "update_policy" not in toys.done[done:]
