"""Names of the Hugging Face hub as a user writes them in a spec: models, tokenizers and data that are no folder here.

hf://OWNER/NAME                          its main branch, as it is when the run begins
hf://OWNER/NAME@REVISION                 a branch, a tag or a commit
hf://OWNER/NAME@REVISION:data/test.csv   of data, a file, a folder or a pattern such as data/train-*.parquet
"""

from __future__ import annotations

import re
from typing import NamedTuple, TypeGuard

from pydantic import Field

from ppo_core.spec.section import Section

SCHEME = "hf://"
COMMIT = r"[0-9a-f]{40}"
_REPOSITORY = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*"
_NAME = re.compile(rf"hf://(?P<repository>{_REPOSITORY})(@(?P<revision>[^@:\s]+))?(:(?P<path>[^:]+))?")


class HubName(NamedTuple):
    """Such a name, taken apart."""

    repository: str
    revision: str | None
    path: str | None


class HubCommit(Section):
    """The commit that a name stands for."""

    name: str = Field(description="The hf:// name as written in the spec")
    commit: str = Field(pattern=f"^{COMMIT}$", description="The commit that it was resolved to when the run began")


def exact_name(commit: HubCommit) -> str:
    """A name that means the same for ever: that of the commit."""
    return at_revision(commit.name, commit.commit)


def at_revision(name: str, revision: str) -> str:
    """The same name at another revision."""
    repository, _, path = hub_name(name)
    return f"{SCHEME}{repository}@{revision}" + (f":{path}" if path is not None else "")


def is_repository(text: str) -> bool:
    """Whether this could be OWNER/NAME of the hub: a path with a dot, a slash or ~ in front is none."""
    return re.fullmatch(_REPOSITORY, text) is not None


def is_hub_name(text: str) -> bool:
    """Whether this is meant to be a name of the hub."""
    return text.startswith(SCHEME)


def is_commit(revision: str | None) -> TypeGuard[str]:
    """Whether a revision is the whole hash of a commit, which never means anything else."""
    return revision is not None and re.fullmatch(COMMIT, revision) is not None


def hub_name(text: str) -> HubName:
    """The parts of a name. Raises ValueError where it has another form."""
    found = _NAME.fullmatch(text)
    if found is None:
        remedy = text.replace("hf://datasets/", SCHEME).replace("hf://models/", SCHEME)
        owner, _, rest = remedy.removeprefix(SCHEME).partition("/")
        name, _, path = rest.partition("/")
        example = f"{SCHEME}{owner}/{name}:{path}" if owner and name and path else f"{SCHEME}OWNER/NAME@REVISION"
        raise ValueError(
            f"{text} is not a valid name on the Hugging Face Hub: write {SCHEME}OWNER/NAME, optionally with @REVISION, "
            f"and for one data file with :PATH at the end, as in {example}"
        )
    path = found["path"]
    if path is not None and (path.startswith("/") or ".." in path.split("/")):
        raise ValueError(f"{text} points outside its repository: give the path of a file inside it")
    return HubName(found["repository"], found["revision"], path)
