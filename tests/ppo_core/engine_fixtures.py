"""A pytest plugin: engines that test modules share, for importing vLLM takes longer than their jobs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ppo_core.engine_jobs import Bench, open_engine


@pytest.fixture(scope="session")
def rollout(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    bench = open_engine("rollout", tmp_path_factory.mktemp("rollout"))
    yield bench
    bench.engine.close()


@pytest.fixture(scope="session")
def scoring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    bench = open_engine("scoring", tmp_path_factory.mktemp("scoring"))
    yield bench
    bench.engine.close()
