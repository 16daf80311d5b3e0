"""A run whose model and data are names of the hub: from the spec to the lineage, and on without a network."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.launch import one_server, ppoflow, records, train
from tests.experience.project import make_model
from tests.hub_server import toy_hub

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


def test_a_run_of_the_hub_goes_on_without_it(tmp_path: Path) -> None:
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
        done = train(home, RUN, "--set", "iterations=2", spec=spec, HF_HUB_OFFLINE="1")
        assert done.returncode == 0, done.stdout + done.stderr
    found = records(home, RUN)
    assert [record["iteration"] for record in found] == [0, 1, 2]
    assert {ref["commit"] for record in found for ref in record["downloads"]} == {model, old, new}
    told = ppoflow(home, "lineage", RUN).stdout
    assert f"hf://us/sums@v1:held_out.csv is us/sums at commit {old}" in told
    assert not list((home / "runs").rglob("*.safetensors.incomplete"))
