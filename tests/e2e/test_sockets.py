"""From outside the machine nobody reaches a run: all that its processes listen on, during the whole of it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest
from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

from tests.e2e.conftest import FinishedRun
from tests.e2e.launch import DEADLINE_S, ROOT, start, wait_for
from tests.e2e.sockets import ELSEWHERE, OpenSocket, SocketWatch

pytestmark = pytest.mark.thorough
REWARD_RANKS = "ppo_core.scoring.reward_ranks"
SERVERS = {"uvicorn", "ppo_core.engines.rollout", "ppo_core.engines.training"}
TWO_OF_EACH = ("training.num_ranks=2", "engines.rollout_engines=2", "iterations=1", "evaluation.every=1")


def test_a_run_listens_on_loopback_alone(smoke: FinishedRun) -> None:
    require_loopback(smoke.sockets, SERVERS, ranks=1)


def test_so_do_two_of_each_engine_and_two_that_share_a_reward_model(tmp_path: Path) -> None:
    source = f"{{kind: model, path: {reward_model(tmp_path / 'rm')}, num_ranks: 2}}"
    settings = (*TWO_OF_EACH, f"reward={{sources: [{source}]}}")
    run = start(tmp_path, "watched", *(word for setting in settings for word in ("--set", setting)), **ELSEWHERE)
    watch = SocketWatch(run)
    output = run.communicate(timeout=DEADLINE_S)[0]
    seen = watch.stop()
    assert run.returncode == 0, output
    require_loopback(seen, SERVERS | {REWARD_RANKS}, ranks=2)
    assert len({one.program for one in seen if REWARD_RANKS in one.program}) >= 2  # the check before it has its own


def require_loopback(seen: Collection[OpenSocket], servers: set[str], *, ranks: int) -> None:
    """The watch has looked at all of them: Prefect's server, and gloo in vLLM, in each rank and in those of rewards."""
    assert sorted(one for one in seen if not one.is_loopback) == []
    assert {name for name in servers if any(name in one.program for one in seen)} == servers
    assert len({one.program for one in seen if "ppo_core.engines.training" in one.program}) == ranks


def reward_model(folder: Path) -> Path:
    """A classifier that reads the example's tokens and has learned nothing."""
    tokenizer = ROOT / "examples" / "arithmetic" / "tokenizer"
    config = LlamaConfig(
        vocab_size=len(AutoTokenizer.from_pretrained(tokenizer)),
        max_position_embeddings=128,
        num_labels=1,
        **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2},
    )
    LlamaForSequenceClassification(config).save_pretrained(folder)
    shutil.copytree(tokenizer, folder, dirs_exist_ok=True)
    return folder


def test_the_watch_sees_what_listens_on_all_addresses() -> None:
    program = (
        "import socket, subprocess, sys; "
        "tcp = socket.create_server(('', 0), family=socket.AF_INET6, dualstack_ipv6=True); "
        "udp = socket.socket(type=socket.SOCK_DGRAM); udp.bind(('0.0.0.0', 0)); "
        "own = socket.create_server(('127.0.0.1', 0)); "
        "print(*(one.getsockname()[1] for one in (tcp, udp, own)), flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        ports = [int(word) for word in process.stdout.readline().split()]
        watch = SocketWatch(process)
        wait_for(lambda: len(watch.seen) == 3, "three sockets", 30)
        seen = {one.port: one for one in watch.stop()}
        assert process.stdin is not None
        process.stdin.close()
    found = [(seen[port].kind, seen[port].address, seen[port].is_loopback) for port in ports]
    assert found == [("tcp6", "::", False), ("udp", "0.0.0.0", False), ("tcp", "127.0.0.1", True)]


@pytest.mark.parametrize(
    ("address", "loopback"), [("::1", True), ("::ffff:127.0.0.1", True), ("::ffff:10.0.0.1", False)]
)
def test_addresses_of_both_kinds_are_told_apart(address: str, loopback: bool) -> None:
    assert OpenSocket("tcp6", address, 80, "").is_loopback == loopback
