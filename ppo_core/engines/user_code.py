"""The functions and models of a user in the scoring engine: whether they are those that a key names."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ppo_core.engines.start import sources_of
from ppo_core.processes.plugins import source_digest
from ppo_core.processes.protocol import Job
from ppo_core.records import FILES_OF, InputError, content_digest
from ppo_core.scoring.held_models import held_models
from ppo_core.spec import RewardSpec

LOADED: dict[tuple[Path, str], str] = {}
"""The digests of the user's functions when this process first read them: it goes on with these if the files change."""


def describe_sources(job: Job) -> dict[str, Any]:
    """Digest of every piece of user code the spec names: what makes a cached stage stale when the code changes."""
    sources = sources_of(job)
    found = {name: source_digest(name, sources) for name in job.spec["functions"]}
    for name, digest in found.items():
        LOADED.setdefault((sources.folder, name), digest)
    return found


def require_same_models(job: Job) -> None:
    """Have a reward model that is loaded from now on refused where its folder is another than the job's key names."""
    held_models().compare({given.path: given.digest for name, given in job.inputs.items() if name.startswith(FILES_OF)})


def as_loaded(code: Iterable[str], job: Job) -> dict[str, str]:
    """The digests of functions as this process has them; of those that it has not yet loaded, as they are now."""
    sources = sources_of(job)
    for name in code:
        if (sources.folder, name) not in LOADED:
            LOADED[sources.folder, name] = source_digest(name, sources)
    return {name: LOADED[sources.folder, name] for name in code}


def require_same_code(reward: RewardSpec, job: Job) -> None:
    """Raise InputError where this process has other functions than the key of the job's scores names."""
    named = job.inputs.get("functions", job.inputs["sources"])
    if reward.code and named.digest and content_digest(as_loaded(reward.code, job)) != named.digest:
        raise InputError(
            f"{', '.join(reward.code)} changed after this run had read it, and the scoring engine was started anew "
            "since: give the run's command again, which goes on with what is there now"
        )
