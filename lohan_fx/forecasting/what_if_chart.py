"""what_if_chart: forecasts side by side as a picture: throughput, and where the step's time goes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lohan_fx.forecasting.forecast_table import format_rate
from lohan_fx.forecasting.what_if import Row
from lohan_fx.plan import PYTHON_LANE
from lohan_fx.reporting.timeline_chart import figure_modules

# Okabe and Ito's palette, which colour-blind readers can tell apart.
_LANES = {"compute": "#0072B2", "h2d": "#009E73", "d2h": "#56B4E9", "ssd": "#E69F00", "cpu": "#8A8F98"}
_PYTHON = {PYTHON_LANE: "#CC79A7"}


def draw_rows(rows: Sequence[Row], path: str | Path, *, title: str) -> None:
    """Write ``rows`` as a PNG to ``path``: a bar of throughput each, and below what each lane needs of the step.

    Raises ``ValueError`` where no case has a forecast, ``ImportError`` where matplotlib is missing.
    """
    found = [(row.label, row.found) for row in rows if row.found is not None]
    if not found:
        raise ValueError("there is nothing to draw: none of the cases fits")
    figures, canvas = figure_modules()
    figure = figures.Figure(figsize=(max(7.0, 0.8 * len(rows) + 3), 7.2), layout="constrained")
    canvas.FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=13, fontweight="bold")
    top, bottom = figure.subplots(2, 1)
    labels = [row.label for row in rows]
    unit = found[0][1].subject.unit
    rates = [0.0 if row.found is None else row.found.units_per_s for row in rows]
    bars = top.bar(range(len(rows)), rates, color=_LANES["compute"], width=0.7)
    top.bar_label(
        bars,
        ["does not fit" if row.found is None else format_rate(rate) for row, rate in zip(rows, rates, strict=True)],
    )
    top.margins(y=0.12)
    top.set_ylabel(f"{unit} per second")
    beside_gpu = any(PYTHON_LANE in answer.prediction.lanes_s for _, answer in found)
    lanes = _LANES | (_PYTHON if beside_gpu else {})
    width = 0.8 / len(lanes)
    for place, (lane, color) in enumerate(lanes.items()):
        seconds = [row.found.prediction.lanes_s.get(lane, 0.0) if row.found else 0.0 for row in rows]
        offsets = [x + (place - (len(lanes) - 1) / 2) * width for x in range(len(rows))]
        bottom.bar(offsets, seconds, width=width, color=color, label=lane)
    steps = [row.found.expected_s if row.found else float("nan") for row in rows]
    bottom.plot(range(len(rows)), steps, "k_", markersize=24, markeredgewidth=2, label="step")
    bottom.set_ylabel("seconds per step")
    bottom.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=len(lanes) + 1, frameon=False, fontsize=9)
    for axes in (top, bottom):
        axes.set_xticks(range(len(rows)), labels, rotation=0 if len(rows) < 9 else 45)
        axes.set_axisbelow(True)
        axes.grid(axis="y", color="#D0D4DA", linewidth=0.6)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=110)
