"""Where deployments go: to the configured server, and to the pool that was asked for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from ppo_core.records import InputError
from tasks.prefect.deploying import deploy_all, for_pool

ROOT = Path(__file__).parents[3]


def pools(file: Path) -> set[str]:
    """The work pools of its deployments."""
    return {deployment["work_pool"]["name"] for deployment in yaml.safe_load(file.read_text("utf-8"))["deployments"]}


def test_all_deployments_get_the_pool_and_keep_the_rest() -> None:
    file = ROOT / "prefect.yaml"
    before = yaml.safe_load(file.read_text("utf-8"))
    with for_pool(file, "team") as copy:
        assert pools(copy) == {"team"}
        after = yaml.safe_load(copy.read_text("utf-8"))
        for one, other in zip(after["deployments"], before["deployments"], strict=True):
            assert {**one, "work_pool": {**one["work_pool"], "name": "gpu"}} == other
        assert after["pull"] == before["pull"]
    assert not copy.exists()


def test_without_a_pool_each_deployment_keeps_its_own() -> None:
    with for_pool(ROOT / "prefect.yaml", None) as file:
        assert file == ROOT / "prefect.yaml"


def test_a_deployment_without_a_pool_gets_one(tmp_path: Path) -> None:
    file = tmp_path / "prefect.yaml"
    file.write_text("deployments: [{name: a, work_pool: }, {name: b}, {name: c, work_pool: {name: cpu}}]")
    with for_pool(file, "team") as copy:
        assert pools(copy) == {"team"}


@pytest.mark.parametrize("text", ["", "deployments:", "[1, 2]", "deployments: [a]", "deployments: {a: [}", "\xff"])
def test_a_file_without_deployments_is_told(tmp_path: Path, text: str) -> None:
    file = tmp_path / "prefect.yaml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(InputError, match=r"prefect.yaml has no list of `deployments`"), for_pool(file, "team"):
        pass


def test_prefects_command_gets_the_address_that_is_configured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    said = tmp_path / "said"
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\necho "$PREFECT_API_URL $*" > {said}\nexit 3\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setenv("PREFECT_API_URL", "http://another:4200/api")
    assert deploy_all(ROOT / "prefect.yaml", None, "http://ours:4200/api") == 3
    assert said.read_text() == (
        f"http://ours:4200/api -m prefect --no-prompt deploy --all --prefect-file {ROOT / 'prefect.yaml'}\n"
    )
