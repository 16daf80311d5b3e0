"""What tests of several folders share."""

from __future__ import annotations

import gc
import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from infra.empty_databases import begin
from tests.infra.storage.s3.fault_proxy import FaultProxy
from tests.infra.storage.s3.s3_server import FOREIGN, S3Server
from tests.ports import free_port
from tests.purity import is_pure
from tests.shared_engine import session_engine, shared_engine
from tests.waiting import LONG_S

if TYPE_CHECKING:
    from prefect import Task

__all__ = ["session_engine", "shared_engine"]

TESTS = Path(__file__).parent
# What one session fixture makes for several files is made once where one worker has them all.
TOGETHER = {
    "programs": [f"ppo_core/training/test_{name}" for name in ("checkpoint", "update", "replay", "skipped_steps")]
    + [f"ppo_core/training/test_{name}" for name in ("bad_checkpoints", "supervised", "without_critic", "reward_model")]
    + [
        f"ppo_core/training/test_{name}"
        for name in ("dpo_training", "averages", "lora", "ppo_shared", "vapo", "threads", "held_memory", "carry")
    ]
    + ["ppo_core/scoring/test_shared_classifier", "ppo_core/engines/test_devices"],
    "engines": [f"ppo_core/engines/test_{name}" for name in ("rollout_engine", "rollout_models", "prepared_engine")]
    + [
        f"ppo_core/engines/test_{name}"
        for name in ("rollout_dtype", "finished_responses", "own_temperatures", "scoring_engine")
    ]
    + ["ppo_core/scoring/test_scoring_facts"],
    "smoke": ["e2e/test_smoke", "e2e/test_pages", "e2e/test_hand_over"],
}
SHARED = {"programs": "programs", "rollout": "engines"}
"""Session fixtures that take longest to make, for they start real engines, and the group of all tests that use one."""
# They take longest: begun last, one of them would run on alone. Of the three that begin (four in CI), only one should
# need the smoke run.
FIRST = (
    *("e2e/test_chaos", "e2e/test_rlhf", "flows/test_runs_on_s3", "e2e/test_ray", "engines", "programs"),
    *("e2e/test_dpo", "e2e/test_s3_run", "e2e/test_hub", "e2e/test_sockets"),
    *("e2e/test_reward_model", "smoke", "flows/test_worker"),
    *("infra/stack/test_stack_servers", "ppo_core/engines/test_killed_engine", "ppo_core/scoring/test_ranked_model"),
    *("flows/test_prefect_outage", "infra/stack/test_stack_processes", "flows/test_rlhf", "experience/test_mistakes"),
    *("infra/storage/test_power_loss", "infra/storage/test_store_machine", "infra/runs/test_crash_points"),
)


# What Prefect's server does besides answering calls takes half of its time; no test on toy engines asks for it.
UNWATCHED = (
    *("TASK_RUN_RECORDER", "EVENT_PERSISTER", "TRIGGERS", "SCHEDULER", "LATE_RUNS", "FOREMAN", "PAUSE_EXPIRATIONS"),
    *("CANCELLATION_CLEANUP", "REPOSSESSOR", "CLEANUP_RECONCILER"),
)


class Groups(LoadScopeScheduling):
    """Each file is a group that one worker runs; where files share what is expensive, all of them are one."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid.partition("::")[0].removeprefix("tests/").removesuffix(".py"))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Groups:
    """Not its own groups by mark, which pytest 9.2 no longer lets it write into the names of tests."""
    return Groups(config, log)


def pytest_configure(config: pytest.Config) -> None:
    """What is started in the background may ignore Ctrl-C, and would hand that on to what tests interrupt.

    Tests run side by side, where threads that spin cost each other their cores. What they import stays, and nobody
    looks for garbage among it, nor do the searches with which pytest ends. After them it is unfrozen, or libraries
    would complain of what they take for leaks.
    """
    config.add_cleanup(gc.unfreeze)
    gc.disable()
    gc.set_threshold(50_000, 20, 50)
    os.environ.setdefault("PPOFLOW_ENGINE_WAIT_POLICY", "passive")
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Those of one group are neighbours, in the order that it gives its files; the longest groups begin.

    What uses real engines is thorough. Tests on a GPU are left out where torch has none, unless they are asked for.
    """
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and "gpu" not in config.option.markexpr and not gpu_is_there():
        config.hook.pytest_deselected(items=on_gpu)
        items[:] = [item for item in items if item not in on_gpu]
    for item in items:
        if isinstance(item, pytest.Function) and SHARED.keys() & set(item.fixturenames):
            item.add_marker("thorough")
    if "check" in config.option.markexpr:  # to read all sources takes seconds
        for item in items:
            if item.path.parent == TESTS / "architecture" or is_pure(item):
                item.add_marker("check")

    def place(item: pytest.Item) -> tuple[int, str, int]:
        file = str(item.path.relative_to(TESTS).with_suffix(""))
        group = group_of(file)
        rank = FIRST.index(group) if group in FIRST else len(FIRST)
        return (rank, group, TOGETHER[group].index(file)) if group in TOGETHER else (rank, "", 0)

    items.sort(key=place)


def pytest_collection_finish() -> None:
    """All is imported; see `pytest_configure`."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Whoever needs the programs of tests/ppo_core or a warm vLLM is in the group that shares it, or two workers would
    start it. To fail at the collection would be seen by nobody: it happens in xdist's workers."""
    file = str(item.path.relative_to(TESTS).with_suffix(""))
    for fixture, group in SHARED.items() if isinstance(item, pytest.Function) else ():
        if fixture in item.fixturenames and group_of(file) != group:
            pytest.fail(f"add {file} to the group `{group}` of TOGETHER in tests/conftest.py", pytrace=False)


def gpu_is_there() -> bool:
    """Whether torch can compute on one; tests that ask have imported it."""
    import torch

    return torch.cuda.is_available()


def group_of(file: str) -> str:
    """The group of a file of tests."""
    return next((group for group, files in TOGETHER.items() if file in files), file)


@pytest.fixture(scope="session")
def prefect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A real Prefect server, so that tasks can be called as they are; it takes ten seconds to start, once."""
    from tasks.prefect.environment import prepare

    prepare()
    from prefect.context import SyncClientContext
    from prefect.filesystems import LocalFileSystem
    from prefect.settings import PREFECT_DEFAULT_RESULT_STORAGE_BLOCK, PREFECT_LOGGING_TO_API_ENABLED
    from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY as HEARTBEAT
    from prefect.settings import temporary_settings as settings
    from prefect.testing.utilities import prefect_test_harness

    from tasks.stages.stage import Stage

    with pytest.MonkeyPatch.context() as patch:
        # The port that Prefect takes may be somebody else's when its server binds it, seconds later.
        patch.setattr("prefect.testing.utilities._find_available_port", free_port)
        patch.setattr("prefect.testing.utilities.mkdtemp", folder_with_tables)
        # Events too are for those services, and take a fifth of the time of a run on toy engines.
        patch.setattr("prefect.events.utilities.should_emit_events", lambda: False)
        patch.setattr(Stage, "retry_delay_seconds", property(soon, vars_only), raising=False)
        quiet = settings({PREFECT_LOGGING_TO_API_ENABLED: False, HEARTBEAT: None})
        with quiet, ExitStack() as server:
            with pytest.MonkeyPatch.context() as environment:  # of this server alone
                for name in UNWATCHED:
                    environment.setenv(f"PREFECT_SERVER_SERVICES_{name}_ENABLED", "false")
                server.enter_context(prefect_test_harness(server_startup_timeout=int(LONG_S)))
            LocalFileSystem(basepath=str(tmp_path_factory.mktemp("results"))).save("results")
            storage = {PREFECT_DEFAULT_RESULT_STORAGE_BLOCK: "local-file-system/results"}
            # Outside of a flow each task would make a client of its own, and ask where results are stored: 55 ms.
            with settings(storage), SyncClientContext.get_or_create():
                yield


def folder_with_tables() -> str:
    """A folder for Prefect's server of tests, with an empty database where installation made one."""
    folder = tempfile.mkdtemp()
    begin("prefect", Path(folder) / "prefect-test.db")
    return folder


def soon(stage: Task[..., Any]) -> list[float]:
    """After what pauses a stage is tried again: as often as without tests, but a toy engine is there at once."""
    return [0.05 for _ in vars(stage)["retry_delay_seconds"]]


def vars_only(stage: Task[..., Any], delays: list[float]) -> None:
    """Keep a stage's own delays where it has them anyway."""
    vars(stage)["retry_delay_seconds"] = delays


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """An S3 server in a child process; it takes two seconds to start, once."""
    server = S3Server()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def proxy(s3_server: S3Server) -> Iterator[FaultProxy]:
    """In front of that server."""
    proxy = FaultProxy(s3_server.port)
    yield proxy
    proxy.close()


@pytest.fixture
def bucket(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """A new bucket, which boto3 finds by the environment of this test."""
    for name in FOREIGN:
        monkeypatch.delenv(name, raising=False)
    for name, value in s3_server.environment().items():
        monkeypatch.setenv(name, value)
    return s3_server.make_bucket()
