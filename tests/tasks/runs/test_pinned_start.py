"""What a collector may not take: the policy that `ppoflow rlhf` begins with; and what it does first."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.artifacts import ArtifactStore, open_store
from infra.artifacts.export import export_part
from infra.backend import open_collector
from infra.settings import Settings
from infra.storage.objects import StoreRefused
from tasks.preferences.given import pin_start
from tasks.runs.retention import find_garbage
from tasks.stages.holding import alone
from tests.infra.storage.s3.fault_proxy import FaultProxy
from tests.infra.storage.s3.s3_server import S3Server

RUN = "aligned"


@pytest.fixture
def store(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ArtifactStore:
    """That of the settings, on S3."""
    monkeypatch.setenv("PPOFLOW_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PPOFLOW_STORE", f"s3://{bucket}/store")
    return open_store(Settings().store_root)


def test_what_is_pinned_after_the_collector_has_read_the_pins_stays(store: ArtifactStore) -> None:
    work = store.scratch()
    (work / "policy").mkdir()
    (work / "policy" / "weights").write_text("weights")
    ref = store.put(work, "policy", "a" * 64)
    export_part(store.fetch(ref), store.manifest(ref), ref, "policy", Settings().start_policy_folder(RUN))
    with alone("rlhf", RUN) as lease:

        def no_record_needs_it() -> set[tuple[str, str]]:
            pin_start(lease, RUN)
            return set()

        assert open_collector(store.root).collect([(ref.kind, ref.key)], no_record_needs_it) == []
        assert open_collector(store.root).pinned() == {(ref.kind, ref.key)}
    assert open_store(store.root).find(ref.kind, ref.key) == ref


def test_who_may_not_write_is_refused_before_the_whole_store_is_read(
    store: ArtifactStore, s3_server: S3Server, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.uri)
    proxy.refuse(403, "AccessDenied", lambda request: request.first_line.startswith("PUT"))
    with pytest.raises(StoreRefused, match="AccessDenied"):
        find_garbage()
    probes = [line for line in proxy.requests if line.startswith("GET") and "max-keys=1&" in line]
    assert [line for line in proxy.requests if line.startswith("GET")] == probes
