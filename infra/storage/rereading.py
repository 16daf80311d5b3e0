"""Whether bytes that are wrong lie wrong in S3, or were changed on the way from there.

What was changed on the way comes right when it is read again. Where it never does, the object is damaged only if every
read gives the same bytes, and those fit its ETag, which S3 has made of what it stores.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection
from typing import TypeVar

from infra.storage.objects import Found, Objects, StoreUnavailable
from infra.storage.telling import tell

T = TypeVar("T")
READS = 3
# An object that was uploaded in parts has another kind of ETag.
_MD5 = re.compile(r"[0-9a-f]{32}")


class ChangedOnTheWay(StoreUnavailable):
    """What arrives is not what S3 has: something between here and there changes it."""


def read_again(
    objects: Objects, key: str, parse: Callable[[bytes], T], wrong: type[Exception]
) -> tuple[T, Found] | None:
    """A small object, parsed, or None. `parse` raises `wrong` where the bytes are; so does this where the object is."""
    seen: list[Found] = []
    complaint: Exception | None = None
    for _ in range(READS):
        found = objects.read(key)
        if found is None:
            return None
        try:
            parsed = parse(found.content)
        except wrong as error:
            seen.append(found)
            complaint = error
            continue
        if seen:
            tell(f"{key!r} in bucket {objects.bucket!r} arrived wrong and was read again: its bytes changed on the way")
        return parsed, found
    assert complaint is not None
    sums = {hashlib.md5(found.content, usedforsecurity=False).hexdigest() for found in seen}
    refuse_changed(objects.bucket, key, sums, seen[-1].etag if seen[-1].etag_is_md5 else None)
    raise complaint


def refuse_changed(bucket: str, key: str, md5s: Collection[str], etag: str | None) -> None:
    """ChangedOnTheWay where an object that came wrong, each time with one of these md5s, lies right in S3.

    Without an `etag` that is an md5, only other bytes at each read are a sign of that.
    """
    if len(md5s) > 1:
        sign = "each time it is read, other bytes come"
    elif etag is not None and _MD5.fullmatch(etag) and etag not in md5s:
        sign = f"S3 says that its md5 is {etag}, and bytes with {next(iter(md5s))} come"
    else:
        return
    raise ChangedOnTheWay(
        f"{key!r} in bucket {bucket!r} is changed on its way from S3: {sign}. The object itself is not damaged: try "
        "again by another way (without a proxy, from another machine), and have the network looked at"
    )
