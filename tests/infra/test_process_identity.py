"""A process is told apart from every other one, and known to be dead only where that can be known."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from infra import process_identity
from infra.process_identity import FIRST_NAMESPACE, ProcessIdentity, identity_of_token, is_alive, this_process
from tests.infra.programs import Program

SAY_WHO = """
from infra.process_identity import this_process
print(this_process().model_dump_json(), flush=True)
input()
"""


def test_a_process_lives_until_it_is_dead():
    with Program(SAY_WHO) as program:
        identity = ProcessIdentity.model_validate_json("".join(program.hear()))
        assert identity.pid == program.process.pid
        assert is_alive(identity) is True
        os.kill(identity.pid, signal.SIGSTOP)
        os.waitpid(identity.pid, os.WUNTRACED)
        assert is_alive(identity) is True
        program.process.kill()
        os.waitid(os.P_PID, identity.pid, os.WEXITED | os.WNOWAIT)
        assert is_alive(identity) is False, "a zombie does not live"
    assert is_alive(identity) is False


def test_another_process_with_the_same_pid_is_another():
    here = this_process()
    assert is_alive(here) is True
    assert is_alive(here.model_copy(update={"started": here.started - 1})) is False


def test_elsewhere_nobody_can_tell():
    here = this_process()
    container = "4026532999" if here.namespace == FIRST_NAMESPACE else FIRST_NAMESPACE
    assert is_alive(here.model_copy(update={"namespace": container})) is None
    assert is_alive(here.model_copy(update={"host": "renamed"})) is True


@pytest.fixture
def machine_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file with the machine's id; where a container runs the tests, it counts as the machine."""
    monkeypatch.setattr(process_identity, "FIRST_NAMESPACE", this_process().namespace)
    monkeypatch.setattr(process_identity, "MACHINE_ID", tmp_path / "machine-id")
    process_identity.MACHINE_ID.write_text(f"{7:032x}\n")
    return process_identity.MACHINE_ID


def test_a_machine_that_was_started_again_is_known_by_its_id(machine_id: Path):
    here = this_process()
    assert len(here.machine) == 16
    before = here.model_copy(update={"boot": "0"})
    assert is_alive(before) is False
    assert is_alive(before.model_copy(update={"host": "another"})) is None
    for machine in ("", f"{8:016x}"):
        assert is_alive(before.model_copy(update={"machine": machine})) is None, "perhaps one of the same name"
    assert is_alive(here.model_copy(update={"machine": ""})) is True, "what an older version wrote"


@pytest.mark.parametrize("content", [None, "", "uninitialized\n"])
def test_without_a_machine_id_a_start_is_not_known_as_another(machine_id: Path, content: str | None):
    machine_id.unlink() if content is None else machine_id.write_text(content)
    here = this_process()
    assert here.machine == ""
    assert is_alive(here) is True
    assert is_alive(here.model_copy(update={"boot": "0"})) is None


def test_in_a_container_the_machine_id_counts_for_nothing(machine_id: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(process_identity, "FIRST_NAMESPACE", "1")
    assert this_process().machine == ""
    assert is_alive(this_process().model_copy(update={"boot": "0"})) is None


def test_a_token_names_a_process():
    here = this_process()
    elsewhere = here.model_copy(update={"host": "a_b-c.d_1", "machine": "e" * 16})
    for identity in (here, elsewhere, elsewhere.model_copy(update={"machine": ""})):
        assert identity_of_token(identity.token) == identity
        assert "/" not in identity.token
        assert len(f".new-{identity.token}-{'0' * 32}") < 200


@pytest.mark.parametrize(
    "text", ["", "abc", "1_2_3_b", "1_2_3_xyz_host", "0_2_3_b_host", "1_2_3_b_a/b", f"1_2_3_b_{'h' * 65}"]
)
def test_what_is_no_token(text: str):
    assert identity_of_token(text) is None
