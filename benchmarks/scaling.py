"""How does the time of experience and update grow: with tokens, length, vocabulary; and what does a second rank gain?

    python -m benchmarks.scaling [--shape 27M] [--rounds 3] [--iterations 2]

Fits the exponent p of seconds ~ size^p over three sizes each: of responses at one length (so of tokens: 1 is linear),
of the length of as many responses, and of the vocabulary. Two gloo ranks with one thread each run beside one rank with
one thread. Each round runs everything once, so that a busy machine is busy for all. Writes
`benchmarks/results/scaling.json`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import report
from benchmarks.shapes import PROMPT, SHAPES, Shape
from benchmarks.update import Setting, compare, middle

PARTS = ("experience", "steps")


def main() -> None:
    """All sizes in turn, then the fits."""
    parser = report.arguments(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="27M")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=2)
    given = parser.parse_args()
    series = series_of(SHAPES[given.shape])
    ranks = {number: with_ranks(SHAPES[given.shape], number) for number in (1, 2)}
    settings = [setting for sizes in series.values() for setting in sizes.values()]
    found = compare(given.shape, [*settings, *ranks.values()], given.rounds, given.iterations)
    fits = {
        name: fitted(
            list(sizes), {part: [middle(found[s.name], "seconds", part) for s in sizes.values()] for part in PARTS}
        )
        for name, sizes in series.items()
    }
    gain = gained(found[ranks[1].name], found[ranks[2].name])
    columns = ("with more", "experience ^", "update ^", "experience, largest", "update, largest")
    rows = [
        [name, *(fit[part]["exponent"] for part in PARTS), *(fit[part]["over_linear"] for part in PARTS)]
        for name, fit in fits.items()
    ]
    report.show(f"growth, {given.shape}; `largest`: seconds per unit there over those of the smallest", columns, rows)
    report.show("times as fast", ("", "experience", "update"), [["2 ranks of 1 thread over 1", *gain.values()]])
    report.save("scaling", given, {"fits": fits, "two_ranks_over_one": gain, "rounds": found})


def series_of(shape: Shape) -> dict[str, dict[int, Setting]]:
    """By what grows: each size, and how to run it."""
    few, longest = str(max(shape.responses // 4, shape.minibatches)), str(shape.longest)

    def setting(name: str, **options: str) -> Setting:
        return Setting(name, tuple(part for key, value in options.items() for part in (f"--{key}", value)))

    return {
        "tokens": {
            count * (PROMPT + shape.longest): setting(
                f"{count} responses", responses=str(count), shortest=longest, longest=longest
            )
            for count in (int(few), 2 * int(few), 4 * int(few))
        },
        "length": {
            PROMPT + length: setting(f"length {length}", responses=few, shortest=str(length), longest=str(length))
            for length in (shape.longest, 2 * shape.longest, 4 * shape.longest)
        },
        "vocabulary": {
            size: setting(f"vocabulary {size}", responses=few, vocabulary=str(size))
            for size in (shape.vocabulary // 4, shape.vocabulary // 2, shape.vocabulary)
        },
    }


def with_ranks(shape: Shape, ranks: int) -> Setting:
    """The shape's responses, by ranks of one thread."""
    return Setting(f"{ranks} of 1 thread", ("--responses", str(shape.responses)), ranks=ranks, threads=1)


def fitted(sizes: Sequence[int], seconds: Mapping[str, Sequence[float]]) -> dict[str, dict[str, Any]]:
    """The slope of log seconds over log size, by least squares; and seconds per unit, the last over the first."""
    return {
        part: {
            "sizes": list(sizes),
            "seconds": list(spent),
            "exponent": statistics.linear_regression([math.log(x) for x in sizes], [math.log(y) for y in spent]).slope,
            "over_linear": (spent[-1] / sizes[-1]) / (spent[0] / sizes[0]),
        }
        for part, spent in seconds.items()
    }


def gained(one: Sequence[Mapping[str, Any]], two: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds of one rank over those of two: the median of the rounds' own ratios."""
    pairs = list(zip(one, two, strict=True))
    return {part: statistics.median(a["seconds"][part] / b["seconds"][part] for a, b in pairs) for part in PARTS}


if __name__ == "__main__":
    main()
