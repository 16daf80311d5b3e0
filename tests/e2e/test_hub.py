"""A run whose model and data are names of the hub: from the spec to the lineage, on without a network, and to its end
without a Prefect server that answers, whose page its successor puts right."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest

from tests.e2e.launch import (
    DEADLINE_S,
    flow_states,
    one_server,
    ppoflow,
    record_files,
    records,
    start,
    train,
    wait_for,
)
from tests.experience.project import make_model
from tests.hub_server import toy_hub
from tests.infra.storage.s3.fault_proxy import FaultProxy

pytestmark = pytest.mark.thorough
RUN = "of-the-hub"
SPEC = """
name: of-the-hub
iterations: 1
dataset: {train: hf://us/sums, evaluation: "hf://us/sums@v1:held_out.csv", max_prompt_tokens: 16}
model: {path: hf://us/small}
rollout: {prompts_per_iteration: 8, max_response_tokens: 8}
update: {num_minibatches: 2}
evaluation: {num_prompts: 4}
engines: {kv_cache_gib: 0.25}
reward: {sources: [{kind: exact_match}]}
"""


def test_a_run_of_the_hub_goes_on_without_it_and_without_prefect(tmp_path: Path) -> None:
    home, spec = tmp_path / "home", tmp_path / "spec.yaml"
    spec.write_text(SPEC)
    make_model(tmp_path / "model")
    rows = "".join(json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in range(8)).encode()
    with one_server(home):
        with toy_hub() as hub:
            model = hub.model("us/small", {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()})
            old = hub.dataset("us/sums", {"held_out.csv": b"prompt,answer\n1+1=,2\n2+2=,4\n3+3=,6\n4+4=,8\n"})
            hub.datasets["us/sums"].tags["v1"] = old
            new = hub.dataset("us/sums", {"train-00000-of-00002.jsonl": rows, "train-00001-of-00002.jsonl": rows})
            reach = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf")}
            done = ppoflow(home, "check", str(spec), **reach)
            assert done.returncode == 0, done.stdout + done.stderr
            assert "! hf://us/small: " in done.stdout
            assert f" files of commit {model}" in done.stdout
            done = train(home, RUN, spec=spec, **reach)
            assert done.returncode == 0, done.stdout + done.stderr
            assert f"hf://us/small is us/small at commit {model}" in done.stdout
            hub.model("us/small", {"config.json": b"{}"})
        proxy = FaultProxy(int(os.environ["PREFECT_API_URL"].removesuffix("/api").rpartition(":")[2]))
        offline = {"HF_HUB_OFFLINE": "1", "PREFECT_API_URL": f"{proxy.uri}/api", "PREFECT_CLIENT_MAX_RETRIES": "1"}
        longer = start(home, RUN, "--set", "iterations=3", spec=spec, **offline)
        wait_for(lambda: len(record_files(home, RUN)) >= 3, "iteration 2", run=longer)
        proxy.refuse(500, "DatabaseAway")
        said = longer.communicate(timeout=DEADLINE_S)[0]
        assert longer.returncode == 0, said
        assert f"Prefect's server at {proxy.uri}/api fails or does not answer" in said
        assert flow_states(home) == Counter({"Completed": 1, "Running": 1})
        proxy.inject("", lambda request: False)
        done = train(home, RUN, "--set", "iterations=3", spec=spec, **offline)
        assert done.returncode == 0, done.stdout + done.stderr
        assert flow_states(home) == Counter({"Completed": 2, "Crashed": 1})
        proxy.close()
    found = records(home, RUN)
    assert [record["iteration"] for record in found] == [0, 1, 2, 3]
    assert {ref["commit"] for record in found for ref in record["downloads"]} == {model, old, new}
    told = ppoflow(home, "lineage", RUN).stdout
    assert f"hf://us/sums@v1:held_out.csv is us/sums at commit {old}" in told
    assert not list((home / "runs").rglob("*.safetensors.incomplete"))
