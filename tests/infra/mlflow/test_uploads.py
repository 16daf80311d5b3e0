"""How long a server may take to store what is uploaded to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.mlflow.client import import_mlflow, uploading


@pytest.mark.parametrize(("size", "seconds"), [(1000, 60), (2_000_000_000, 460)])
def test_it_has_the_time_that_the_largest_file_takes_and_no_other_call_has(
    size: int, seconds: int, tmp_path: Path
) -> None:
    import_mlflow()
    from mlflow.environment_variables import MLFLOW_HTTP_REQUEST_TIMEOUT as TIMEOUT

    (tmp_path / "config.json").write_text("{}")
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(size)
    before = TIMEOUT.get()

    def refused() -> None:
        with uploading(tmp_path):
            assert TIMEOUT.get() == seconds
            raise OSError("refused")

    with pytest.raises(OSError, match="refused"):
        refused()
    assert TIMEOUT.get() == before < seconds
