"""Learning curves as one picture: a panel for each metric. Matplotlib's objects only, no global state."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMNS = 3
PANEL_INCHES = (3.8, 2.5)
TITLE_INCHES = 0.4


@dataclass(frozen=True)
class Panel:
    """One plot: lines by their label, each as pairs of `x` (an iteration, unless it says otherwise) and value.

    >>> Panel("accuracy", {"sampled": [(0, 0.4), (1, 0.6)], "greedy": [(0, 0.2), (1, 0.9)]}, limits=(0.0, 1.0))
    """

    title: str
    lines: Mapping[str, Sequence[tuple[float, float]]]
    limits: tuple[float, float] | None = None
    x: str = "iteration"


def learning_curves(title: str, panels: Sequence[Panel]) -> Figure:
    """Panels side by side, three in a row. Values that are not finite leave a gap in their line."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if not panels:
        raise ValueError(f"no panel to draw for {title!r}: give at least one")
    columns = min(COLUMNS, len(panels))
    rows = math.ceil(len(panels) / columns)
    width, height = columns * PANEL_INCHES[0], rows * PANEL_INCHES[1] + TITLE_INCHES
    figure = Figure(figsize=(width, height), dpi=110)
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    # Fixed margins: to have them computed takes twice as long, and a run waits for that at each evaluation.
    figure.subplots_adjust(0.5 / width, 0.55 / height, 1 - 0.15 / width, 1 - (TITLE_INCHES + 0.3) / height, 0.22, 0.55)
    for position, panel in enumerate(panels, start=1):
        _draw(figure.add_subplot(rows, columns, position), panel)
    return figure


def png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _draw(axes: Axes, panel: Panel) -> None:
    for label, points in panel.lines.items():
        steps = [step for step, _ in points]
        values = [value if math.isfinite(value) else math.nan for _, value in points]
        axes.plot(steps, values, label=label, marker=".", markersize=4, linewidth=1.4)
    # Few ticks are enough, and titles and labels that have a place are not moved out of their way: a quarter less time.
    axes.set_title(panel.title, fontsize="medium", y=1.0)
    axes.set_xlabel(panel.x, fontsize="small")
    axes.xaxis.set_label_coords(0.5, -0.17)
    axes.locator_params(nbins=5)
    axes.grid(alpha=0.3)
    if panel.limits is not None:
        axes.set_ylim(*panel.limits)
    if len(panel.lines) > 1:
        axes.legend(fontsize="small")
