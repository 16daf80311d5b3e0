"""Servers start in the background, are found again, and end with everything below them; strangers never do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from infra.deploy.stack.__main__ import watch
from infra.deploy.stack.processes import MARK, Daemon
from infra.deploy.stack.runner import Runner
from infra.deploy.stack.service import Service, StackError
from infra.deploy.stack.site import Site
from infra.process_identity import is_alive, this_process
from tests.infra.programs import ROOT
from tests.infra.stack.stack_sites import site_in, small_service
from tests.processes import runs
from tests.waiting import until

STARTER = """
import sys
from pathlib import Path
from infra.deploy.stack.processes import Daemon
from tests.infra.stack.stack_sites import site_in, small_service
site = site_in(Path(sys.argv[1]))
service = small_service(site, "small", "parent")
service.folder.mkdir()
Daemon(service, folder=site.settings.folder, stack=site.credentials.stack).start()
print(service.ports[0].number, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = site_in(tmp_path / "stack")
    yield site
    for process in psutil.process_iter():
        try:
            if any(site.credentials.stack in value for value in process.environ().values()):
                process.kill()
        except psutil.Error:
            continue


def daemon_of(site: Site, service: Service) -> Daemon:
    service.folder.mkdir(exist_ok=True)
    return Daemon(service, folder=site.settings.folder, stack=site.credentials.stack)


def runner_of(site: Site, *services: Service) -> Runner:
    return Runner(site, services)


def record_of(site: Site, name: str = "small") -> Path:
    return site.settings.folder / "run" / name


def pid_of(site: Site, name: str = "small") -> int:
    return int(record_of(site, name).read_text().split("_")[0])


def test_it_starts_once_and_another_command_finds_and_ends_it(site: Site):
    service = small_service(site)
    runner_of(site, service).up()
    first = pid_of(site)
    runner_of(site, service).make_way()
    runner_of(site, service).up()
    assert pid_of(site) == first
    assert runner_of(site, service).running() == {"small"}
    assert runner_of(site, service).states()[0].healthy
    assert daemon_of(site, service).listening() == {("127.0.0.1", service.ports[0].number)}
    runner_of(site, service).down()
    runner_of(site, service).down()
    assert not runs(first)
    assert not record_of(site).exists()


def test_what_ran_under_settings_of_before_is_ended(site: Site):
    runner_of(site, small_service(site, "former")).up()
    former = pid_of(site, "former")
    runner_of(site, small_service(site, "latter")).down()
    assert not runs(former)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_in_a_container_all_end_with_the_first_one_or_with_a_signal(site: Site, end: signal.Signals):
    first, second = small_service(site, "first"), small_service(site, "second")
    runner = runner_of(site, first, second)
    runner.up()
    pids = [pid_of(site, "first"), pid_of(site, "second")]
    site = replace(site, servers=frozenset({"first", "second"}))
    if end == signal.SIGKILL:
        os.kill(pids[0], end)
        with pytest.raises(StackError, match="first ended by itself"):
            watch(runner, site)
    else:
        before = signal.getsignal(end)
        threading.Thread(
            target=lambda: (until(lambda: signal.getsignal(end) != before), os.kill(os.getpid(), end))
        ).start()
        watch(runner, site)
    assert not any(runs(pid) for pid in pids)


def test_one_that_died_is_started_again(site: Site):
    service = small_service(site)
    runner_of(site, service).up()
    first = pid_of(site)
    os.kill(first, signal.SIGKILL)
    until(lambda: not runner_of(site, service).running())
    assert runner_of(site, service).states()[0].health == "not running"
    runner_of(site, service).up()
    assert pid_of(site) != first


def test_other_settings_are_another_start(site: Site):
    service = small_service(site)
    runner_of(site, service).up()
    first = pid_of(site)
    runner_of(site, replace(service, environment={"LEVEL": "2"})).make_way()
    assert not runs(first)


@pytest.mark.parametrize("word", ["parent", "deaf"])
def test_children_and_those_who_do_not_listen_end_too(site: Site, word: str):
    service = small_service(site, "small", word)
    daemon = daemon_of(site, service)
    daemon.start()
    until(daemon.has_its_ports)
    pids = [pid_of(site), *(child.pid for child in psutil.Process(pid_of(site)).children(recursive=True))]
    assert len(pids) == (2 if word == "parent" else 1)
    daemon.stop()
    assert not any(runs(pid) for pid in pids)


def test_children_of_one_that_was_killed_are_ended(site: Site):
    daemon = daemon_of(site, small_service(site, "small", "parent"))
    daemon.start()
    until(daemon.has_its_ports)
    (child,) = psutil.Process(pid_of(site)).children()
    os.kill(pid_of(site), signal.SIGKILL)
    until(lambda: not daemon.running())
    assert runs(child.pid)
    daemon.stop()
    assert not runs(child.pid)


def test_what_a_killed_start_left_is_ended(site: Site):
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, str(site.settings.folder)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert starter.stdout is not None
    starter.stdout.readline()
    starter.kill()
    starter.communicate()
    left = pid_of(site)
    assert runs(left)
    runner_of(site, small_service(site)).down()
    assert not runs(left)


@pytest.mark.parametrize("difference", ["started", "boot", "namespace", "host"])
def test_no_stranger_with_a_recorded_pid_is_ever_hit(site: Site, difference: str):
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    try:
        me = this_process()
        started = int(Path(f"/proc/{stranger.pid}/stat").read_text().rpartition(")")[2].split()[19])
        real = me.model_copy(update={"pid": stranger.pid, "started": started})
        other = {"started": started - 1, "boot": "0" * 32, "namespace": "1", "host": "elsewhere"}[difference]
        shown = real.model_copy(update={difference: other})
        if difference == "host":
            shown = shown.model_copy(update={"boot": "0" * 32})
        record_of(site).write_text(f"{shown.token} digest\n")
        daemon = daemon_of(site, small_service(site))
        assert not daemon.running()
        daemon.stop()
        assert is_alive(real)
    finally:
        stranger.kill()
        stranger.wait()


def test_processes_of_another_stack_are_left_alone(site: Site):
    bystander = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(3600)"], env={**os.environ, MARK: "f" * 48 + ".small"}
    )
    try:
        daemon_of(site, small_service(site)).stop()
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_servers_start_in_order_and_what_needs_a_broken_one_does_not(site: Site):
    heard: list[str] = []
    broken = small_service(site, "broken", command=[sys.executable, "-c", "raise SystemExit('no disk')"])
    needy = small_service(site, "needy", after=["broken"], prepare=lambda: heard.append("needy"))
    whole = small_service(site, "whole", furnish=lambda: heard.append("furnished"))
    late = small_service(site, "late", after=["whole"], prepare=lambda: heard.append("late"))
    with pytest.raises(StackError, match=r"broken ended before(?s:.)*no disk(?s:.)*needy: not started"):
        runner_of(site, broken, needy, whole, late).up()
    assert heard == ["furnished", "late"]
    assert runner_of(site, broken, needy, whole, late).running() == {"whole", "late"}
    runner_of(site, broken, needy, whole, late).down()


def test_the_answer_of_a_stranger_on_its_port_does_not_make_it_healthy(site: Site):
    first = small_service(site, "first")
    runner_of(site, first).up()
    second = small_service(site, "second", command=first.command, ports=first.ports)
    with pytest.raises(StackError, match="second ended before it was healthy"):
        runner_of(site, second).up()
    runner_of(site, first, second).down()


def test_it_sees_no_variables_that_are_hidden_from_it(site: Site, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PREFECT_API_URL", "http://elsewhere/api")
    runner_of(site, small_service(site, hidden=["PREFECT_"], environment={"LEVEL": "2"})).up()
    seen = psutil.Process(pid_of(site)).environ()
    assert ("PREFECT_API_URL" in seen, seen["LEVEL"]) == (False, "2")
    runner_of(site, small_service(site)).down()
