"""supervisord runs the servers of a stack, starts again what dies, and ends them with all that is theirs; never a
stranger."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from infra.deploy.stack.__main__ import watch
from infra.deploy.stack.bring_up import Servers
from infra.deploy.stack.orphans import MARK
from infra.deploy.stack.probes import listening
from infra.deploy.stack.service import StackError
from infra.deploy.stack.site import Site
from infra.deploy.stack.supervisor import Supervisor
from infra.deploy.stack.supervisor_config import configuration_path, log_path, socket_path
from tests.infra.programs import ROOT
from tests.infra.stack.stack_sites import bring_up, site_in, small_service, stack_folder
from tests.processes import command_line, runs
from tests.waiting import FOR_EVER_S, until

STARTER = """
import sys
from pathlib import Path
from tests.infra.stack.stack_sites import bring_up, site_in, small_service
site = site_in(Path(sys.argv[1]))
bring_up(site, small_service(site, "small", "parent"))
print("up", flush=True)
sys.stdin.read()
"""
pytestmark = pytest.mark.thorough
SLEEPER = [sys.executable, "-c", f"import time; time.sleep({FOR_EVER_S})"]


@pytest.fixture
def site() -> Iterator[Site]:
    folder = stack_folder()
    site = site_in(folder)
    yield site
    Supervisor(site).end()
    shutil.rmtree(folder)


def pid_of(site: Site, name: str = "small") -> int:
    """Of its main process; 0 where none runs."""
    return Supervisor(site).server(name).pid


def supervisord_of(site: Site) -> int:
    return int((site.settings.folder / "run/supervisord.pid").read_text())


def child_of(site: Site, name: str = "small") -> int:
    """The last that it has started."""
    return int(log_path(site, name).read_text().split("child ")[-1].split()[0])


def test_it_starts_once_and_another_command_finds_and_ends_it(site: Site):
    service = small_service(site)
    bring_up(site, service)
    first = pid_of(site)
    bring_up(site, service)
    assert pid_of(site) == first
    assert Supervisor(site).kept() >= {"small"}
    assert Servers(site, [service], Supervisor(site)).states()[0].healthy
    assert listening(first) == {("127.0.0.1", service.ports[0].number)}
    Supervisor(site).end()
    Supervisor(site).end()
    assert not runs(first)
    assert Supervisor(site).servers() == {}
    assert not list((site.settings.folder / "run").iterdir())


def test_one_that_is_killed_is_started_again(site: Site):
    service = small_service(site)
    servers = bring_up(site, service)
    first = pid_of(site)
    os.kill(first, signal.SIGKILL)
    until(lambda: pid_of(site) not in (0, first))
    servers.bring_up()
    assert Servers(site, [service], Supervisor(site)).states()[0].healthy


@pytest.mark.parametrize("counts_as", ["STARTING", "RUNNING"])
def test_what_one_that_is_killed_leaves_is_ended(site: Site, counts_as: str):
    """One that ends in its first second is another event for supervisord."""
    bring_up(site, small_service(site, "small", "parent"))
    if counts_as == "RUNNING":
        until(lambda: Supervisor(site).server("small").state == counts_as)
    first, child = pid_of(site), child_of(site)
    os.kill(first, signal.SIGKILL)
    until(lambda: not runs(child))
    until(lambda: pid_of(site) not in (0, first))


def test_other_settings_are_another_start_for_that_server_alone(site: Site):
    changed, same, former = (small_service(site, name) for name in ("changed", "same", "former"))
    bring_up(site, changed, same, former)
    pids = {name: pid_of(site, name) for name in ("changed", "same", "former")}
    assert Supervisor(site).ports() == {("127.0.0.1", one.ports[0].number) for one in (changed, same, former)}
    bring_up(site, replace(changed, environment={"LEVEL": "2"}), same)
    assert pid_of(site, "same") == pids["same"]
    assert pid_of(site, "changed") not in (0, pids["changed"])
    assert not runs(pids["changed"])
    assert not runs(pids["former"])


@pytest.mark.parametrize("words", [["parent"], ["deaf"], ["parent", "stray"]])
def test_children_and_those_who_do_not_listen_end_too(site: Site, words: list[str]):
    bring_up(site, small_service(site, "small", *words))
    pids = [pid_of(site), *([child_of(site)] if "parent" in words else []), supervisord_of(site)]
    Supervisor(site).end()
    assert not any(runs(pid) for pid in pids)


@pytest.mark.parametrize("then", ["start", "end"])
def test_what_a_killed_supervisord_leaves_is_ended_before_anything_starts(site: Site, then: str):
    service = small_service(site, "small", "parent")
    bring_up(site, service)
    left = [pid_of(site), child_of(site)]
    os.kill(supervisord_of(site), signal.SIGKILL)
    until(lambda: not runs(supervisord_of(site)))
    assert all(runs(pid) for pid in left)
    assert Servers(site, [service], Supervisor(site)).states()[0].health == "not running"
    if then == "start":
        bring_up(site, service)  # on the same port
        assert runs(pid_of(site))
    else:
        Supervisor(site).end()
    assert not any(runs(pid) for pid in left)


def test_what_a_killed_start_left_is_ended(site: Site):
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, str(site.settings.folder)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert starter.stdout is not None
    assert starter.stdout.readline() == b"up\n"
    starter.kill()
    starter.communicate()
    left = [pid_of(site), child_of(site)]
    assert all(runs(pid) for pid in left)
    Supervisor(site).end()
    assert not any(runs(pid) for pid in left)


def test_no_stranger_is_ever_hit(site: Site):
    """Neither one that has got the number of a supervisord of before, nor one of another stack."""
    marks = ["", "f" * 48 + ".small"]
    strangers = [subprocess.Popen(SLEEPER, env={**os.environ, MARK: mark}) for mark in marks]
    try:
        for stranger in strangers:
            (site.settings.folder / "run/supervisord.pid").write_text(f"{stranger.pid}\n")
            Supervisor(site).end()
        assert [stranger.poll() for stranger in strangers] == [None, None]
    finally:
        for stranger in strangers:
            stranger.kill()
            stranger.wait()


def test_two_stacks_on_one_machine_do_not_meet(site: Site, tmp_path: Path):
    other = site_in(tmp_path / "a-folder-that-is-too-long-for-a-socket-by-itself" / "stack")
    try:
        for each in (site, other):
            bring_up(each, small_service(each))
        kept = pid_of(other)
        Supervisor(site).end()
        assert (pid_of(site), pid_of(other)) == (0, kept)
    finally:
        Supervisor(other).end()
    assert not runs(kept)


def test_servers_start_in_order_and_what_needs_a_broken_one_does_not(site: Site):
    heard: list[str] = []
    broken = small_service(site, "broken", command=[sys.executable, "-c", "raise SystemExit('no disk')"])
    needy = small_service(site, "needy", after=["broken"], prepare=lambda: heard.append("needy"))
    whole = small_service(site, "whole", furnish=lambda: heard.append("furnished"))
    late = small_service(site, "late", after=["whole"], prepare=lambda: heard.append("late"))
    with pytest.raises(StackError, match=r"broken ended before(?s:.)*no disk(?s:.)*needy: not started"):
        bring_up(site, broken, needy, whole, late)
    assert heard == ["furnished", "late"]
    assert Supervisor(site).kept() & {"broken", "needy", "whole", "late"} == {"whole", "late"}


@pytest.mark.parametrize("fails", [2, 99])
def test_a_server_that_ends_before_it_is_healthy_has_its_tries(site: Site, tmp_path: Path, fails: int):
    begun = tmp_path / "begun"
    small = small_service(site)
    shell = f'printf x >>{begun}; [ $(wc -c <{begun}) -gt {fails} ] || {{ echo not yet; exit 1; }}; exec "$@"'
    service = replace(small, command=["bash", "-c", shell, "-", *small.command], tries=3)
    if fails == 2:
        bring_up(site, service)
        assert pid_of(site)
    else:
        with pytest.raises(StackError, match=r"small ended before it was healthy(?s:.)*not yet"):
            bring_up(site, service)
        assert Supervisor(site).server("small").state == "STOPPED"
    assert begun.stat().st_size >= 3


def test_the_answer_of_a_stranger_on_its_port_does_not_make_it_healthy(site: Site):
    first = small_service(site, "first")
    second = small_service(site, "second", command=first.command, ports=first.ports, after=["first"])
    with pytest.raises(StackError, match="second ended before it was healthy"):
        bring_up(site, first, second)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_in_a_container_all_end_with_supervisord_or_with_a_signal(site: Site, end: signal.Signals):
    names = ("first", "second")
    bring_up(site, *(small_service(site, name) for name in names))
    pids = [pid_of(site, name) for name in names]
    watched = replace(site, servers=frozenset(names))
    if end == signal.SIGKILL:
        os.kill(supervisord_of(site), end)
        with pytest.raises(StackError, match="first, second ended for good"):
            watch(Supervisor(site), watched)
    else:
        before = signal.getsignal(end)
        threading.Thread(
            target=lambda: (until(lambda: signal.getsignal(end) != before), os.kill(os.getpid(), end))
        ).start()
        watch(Supervisor(site), watched)
    assert not any(runs(pid) for pid in pids)


def test_a_server_gets_exactly_its_words_and_variables_and_none_that_are_hidden(
    site: Site, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PREFECT_API_URL", "http://elsewhere/api")
    values = {"RATE": "100%", "NAME": "%(here)s %%", "JSON": '{"a": 1, "b": [2]}', "LIST": "a,b=c", "HASH": "a#b;c'd"}
    words = ["%d", 'a "quoted" word', "it's", "", "two\\words", json.dumps(values)]
    service = small_service(site, environment=values)
    bring_up(site, replace(service, command=[*service.command, *words]))
    process = psutil.Process(pid_of(site))
    seen = process.environ()
    assert command_line(process)[-len(words) :] == words
    assert {name: seen[name] for name in values} == values
    assert "PREFECT_API_URL" not in seen


@pytest.mark.parametrize("value", ["a ;b", "a\t# b", "a\nb", "\"'"])
def test_what_the_configuration_cannot_hold_is_refused(site: Site, value: str):
    with pytest.raises(StackError, match=r"supervisord cannot read .*(environment of \[program:small\]|\['NAME'\])"):
        Supervisor(site).configure([small_service(site, environment={"NAME": value})])


def test_only_its_owner_controls_it_or_reads_its_passwords(site: Site):
    bring_up(site, small_service(site, environment={"PASSWORD": "a-secret-of-16-characters"}))
    assert stat.S_IMODE(configuration_path(site).stat().st_mode) == 0o600
    socket = socket_path(site)
    assert socket.parent == site.settings.folder / "run"
    assert stat.S_IMODE(socket.stat().st_mode) == stat.S_IMODE(socket.parent.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in log_path(site, "small").parent.iterdir()} == {0o600}
    supervisord = psutil.Process(supervisord_of(site))
    assert supervisord.net_connections(kind="inet") == []
    shown = str([command_line(one) for one in (supervisord, *supervisord.children(recursive=True))])
    assert "a-secret" not in shown + log_path(site, "supervisord").read_text()


def test_supervisorctl_shows_the_servers(site: Site):
    bring_up(site, small_service(site))
    command = [sys.executable, "-m", "supervisor.supervisorctl", "-c", str(configuration_path(site)), "pid", "small"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) == pid_of(site)
