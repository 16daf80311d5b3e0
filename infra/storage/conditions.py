"""Whether a server of S3 keeps the conditions of puts, on which it rests that a run has one writer."""

from __future__ import annotations

from contextlib import suppress
from uuid import uuid4

from infra.storage.objects import Objects, StoreRefused, StoreUnavailable

NO_ETAG = "0" * 32
TRIALS = 5


def require_conditional_puts(objects: Objects, key: str) -> None:
    """Try both at `key`, which nobody else writes: StoreRefused where the server does not do what the conditions say.

    A collector may take the object away, for example where this process is stopped meanwhile: then it is tried again.
    """
    needed = (
        f"the server of bucket {objects.bucket!r} must know conditional puts (If-None-Match and If-Match): "
        "take one that does, for example Amazon's, Ceph's or MinIO's of today"
    )
    ignored: list[str] = []
    for _ in range(TRIALS):
        ignored = _ignored(objects, key, needed)
        if not ignored:
            return
    raise StoreRefused(f"it wrote over an object in spite of {' and '.join(ignored)}: {needed}")


def _ignored(objects: Objects, key: str, needed: str) -> list[str]:
    """The conditions that seem to be ignored."""
    first, second, third = (uuid4().bytes for _ in range(3))  # a put counts as ours by its content
    try:
        objects.create(key, first)
        put = {"If-None-Match": objects.create(key, second), "If-Match": objects.replace(key, third, NO_ETAG)}
        return [name for name, etag in put.items() if etag is not None]
    except StoreRefused as error:
        objects.write(key, first)  # StoreRefused where it is not the condition that is refused
        raise StoreRefused(f"{error}; {needed}") from None
    finally:
        with suppress(StoreUnavailable, StoreRefused):
            objects.remove([key])
