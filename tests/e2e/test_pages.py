"""What people see: Prefect's form, a run's page and its reports, MLflow's run and registry, in a real browser."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Page, expect

from infra.mlflow.run import find_page
from infra.prefect_server import PrefectServer
from ppo_core.spec import RunSpec, UpdateSpec
from tests.e2e.browser import is_drawn, keep, opened_browser
from tests.e2e.conftest import FinishedRun
from tests.e2e.launch import ROOT, environment, wait_for
from tests.infra.mlflow.mlflow_server import Server
from tests.waiting import LONG_S

pytestmark = pytest.mark.thorough
DEPLOY = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "-n", "arithmetic"]


@dataclass(frozen=True)
class Pages:
    """The servers of a finished run, and a browser."""

    browser: Page
    prefect: str
    mlflow: str
    pictures: Path

    def ask(self, what: str) -> list[dict[str, Any]]:
        """What Prefect's API has."""
        return list(httpx.post(f"{self.prefect}/api/{what}/filter", json={}, timeout=300).json())

    def change(self, what: str, values: dict[str, Any]) -> bool:
        """Whether the server has taken it: one whose SQLite is busy says 503."""
        answer = httpx.patch(f"{self.prefect}/api/{what}", json=values, timeout=300)
        return answer.status_code != httpx.codes.SERVICE_UNAVAILABLE and bool(answer.raise_for_status())


@pytest.fixture(scope="module")
def pages(smoke: FinishedRun, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pages]:
    with opened_browser() as browser:
        home = tmp_path_factory.mktemp("pages")
        shutil.copytree(smoke.home / "prefect", home / "prefect")
        shutil.copytree(smoke.home / "mlflow", home / "mlflow")
        prefect, mlflow = PrefectServer(home / "prefect", port=0), Server(home / "mlflow")
        prefect.start()
        mlflow.start()
        prefect.wait_until_healthy(LONG_S)
        address = {"PREFECT_API_URL": prefect.api_url, "PREFECT_HOME": str(home / "client")}
        pool = [sys.executable, "-m", "prefect", "work-pool", "create", "gpu", "--type", "process", "--overwrite"]
        for command in (pool, DEPLOY):
            subprocess.run(command, cwd=ROOT, env=environment(home, **address), check=True, capture_output=True)
        yield Pages(browser, prefect.ui_url, mlflow.uri, home / "pictures")
        prefect.close()
        mlflow.signal(signal.SIGKILL)


def as_jsonb(value: Any) -> Any:
    """What PostgreSQL, unlike SQLite, gives back of a document: keys by their length, then by their bytes."""
    if isinstance(value, dict):
        return {key: as_jsonb(value[key]) for key in sorted(value, key=lambda key: (len(key.encode()), key.encode()))}
    return [as_jsonb(item) for item in value] if isinstance(value, list) else value


def test_a_deployments_form_shows_the_spec_and_refuses_what_it_refuses(pages: Pages) -> None:
    page, deployed = pages.browser, pages.ask("deployments")[0]
    deployment, schema = deployed["id"], {"parameter_openapi_schema": as_jsonb(deployed["parameter_openapi_schema"])}
    wait_for(lambda: pages.change(f"deployments/{deployment}", schema), "the server has stored the schema")
    before = len(pages.ask("flow_runs"))
    page.goto(f"{pages.prefect}/deployments/deployment/{deployment}/run")
    expect(page.get_by_text("Gates that a policy must pass").first).to_be_visible()
    for section, start in (
        (RunSpec, "What to train"),
        (UpdateSpec, "How policy and critic"),
    ):  # in the spec's own order
        shown = page.inner_text("body").partition(start)[2]
        sentences = [str(field.description).replace("`", "") for field in section.model_fields.values()]
        places = [shown.index(sentence) for sentence in sentences]
        assert places == sorted(places), section.__name__
    for text in ("Number of iterations, each", "How the training engine runs", "Max Prompt Tokens"):
        expect(page.get_by_text(text).first).to_be_visible()
    iterations = page.locator("input[type=number]").nth(1)
    expect(iterations).to_have_value("30")
    keep(page.screenshot(), pages.pictures, "prefect-form")
    iterations.fill("-3")
    page.get_by_role("button", name="Submit").click()
    expect(page.get_by_text("Validation failed for field 'spec.iterations'").first).to_be_visible()
    assert len(pages.ask("flow_runs")) == before
    iterations.fill("2")
    page.get_by_role("button", name="Submit").click()
    wait_for(lambda: len(pages.ask("flow_runs")) == before + 1, "the run that the form asks for")
    (created,) = [run for run in pages.ask("flow_runs") if run["deployment_id"] == deployment]
    assert created["parameters"]["spec"]["iterations"] == 2


def test_a_flow_runs_page_has_its_graph_and_reports(pages: Pages) -> None:
    page = pages.browser
    (run,) = [run for run in pages.ask("flow_runs") if run["state_name"] == "Completed"]
    page.goto(f"{pages.prefect}/runs/flow-run/{run['id']}")
    expect(page.get_by_text("Completed").first).to_be_visible()
    expect(page.get_by_text(re.compile("3[0-9] Task runs"))).to_be_visible()
    page.get_by_text("Artifacts", exact=True).click()
    expect(page.get_by_text("first-iterations").first).to_be_visible()
    expect(page.get_by_text("first-samples").first).to_be_visible()
    graph = page.locator("canvas").first
    blank = page.get_by_text("Artifacts", exact=True).screenshot()
    wait_for(lambda: is_drawn(graph.screenshot(), blank), "the graph of the tasks")
    keep(page.screenshot(), pages.pictures, "prefect-flow-run")


def test_mlflow_shows_the_curves_and_the_registered_policy(pages: Pages, smoke: FinishedRun) -> None:
    page, policy = pages.browser, smoke.report["policy"]
    page.goto(f"{pages.mlflow}/#/models/{policy['name']}/versions/{policy['version']}")
    for text in ("ppoflow.run", "ppoflow.dataset_digest", "candidate"):
        expect(page.get_by_text(text).first).to_be_visible()
    keep(page.screenshot(), pages.pictures, "mlflow-registry")


def test_the_printed_link_opens_the_run_among_training_runs(pages: Pages) -> None:
    page, link = pages.browser, find_page(pages.mlflow, "first", timeout_s=LONG_S)
    assert link is not None
    page.goto(link)
    expect(page.get_by_text("PPO training run first of spec arithmetic-smoke")).to_be_visible()
    for text in ("Model metrics", "System metrics", "generate.py:prompts (training)", "Created by"):
        expect(page.get_by_text(text).first).to_be_visible()
    expect(page.get_by_text("Evaluation runs")).to_have_count(0)  # of the GenAI view
    page.get_by_text("Model metrics", exact=True).click()
    groups = {"score", "kl", "sampler", "policy", "critic", "sft"}
    wait_for(lambda: groups <= set(page.inner_text("body").split()), "the groups of curves")
    keep(page.screenshot(), pages.pictures, "mlflow-run")
    page.get_by_text("Runs", exact=True).first.click()
    expect(page.get_by_text("matching run")).to_be_visible()
    expect(page.get_by_text("first", exact=True).first).to_be_visible()
