"""From outside the machine nobody reaches a run: all that its processes listen on, during the whole of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.launch import DEADLINE_S, start, wait_for
from tests.e2e.sockets import OpenSocket, SocketWatch

pytestmark = [pytest.mark.slow, pytest.mark.thorough]
SERVERS = {"uvicorn", "ppo_core.engines.rollout", "ppo_core.engines.training"}


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_run_listens_on_loopback_alone(num_ranks: int, tmp_path: Path) -> None:
    # The user's own choice of interfaces is for other programs: all processes of an engine are on one machine.
    elsewhere = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0", "VLLM_HOST_IP": "192.0.2.7"}
    run = start(tmp_path, "watched", "--set", f"training.num_ranks={num_ranks}", **elsewhere)
    watch = SocketWatch(run)
    output = run.communicate(timeout=DEADLINE_S)[0]
    seen = watch.stop()
    assert run.returncode == 0, output
    assert sorted(one for one in seen if not one.is_loopback) == []
    # The watch has looked at all of them: Prefect's server, and gloo in vLLM and in each rank.
    assert {name for name in SERVERS if any(name in one.program for one in seen)} == SERVERS
    assert len({one.program for one in seen if "ppo_core.engines.training" in one.program}) == num_ranks


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
