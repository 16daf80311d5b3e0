"""What the owner of a machine permits engines to do there, and passes on to them: never given by a spec."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass

OWN_FOLDER = "."


@dataclass(frozen=True)
class Permissions:
    """`plugins`: folders (with a slash; `.` is the spec's own) and packages from which user code may come.

    `trust_remote_code`: code that lies in a model's or a tokenizer's folder may run. `run_generated_code`: code that
    models write may run, for the reward unit_tests. `reward_urls`: servers that the rewards http and judge may send
    samples to, as http://HOST:PORT; empty: any.
    """

    plugins: tuple[str, ...] = (OWN_FOLDER,)
    trust_remote_code: bool = False
    run_generated_code: bool = False
    reward_urls: tuple[str, ...] = ()


def permissions_of(arguments: Sequence[str]) -> Permissions:
    """From `--plugins=PLACE` and `--reward-url=URL`, once for each, `--trust-remote-code`, `--run-generated-code`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--plugins", action="append")
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument("--run-generated-code", action="store_true")
    parser.add_argument("--reward-url", action="append", default=[])
    given = parser.parse_args(list(arguments))
    plugins, servers = tuple(given.plugins or (OWN_FOLDER,)), tuple(given.reward_url)
    return Permissions(plugins, given.trust_remote_code, given.run_generated_code, servers)


def passed_on(name: str) -> str | None:
    """A variable of this engine's environment, which is built by name: PPOFLOW_REWARD_ENV names what rewards get."""
    return os.environ.get(name)
