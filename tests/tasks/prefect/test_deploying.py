"""Where deployments go: to the configured server, and to the pool that was asked for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

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


def test_of_the_pool_that_the_file_names_no_copy_is_made() -> None:
    with for_pool(ROOT / "prefect.yaml", "gpu") as file:
        assert file == ROOT / "prefect.yaml"


def test_prefects_command_gets_the_address_that_is_configured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    said = tmp_path / "said"
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\necho "$PREFECT_API_URL $*" > {said}\nexit 3\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setenv("PREFECT_API_URL", "http://another:4200/api")
    assert deploy_all(ROOT / "prefect.yaml", "gpu", "http://ours:4200/api") == 3
    assert said.read_text() == (
        f"http://ours:4200/api -m prefect --no-prompt deploy --all --prefect-file {ROOT / 'prefect.yaml'}\n"
    )
