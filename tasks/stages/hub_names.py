"""What a spec names of the Hugging Face hub: which commit each name is in a run, and where it lies once it is here."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

from infra.artifacts import ArtifactRef, ArtifactStore
from infra.artifacts.fingerprint import file_digest, file_digests
from infra.engines.protocol import EngineInput
from infra.hub.client import Hub, Report
from infra.hub.sources import DATA, HubError, HubSource, Kind, chosen, place_of
from infra.settings import Settings
from ppo_core.records import InputError, content_digest
from ppo_core.spec.flow_spec import FlowSpec
from ppo_core.spec.hub import HubCommit, at_revision, hub_name, is_commit, is_hub_name
from tasks.stages.jobs import UploadedSource
from tasks.stages.references import DownloadRef

DOWNLOAD = "download"
"""The kind of artifact."""
Spec = TypeVar("Spec", bound=FlowSpec)


def hub_sources(spec: FlowSpec) -> dict[str, HubSource]:
    """What each name of the hub in a spec means; its revision is the run's commit, as far as that is known.

    Raises InputError for one that is both a model's and data's.
    """
    model, commits = spec.model, {one.name: one.commit for one in spec.hub_commits}
    named: list[tuple[Kind, str | None]] = [("tokenizer", model.tokenizer), ("model", model.path)]
    named += [("model", name) for name in spec.model_folders]
    named += [("dataset", name) for name in spec.data]
    found: dict[str, HubSource] = {}
    for kind, name in named:
        if name is None or not is_hub_name(name):
            continue
        if name in found and "dataset" in (kind, found[name].kind) and kind != found[name].kind:
            raise InputError(
                f"{name} is used as data and as a model, but the Hub keeps the two apart: correct one of them"
            )
        repository, revision, path = hub_name(name)
        code = kind != "dataset" and Settings().trust_remote_code
        found[name] = HubSource(name, repository, kind, commits.get(name, revision), path, code)
    return found


def with_commits(spec: Spec, known: Iterable[HubCommit] = ()) -> Spec:
    """The spec with a commit for each name of the hub in it: the one that is `known` of the run, else today's.

    Only for those the hub is asked. Raises HubError or HubUnavailable.
    """
    before = {one.name: one for one in (*spec.hub_commits, *known)}
    sources = hub_sources(spec.model_copy(update={"hub_commits": tuple(before.values())}))
    asked: dict[tuple[str, str, str | None], str] = {}  # two names of one branch are of one commit
    for one in sources.values():
        place = one.repository_type, one.repository, one.revision
        if place not in asked:
            asked[place] = one.revision if is_commit(one.revision) else _commit_of_today(one)
    commits = tuple(
        HubCommit(name=name, commit=asked[one.repository_type, one.repository, one.revision])
        for name, one in sources.items()
    )
    return spec if commits == spec.hub_commits else spec.model_copy(update={"hub_commits": commits})


def _commit_of_today(source: HubSource) -> str:
    settings = Settings()
    if settings.hf_offline:
        raise HubError(
            f"the commit of {source.name} must be looked up, and HF_HUB_OFFLINE forbids it: write the one that "
            f"`ppoflow download` printed, as in {at_revision(source.name, 'COMMIT')}, unset HF_HUB_OFFLINE, or give a "
            "local folder or file"
        )
    return Hub(settings).look_up(source)[0]


def download_key(source: HubSource) -> str:
    """The key of a download in a store: of a commit, whose files never change, and of what of it is taken."""
    if not is_commit(source.revision):
        raise InputError(f"{source.name} stands for no commit yet: start the run with ppoflow train")
    wanted = [source.repository_type, source.repository, source.revision, source.kind, source.path, source.code]
    return content_digest(wanted)


def bring(store: ArtifactStore, source: HubSource, folder: Path, report: Report) -> ArtifactRef:
    """Download what a name means, by way of a `folder` in which a download that was broken off goes on.

    What came stays there until the store has it.
    """
    hub = Hub(Settings())
    files = chosen(source, hub.look_up(source)[1])
    hub.download(source, files, folder, report)
    made = store.scratch()
    try:
        for name in files:
            place = made / DATA / name if source.kind == "dataset" else made / name
            place.parent.mkdir(parents=True, exist_ok=True)
            _link(folder / name, place)
        ref = store.put(made, DOWNLOAD, download_key(source))
    finally:
        shutil.rmtree(made, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
    return ref


def _link(file: Path, place: Path) -> None:
    """Have a file in another place as well; on another disk that is a copy."""
    try:
        os.link(file, place)
    except OSError:
        shutil.copyfile(file, place)


class Downloads:
    """Where the names of a spec lie on this machine, once their downloads are in the store."""

    def __init__(self, store: ArtifactStore) -> None:
        self._store = store
        self._found: dict[str, tuple[ArtifactRef, EngineInput]] = {}

    def of(self, source: HubSource) -> EngineInput | None:
        """The folder or file, with the digest that the same would have in a folder of the user's; None: not there."""
        key = download_key(source)
        if key not in self._found:
            ref = self._store.find(DOWNLOAD, key)
            if ref is None:
                return None
            self._found[key] = ref, self._described(source, ref)
        ref, given = self._found[key]
        self._store.fetch(ref)
        return given

    def refs(self, spec: FlowSpec) -> tuple[DownloadRef, ...]:
        """What a record says of a spec's names, as far as they are in the store."""
        sources = hub_sources(spec).values()
        return tuple(self.named(self._found[download_key(one)][0], one) for one in sources if self.of(one))

    def named(self, ref: ArtifactRef, source: HubSource) -> DownloadRef:
        """A download with where it is from."""
        size = sum(entry.size for entry in self._store.manifest(ref).files.values())
        facts = {"name": source.name, "repository": source.repository, "commit": source.revision, "size": size}
        return DownloadRef.of(ref, facts)

    def uploaded(self, given: EngineInput) -> UploadedSource | None:
        """A folder that another machine finds in the store as it is."""
        ref = next((ref for ref, one in self._found.values() if one == given), None)
        return UploadedSource(ref, given.digest) if ref and self._store.fetch(ref) == given.path else None

    def _described(self, source: HubSource, ref: ArtifactRef) -> EngineInput:
        place = place_of(self._store.fetch(ref), source.kind)
        if source.kind != "dataset":
            files = self._store.manifest(ref).files
            return EngineInput(place, content_digest({name: entry.sha256 for name, entry in files.items()}))
        return EngineInput(place, file_digest(place) if place.is_file() else content_digest(file_digests(place)))
