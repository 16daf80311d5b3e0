"""What MLflow needs in a policy's folder to register it where it lies."""

from __future__ import annotations

import json
from pathlib import Path

from infra.mlflow.model_files import write_mlmodel


def describe_policy(checkpoint: Path, *, context_length: int | None) -> None:
    """Write the MLmodel files beside a checkpoint's policy, and its average; the same bytes for the same derivation."""
    identity = str(json.loads((checkpoint / "state.json").read_text())["identity"])
    for folder in (checkpoint / "policy", checkpoint / "ema"):
        if folder.is_dir():
            write_mlmodel(folder, digest_seed=identity, context_length=context_length)
