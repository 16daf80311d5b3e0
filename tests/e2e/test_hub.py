"""A run whose model and data are names of the hub: stopped by SIGTERM, gone on with when there is no network, and to
its end when Prefect's server fails, whose page its successor puts right."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from tests.e2e.launch import (
    DEADLINE_S,
    flow_states,
    one_server,
    ppoflow,
    processes_of,
    record_files,
    records,
    start,
    train,
    wait_for,
)
from tests.experience.project import make_model
from tests.hub_server import ToyHub, toy_hub
from tests.infra.storage.s3.fault_proxy import FaultProxy

pytestmark = pytest.mark.thorough
RUN = "of-the-hub"
SPEC = """
name: of-the-hub
iterations: 3
dataset: {train: hf://us/sums, evaluation: "hf://us/sums@v1:held_out.csv", max_prompt_tokens: 16}
model: {path: hf://us/small}
sft: {data: hf://us/answered, num_steps: 100, batch_size: 8}
rollout: {prompts_per_iteration: 8, max_response_tokens: 8}
update: {num_minibatches: 2}
evaluation: {num_prompts: 4}
engines: {kv_cache_gib: 0.25}
reward: {sources: [{kind: exact_match}]}
"""
OFFLINE = {"HF_HUB_OFFLINE": "1", "PREFECT_CLIENT_MAX_RETRIES": "1"}


def fill(hub: ToyHub, model: Path) -> dict[str, str]:
    """The commits by name: of the data at the tag v1, too."""
    rows = "".join(json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in range(8)).encode()
    answered = b"prompt,completion\n1+1=,2\n2+2=,4\n3+3=,6\n4+4=,8\n"
    first = hub.model("us/small", {path.name: path.read_bytes() for path in model.iterdir()})
    old = hub.dataset("us/sums", {"held_out.csv": b"prompt,answer\n1+1=,2\n2+2=,4\n3+3=,6\n4+4=,8\n"})
    hub.datasets["us/sums"].tags["v1"] = old
    new = hub.dataset("us/sums", {"train-00000-of-00002.jsonl": rows, "train-00001-of-00002.jsonl": rows})
    examples = hub.dataset("us/answered", {"examples.csv": answered})
    return {"us/small": first, "us/sums@v1": old, "us/sums": new, "us/answered": examples}


def test_it_is_stopped_and_goes_on_without_the_hub_and_without_prefect(tmp_path: Path) -> None:
    home, spec = tmp_path / "home", tmp_path / "spec.yaml"
    spec.write_text(SPEC)
    with one_server(home):
        with toy_hub() as hub:
            commits = fill(hub, make_model(tmp_path / "model"))
            model = commits["us/small"]
            reach = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf")}
            done = ppoflow(home, "check", str(spec), **reach)
            assert done.returncode == 0, done.stdout + done.stderr
            assert "! hf://us/small: " in done.stdout
            assert f" files of commit {model}" in done.stdout
            stop(home, spec, f"hf://us/small is us/small at commit {model}", reach)
            hub.model("us/small", {"config.json": b"{}"})
        outlive_prefect(home, spec)
    found = records(home, RUN)
    assert [record["iteration"] for record in found] == [0, 1, 2, 3]
    assert {ref["commit"] for record in found for ref in record["downloads"]} == set(commits.values())
    told = ppoflow(home, "lineage", RUN).stdout
    assert f"hf://us/sums@v1:held_out.csv is us/sums at commit {commits['us/sums@v1']}" in told
    assert not list((home / "runs").rglob("*.safetensors.incomplete"))


def stop(home: Path, spec: Path, named: str, reach: dict[str, str]) -> None:
    """The run shows what it does, and ends cleanly on SIGTERM, saying how to go on."""
    run = start(home, RUN, spec=spec, **reach)
    progress = home / "runs" / RUN / "progress.json"
    wait_for(lambda: progress.exists() and "finetune_policy" in progress.read_text(), "the supervised start", run=run)
    run.send_signal(signal.SIGSTOP)  # however busy the machine is, the answer is of this moment
    try:
        told = ppoflow(home, "status", RUN).stdout
    finally:
        run.send_signal(signal.SIGCONT)
    assert told.startswith(f"run {RUN}: no iteration is committed yet\n")
    assert "  doing now          finetune_policy" in told
    assert f"process {run.pid} on " in told
    wait_for(lambda: len(record_files(home, RUN)) >= 1, "the start", run=run)
    run.send_signal(signal.SIGTERM)
    output, _ = run.communicate(timeout=DEADLINE_S)
    assert run.returncode == 130, output
    assert named in output
    first, second, *_ = output.splitlines()
    assert first.startswith(f"starting: run {RUN} from ")
    assert second.endswith(" s  checking the spec, its data, rewards and model")
    assert not progress.exists()
    assert "continue" in output
    assert "ppoflow train" in output
    assert "vllm serve" in output
    assert (home / "runs" / RUN / "best-policy" / "config.json").is_file()
    assert not list(processes_of(home))


def outlive_prefect(home: Path, spec: Path) -> None:
    """Its server fails from the middle on: the run ends well, and the next one puts its page right."""
    before = flow_states(home)
    proxy = FaultProxy(int(os.environ["PREFECT_API_URL"].removesuffix("/api").rpartition(":")[2]))
    variables = {**OFFLINE, "PREFECT_API_URL": f"{proxy.uri}/api"}
    run = start(home, RUN, spec=spec, **variables)
    wait_for(lambda: len(record_files(home, RUN)) >= 3, "iteration 2", run=run)
    proxy.refuse(500, "DatabaseAway")
    said = run.communicate(timeout=DEADLINE_S)[0]
    assert run.returncode == 0, said
    assert f"Prefect's server at {proxy.uri}/api fails or does not answer" in said
    assert flow_states(home) == before + Counter({"Running": 1})
    proxy.inject("", lambda request: False)
    done = train(home, RUN, spec=spec, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    assert flow_states(home) == before + Counter({"Crashed": 1, "Completed": 1})
    proxy.close()
