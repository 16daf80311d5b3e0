"""What was learned from preferences, and what was registered, each on a page that is written once: what is named there,
nobody collects."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

from pydantic import BaseModel

from infra.artifacts import ArtifactError, ArtifactRef, ArtifactStore
from infra.backend import open_log
from infra.runs.checksummed_json import RecordCorrupted, RecordError, decode, encode
from infra.settings import Settings
from ppo_core.records import content_digest
from ppo_core.spec.hub import HubCommit
from tasks.stages.holding import DPO, REWARD_MODEL, RLHF
from tasks.stages.hub_names import Spec, hub_sources, with_commits
from tasks.stages.references import StageRef

REWARD_MODELS, DPO_POLICIES, REGISTERED = "reward-models", "dpo-policies", "registered-policies"
FLOWS = {REWARD_MODELS: REWARD_MODEL, DPO_POLICIES: DPO}
"""Which flow, and which command of its name, writes the pages of a folder."""
KEEPING = (*FLOWS, REGISTERED)
"""The folders of pages that name artifacts."""
RLHF_REWARD_MODEL = f"{RLHF}-{REWARD_MODEL}"
COMMITS = tuple(f"{flow}-commits" for flow in (REWARD_MODEL, DPO, RLHF, RLHF_REWARD_MODEL))
"""The folders of pages that say which commits the names of the hub in a run stand for."""


M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True)
class Page:
    """One page of a folder, written once and with its checksum, as records are."""

    root: str
    folder: str
    name: str

    @property
    def run(self) -> str:
        """Whose it is."""
        return self.name.rsplit("-", 2 if self.folder in KEEPING else 1)[0]

    @property
    def remedy(self) -> str:
        """What helps where it is damaged."""
        if self.folder in FLOWS:
            return f"remove it, and give {self.command} again, which writes it anew"
        if self.folder == REGISTERED:
            return "put it back from a copy, or remove it: retention may then let go what that registered version is"
        return "remove it, and write commits into the spec, as in hf://OWNER/NAME@COMMIT"

    @property
    def command(self) -> str:
        """What makes again what it names, for people."""
        return training_command(self.folder, self.run)

    def create(self, key: str, entries: Iterable[BaseModel]) -> bool:
        """Write it with these entries, durable when this returns; False where it is there already."""
        document = {key: [one.model_dump() for one in entries], "nonce": uuid4().hex}
        return open_log(self.root, self.folder).create(self.name, encode(f"{self.folder}/{self.name}", document))

    def artifacts(self) -> list[ArtifactRef]:
        """What it names, and so keeps. Raises RecordError where it is damaged."""
        if self.folder in KEEPING:
            return self._entries("artifacts", ArtifactRef) or []
        self.commits()
        return []

    def commits(self) -> list[HubCommit] | None:
        """The commits that it names; None where there is no such page. Raises RecordError where it is damaged."""
        return self._entries("commits", HubCommit)

    def _entries(self, key: str, kind: type[M]) -> list[M] | None:
        place = f"page {self.name} of {self.folder}"

        def parse(content: bytes) -> list[M]:
            try:
                document = decode(place, f"{self.folder}/{self.name}", content, remedy=self.remedy)
                return [kind.model_validate(one) for one in document[key]]
            except (ValueError, TypeError, KeyError) as error:
                raise RecordCorrupted(f"{place} is damaged ({type(error).__name__}): {self.remedy}") from None

        return open_log(self.root, self.folder).read(self.name, parse, RecordCorrupted)


def training_command(pages: str, run: str) -> str:
    """What makes again what the pages of a run name, for people."""
    return f"`ppoflow {FLOWS[pages]} SPEC --run {run}`" + (" (or `ppoflow rlhf`)" if pages == REWARD_MODELS else "")


def copies_of(run: str) -> list[tuple[str, Path, str]]:
    """The copies that a run may have on this machine: what it is, the folder, and the command that makes it again."""
    settings = Settings()
    return [
        ("best policy", settings.best_policy_folder(run), f"`ppoflow fsck {run} --repair`"),
        ("reward model", settings.reward_model_folder(run), training_command(REWARD_MODELS, run)),
        ("DPO policy", settings.dpo_policy_folder(run), training_command(DPO_POLICIES, run)),
        ("start policy", settings.start_policy_folder(run), f"`ppoflow rlhf SPEC --run {run}`"),
    ]


def pages_of(root: str, *folders: str) -> list[Page]:
    """Every page in these folders; without any, in all that there are."""
    wanted = folders or (*KEEPING, *COMMITS)
    return [Page(root, folder, name) for folder in wanted for name in open_log(root, folder).names()]


def is_kept(root: str, folder: str, run: str, kind: str) -> bool:
    """Whether a page of a run names an artifact of this kind, as far as its pages can be read: one was made before."""
    for page in pages_of(root, folder):
        with suppress(RecordError):
            if page.run == run and any(ref.kind == kind for ref in page.artifacts()):
                return True
    return False


def each_once(store: ArtifactStore, named: Iterable[tuple[ArtifactRef, Page]]) -> list[tuple[ArtifactRef, Page]]:
    """Each artifact with one page that names it; of several digests that one which the store has.

    What was made again, on another machine say, may have come out differently: then a later page has it so.
    """
    found: dict[tuple[str, str], dict[str, tuple[ArtifactRef, Page]]] = {}
    for ref, page in named:
        found.setdefault((ref.kind, ref.key), {})[ref.digest] = ref, page
    return [by_digest[_stored_digest(store, by_digest)] for by_digest in found.values()]


def _stored_digest(store: ArtifactStore, by_digest: dict[str, tuple[ArtifactRef, Page]]) -> str:
    digest, (ref, _) = next(iter(by_digest.items()))
    if len(by_digest) > 1:
        with suppress(ArtifactError):
            stored = store.manifest(ref).digest
            return stored if stored in by_digest else digest
    return digest


def keep(root: str, run: str, made: Sequence[ArtifactRef], pages: str = REWARD_MODELS) -> None:
    """Name what a run has made so far; the last one is the latest. The same again changes nothing."""
    all_of_it = content_digest([ref.digest for ref in made])[:16]
    Page(root, pages, f"{run}-{made[-1].key[:16]}-{all_of_it}.json").create("artifacts", made)


def with_inputs(store: ArtifactStore, made: Sequence[StageRef]) -> list[ArtifactRef]:
    """The same, bare and each once, behind what they were made of: of answers, say, that an evaluation scores."""
    refs = [given for ref in made for given in store.manifest(ref.bare()).inputs]
    return list({(ref.kind, ref.key): ref for ref in [*refs, *(ref.bare() for ref in made)]}.values())


def with_own_commits(
    root: str, spec: Spec, run: str, flow: str, *, keep: bool, known: Iterable[HubCommit] = ()
) -> Spec:
    """The spec with the commits that its names of the hub had when the run began; to `keep` them they are written down.

    What is `known` of them is not asked.

    Raises what `with_commits` raises, and RecordError for a page that cannot be read.
    """
    names = sorted(hub_sources(spec))
    if not names:
        return spec
    page = Page(root, f"{flow}-commits", f"{run}-{content_digest(names)[:16]}.json")
    commits = page.commits()
    if commits is None:
        resolved = with_commits(spec, known)
        if not keep or page.create("commits", resolved.hub_commits):
            return resolved
        commits = page.commits()
    return with_commits(spec, commits or [])
