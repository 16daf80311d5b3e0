"""Whole tables in one go, as tests have them; the product writes them row by row."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from ppo_core.data.rankings import Ranking, RankingsWriter
from ppo_core.data.tables import PROMPTS, prompt_document
from ppo_core.records import PromptRow


def write_prompts(path: Path, rows: Iterable[PromptRow]) -> None:
    """A dataset's `train.parquet` or `eval.parquet`."""
    pq.write_table(pa.Table.from_pylist([prompt_document(row) for row in rows], schema=PROMPTS), path)


def write_rankings(path: Path, rankings: Iterable[Ranking]) -> None:
    """A preference dataset's `train.parquet` or `eval.parquet`."""
    writer = RankingsWriter(path)
    for ranking in rankings:
        writer.add(ranking)
    writer.close()
