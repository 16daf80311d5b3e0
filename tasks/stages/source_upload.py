"""The user's folders on other machines: a tokenizer or a model is stored once, under the digest of what is in it."""

from __future__ import annotations

import shutil

from infra.artifacts.export import digests_of_source
from infra.artifacts.fingerprint import file_digests
from infra.engines.protocol import EngineInput
from ppo_core.records import InputError, content_digest
from tasks.stages.context import RunContext
from tasks.stages.find_verified import find_verified
from tasks.stages.jobs import UploadedSource

KIND = "source"


def upload_source(context: RunContext, given: EngineInput) -> UploadedSource:
    """Have a folder in the store; one that is there already, of the hub or by an earlier call, is not copied again."""
    if (there := context.downloads.uploaded(given)) is not None:
        return there
    context.pin(KIND, given.digest)
    found = find_verified(context, KIND, given.digest)
    if found is None:
        copy = context.store.scratch()
        try:
            for name in digests_of_source(given.path):
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(given.path / name, copy / name)
            if content_digest(file_digests(copy)) != given.digest:
                raise InputError(f"{given.path} has changed since this run read it: start the run again")
            found = context.store.put(copy, KIND, given.digest)
        finally:
            shutil.rmtree(copy, ignore_errors=True)
    return UploadedSource(found, given.digest)
