"""vLLM serves a policy that learned by adapters in both forms: merged, and as the start with PEFT's files beside it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ONE_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
IN_THIS_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCH_COMPILE_DISABLE": "1", "VLLM_NO_USAGE_STATS": "1"}


@pytest.mark.thorough
def test_the_start_with_the_adapter_answers_as_the_merged_policy(tmp_path: Path) -> None:
    for step in ("train", "answer"):
        command = [sys.executable, "-m", "tests.ppo_core.engines.served_adapters_program", step, str(tmp_path)]
        seen = {**os.environ, **ONE_RANK, **IN_THIS_PROCESS, "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(command, cwd=ROOT, env=seen, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    answers = json.loads((tmp_path / "answers.json").read_text())
    assert answers["with the adapter"] == answers["merged"]
    assert not [one for one, other in zip(answers["start"], answers["merged"], strict=True) if one == other]
