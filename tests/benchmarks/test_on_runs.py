"""What the benchmarks make of figures: against what was put in."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from benchmarks import report
from benchmarks.scaling import fitted, gained, series_of
from benchmarks.shapes import SHAPES


def test_an_exponent_is_that_of_the_power_that_was_put_in() -> None:
    sizes = [10, 20, 40]
    fits = fitted(sizes, {"square": [3.0 * x * x for x in sizes], "linear": [0.1 * x for x in sizes]})
    assert fits["square"]["exponent"] == pytest.approx(2.0)
    assert fits["linear"]["exponent"] == pytest.approx(1.0)
    assert (fits["square"]["over_linear"], fits["linear"]["over_linear"]) == pytest.approx((4.0, 1.0))


def test_a_gain_is_the_median_of_each_rounds_own() -> None:
    def rounds(*steps: float) -> list[dict[str, dict[str, float]]]:
        return [{"seconds": {"experience": 1.0, "steps": spent}} for spent in steps]

    assert gained(rounds(4.0, 40.0, 6.0), rounds(2.0, 10.0, 2.0)) == {"experience": 1.0, "steps": 3.0}


def test_sizes_grow_one_at_a_time() -> None:
    series = series_of(SHAPES["27M"])
    assert {name: list(sizes) for name, sizes in series.items()} == {
        "tokens": [32 * 80, 64 * 80, 128 * 80],
        "length": [80, 144, 272],
        "vocabulary": [8000, 16_000, 32_000],
    }
    first = {name: next(iter(sizes.values())).arguments for name, sizes in series.items()}
    assert first["tokens"] == ("--responses", "32", "--shortest", "64", "--longest", "64")
    assert first["vocabulary"] == ("--responses", "32", "--vocabulary", "8000")


def test_a_table_is_aligned(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    report.show("title", ("side", "seconds"), [["ours", 1.0], ["the other", 12.345]])
    assert capsys.readouterr().out.splitlines()[1:] == [
        "title",
        "side       seconds",
        "ours          1.00",
        "the other    12.35",
    ]
    report.save("x", argparse.Namespace(results=tmp_path, rounds=3), {"a": 1})
    written = json.loads((tmp_path / "x.json").read_text())
    assert (written["figures"], written["settings"]["rounds"]) == ({"a": 1}, 3)
    assert {"cores", "load"} < written["machine"].keys()
