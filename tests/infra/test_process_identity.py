"""A process is told apart from every other one, and known to be dead only where that can be known."""

from __future__ import annotations

import os
import signal

import pytest

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
    rebooted = here.model_copy(update={"boot": "0"})
    assert is_alive(rebooted) is False
    assert is_alive(rebooted.model_copy(update={"host": "another"})) is None
    assert is_alive(rebooted.model_copy(update={"namespace": container})) is None
    assert is_alive(here.model_copy(update={"namespace": container})) is None
    assert is_alive(here.model_copy(update={"host": "renamed"})) is True


def test_a_token_names_a_process():
    here = this_process()
    for identity in (here, here.model_copy(update={"host": "a_b-c.d_1"})):
        assert identity_of_token(identity.token) == identity
        assert "/" not in identity.token
        assert len(f".new-{identity.token}-{'0' * 32}") < 200


@pytest.mark.parametrize(
    "text", ["", "abc", "1_2_3_b", "1_2_3_xyz_host", "0_2_3_b_host", "1_2_3_b_a/b", f"1_2_3_b_{'h' * 65}"]
)
def test_what_is_no_token(text: str):
    assert identity_of_token(text) is None
