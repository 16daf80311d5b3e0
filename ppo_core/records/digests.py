"""The same digest, and the same seed, for the same value, everywhere."""

from __future__ import annotations

import hashlib
import json
from typing import Any

CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces: the same text for the same value, everywhere."""
    return CANONICAL.encode(value)


def content_digest(value: Any) -> str:
    """sha256 (hex) of the canonical JSON."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def derive_seed(*parts: int | str) -> int:
    """A seed below 2**63 by hashing: neighbouring parts give unrelated seeds, the same parts the same seed.

    Hashing, not adding: vLLM numbers the samples of one request seed, seed + 1, ..., so added seeds would repeat.
    """
    return int.from_bytes(hashlib.sha256(canonical_json(list(parts)).encode()).digest()[:8], "big") >> 1
