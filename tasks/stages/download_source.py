"""What a spec names of the hub comes into the store, once: every machine that reads the store then has it.

    hub ─► the run's own folder, where a download that was broken off goes on ─► store ─► engines, as a local folder

The flow's process does it: engines reach nothing outside and hold no token.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from prefect.client.schemas.objects import State

from infra.artifacts import ArtifactCorrupted, ArtifactStore, open_store
from infra.engines.protocol import EngineProgress
from infra.hub.sources import HubSource
from infra.settings import Settings
from ppo_core.spec.flow_spec import FlowSpec
from tasks.stages.context import RunContext
from tasks.stages.find_verified import find_verified
from tasks.stages.hub_names import DOWNLOAD, Downloads, bring, download_key, hub_sources, with_commits
from tasks.stages.references import DownloadRef
from tasks.stages.stage import completed, stage

MIB = 2**20
SAY_EVERY_S = 5.0


def download_sources(context: RunContext) -> list[DownloadRef]:
    """Everything that the context's spec names of the hub."""
    return [download_source(context, source) for source in hub_sources(context.spec).values()]


def download_ahead(spec: FlowSpec, say: Callable[[str], None]) -> bool:
    """Bring what a spec names of the hub, as it is today, into the store without a run; nothing keeps it there. Whether
    it names anything."""
    settings = Settings()
    store = open_store(settings.store_root)
    downloads, said_at = Downloads(store), 0.0

    def report(done: int, size: int) -> None:
        nonlocal said_at
        if time.monotonic() - said_at > SAY_EVERY_S:
            said_at = time.monotonic()
            say(f"  … {done / MIB:.0f} of {size / MIB:.0f} MiB")

    spec = with_commits(spec)
    for source in hub_sources(spec).values():
        if not _is_there(store, downloads, source, say):
            bring(store, source, settings.home / "hub" / download_key(source)[:16], report)
    for ref in downloads.refs(spec):
        say(ref.in_words())
    return bool(hub_sources(spec))


def _is_there(store: ArtifactStore, downloads: Downloads, source: HubSource, say: Callable[[str], None]) -> bool:
    """Whether the store has it, whole; one that is damaged is set aside."""
    try:
        return downloads.of(source) is not None
    except ArtifactCorrupted as error:
        say(f"{error}; set aside at {store.set_aside(DOWNLOAD, download_key(source))}, downloading it again")
        return False


@stage("download_source")
def download_source(context: RunContext, source: HubSource) -> State[Any] | DownloadRef:
    """One name, at the commit that it is in this run; tried again only where the hub did not answer as it should."""
    started, key = time.perf_counter(), download_key(source)
    context.pin(DOWNLOAD, key)
    found = find_verified(context, DOWNLOAD, key)
    if found is not None:
        ref = context.downloads.named(found, source)
        return completed(ref, f"{ref.in_words()}; it was in the store", "Cached")

    def report(done: int, size: int) -> None:
        note = f"MiB of {source.name}"
        context.on_progress(EngineProgress("hub", "download_source", done // MIB, max(1, size // MIB), note))

    folder = context.settings.run_folder(context.run) / "hub" / key[:16]
    ref = context.downloads.named(bring(context.store, source, folder, report), source)
    return completed(ref, f"{ref.in_words()}, downloaded in {time.perf_counter() - started:.1f} s")
