"""What MLflow needs in a policy's folder to register it where it lies."""

from __future__ import annotations

import json
from pathlib import Path

from infra.mlflow.model_files import write_mlmodel


def describe_policy(checkpoint: Path, *, context_length: int | None) -> None:
    """Write the MLmodel files into a checkpoint's `policy/`; the same bytes for a checkpoint of the same derivation."""
    identity = str(json.loads((checkpoint / "state.json").read_text())["identity"])
    write_mlmodel(checkpoint / "policy", digest_seed=identity, context_length=context_length)
