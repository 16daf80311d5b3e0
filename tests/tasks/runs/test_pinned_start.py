"""What a collector may not take: the policy that `ppoflow rlhf` begins with; and what it does first."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from infra.artifacts import open_store
from infra.artifacts.export import export_part
from infra.backend import open_collector
from infra.settings import Settings
from infra.storage.objects import StoreRefused
from tasks.preferences.given import pin_start
from tasks.runs.retention import find_garbage

RUN = "aligned"


def test_what_is_pinned_after_the_collector_has_read_the_pins_stays(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = f"s3://{bucket}/store"
    monkeypatch.setenv("PPOFLOW_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PPOFLOW_STORE", root)
    store, pinned = open_store(root), list[tuple[str, str]]()
    work = store.scratch()
    (work / "policy").mkdir()
    (work / "policy" / "weights").write_text("weights")
    ref = store.put(work, "policy", "a" * 64)
    export_part(store.fetch(ref), store.manifest(ref), ref, "policy", Settings().start_policy_folder(RUN))
    lease = cast(Any, SimpleNamespace(pin=lambda kind, key: pinned.append((kind, key))))

    def no_record_needs_it() -> set[tuple[str, str]]:
        pin_start(lease, RUN)
        return set()

    assert open_collector(root).collect([(ref.kind, ref.key)], no_record_needs_it) == []
    assert pinned == [(ref.kind, ref.key)]
    assert open_store(root).find(ref.kind, ref.key) == ref


def test_who_may_not_write_is_refused_before_the_whole_store_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PPOFLOW_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("PPOFLOW_STORE", raising=False)
    collector = "infra.gc.local_collector.LocalCollector"

    def refused(*_: object, **__: object) -> None:
        raise StoreRefused("no leave to write")

    monkeypatch.setattr(f"{collector}.orphans", refused)
    monkeypatch.setattr(f"{collector}.artifacts", lambda _: pytest.fail("read before"))
    with pytest.raises(StoreRefused, match="no leave to write"):
        find_garbage()
