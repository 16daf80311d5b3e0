"""What MLflow needs in a policy's folder to register it where it lies."""

from __future__ import annotations

from pathlib import Path

from infra.mlmodel import write_mlmodel


def describe_policy(checkpoint: Path, key: str, *, context_length: int | None) -> None:
    """Write the MLmodel files into a checkpoint's `policy/`; the same bytes for the same key."""
    write_mlmodel(checkpoint / "policy", digest_seed=key, context_length=context_length)
