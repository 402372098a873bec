"""timeline_chart: one training step as a picture: what each lane did when, and where the time went."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lohan_fx.plan import Plan
from lohan_fx.runtime.busy_seconds import busy_s, covered_s, intervals, uncovered_s
from lohan_fx.runtime.timeline import COMPUTE_LANE, STALL, Event
from lohan_fx.units import format_bytes, format_seconds

# Okabe and Ito's palette, which colour-blind readers can tell apart.
_BLUE, _SKY, _GREEN, _ORANGE, _PURPLE, _RED, _GREY = (
    "#0072B2", "#56B4E9", "#009E73", "#E69F00", "#CC79A7", "#D55E00", "#8A8F98",
)  # fmt: skip


@dataclass(frozen=True)
class _Band:
    """A strip of the timeline: the events of ``lane`` whose label starts with ``prefix``."""

    lane: str
    prefix: str
    text: str
    color: str


_BANDS = (
    _Band("compute", "forward", "forward", _SKY),
    _Band("compute", "backward", "backward", _BLUE),
    _Band("compute", STALL, "compute waits", _RED),
    _Band("h2d", "", "h2d: to the device", _GREEN),
    _Band("d2h", "", "d2h: from the device", _GREEN),
    _Band("ssd", "read", "NVMe reads", _ORANGE),
    _Band("ssd", "write", "NVMe writes", _PURPLE),
    _Band("cpu", "", "optimizer", _GREY),
)
_LANES = ("compute", "h2d", "d2h", "ssd", "cpu")


@dataclass(frozen=True)
class _Stages:
    """Seconds of a step, one after the other; what stalls took of forward and backward is apart."""

    forward_s: float
    backward_s: float
    rest_s: float
    stall_s: float


def draw(events: Sequence[Event], path: str | Path, *, title: str = "", plan: Plan | None = None) -> None:
    """Write ``events``, those of one step (``Monitor.record``), as a PNG to ``path``.

    With ``plan``, the seconds that it predicts per lane are marked beside the measured ones. Raises ``ValueError``
    where there are no events, and ``ImportError`` that says what to install where matplotlib is missing.
    """
    if not events:
        raise ValueError("there are no events to draw: record one step with `with monitor.record() as events:`")
    figure_module, canvas_module = figure_modules()
    start_s = min(event.start_s for event in events)
    seconds = max(event.end_s for event in events) - start_s
    figure = figure_module.Figure(figsize=(12.0, 7.6), layout="constrained")
    canvas_module.FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 2, height_ratios=(1.55, 1.0), width_ratios=(1.9, 1.0))
    figure.suptitle(title or "one training step", fontsize=13, fontweight="bold")
    _draw_lanes(figure.add_subplot(grid[0, :]), events, start_s, seconds)
    _draw_busy(figure.add_subplot(grid[1, 0]), events, seconds, plan)
    _draw_stages(figure.add_subplot(grid[1, 1]), _stages(events, seconds))
    figure.savefig(path, dpi=110)


def figure_modules() -> tuple[Any, Any]:
    """matplotlib's figure and Agg modules: without pyplot, so that nothing global changes."""
    try:
        import matplotlib.backends.backend_agg as canvas
        import matplotlib.figure as figure
    except ImportError as error:
        raise ImportError("drawing a timeline needs matplotlib: pip install 'lohan-fx[plot]'") from error
    return figure, canvas


# --- numbers --------------------------------------------------------------------------------------------------


def _of(events: Iterable[Event], band: _Band) -> list[Event]:
    return [event for event in events if event.lane == band.lane and event.label.startswith(band.prefix)]


def _stages(events: Sequence[Event], seconds: float) -> _Stages:
    stages = {band.prefix: _of(events, band) for band in _BANDS if band.lane == COMPUTE_LANE}
    stalls = stages.pop(STALL)
    worked_s = {name: uncovered_s(stage, stalls) for name, stage in stages.items()}
    stages_s = sum(covered_s(stage) for stage in stages.values())
    return _Stages(
        forward_s=worked_s["forward"],
        backward_s=worked_s["backward"],
        rest_s=max(0.0, seconds - stages_s),
        stall_s=stages_s - sum(worked_s.values()),
    )


# --- pictures -------------------------------------------------------------------------------------------------


def _draw_lanes(axes: Any, events: Sequence[Event], start_s: float, seconds: float) -> None:
    """A row per lane. The ssd row has a strip for reads and one for writes, as they may overlap."""
    for band in _BANDS:
        found = _of(events, band)
        if not found:
            continue
        row = _LANES.index(band.lane)
        bottom, height = {"NVMe reads": (row - 0.38, 0.36), "NVMe writes": (row + 0.02, 0.36)}.get(
            band.text, (row - 0.38, 0.76)
        )
        bars = [(begin_s - start_s, end_s - begin_s) for begin_s, end_s in intervals(found)]
        nbytes = sum(event.bytes for event in found)
        moved = f" ({format_bytes(nbytes)})" if nbytes and band.lane != "cpu" else ""
        axes.broken_barh(bars, (bottom, height), color=band.color, label=band.text + moved, linewidth=0.5)
    axes.set_xlim(0, seconds)
    axes.set_ylim(len(_LANES) - 0.5, -0.5)
    axes.set_yticks(range(len(_LANES)), _LANES)
    axes.set_xlabel("seconds")
    axes.set_title("what each lane did", loc="left", fontsize=11)
    axes.grid(axis="x", color="#D0D4DA", linewidth=0.6)
    _plain(axes)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=4, frameon=False, fontsize=9)


def _draw_busy(axes: Any, events: Sequence[Event], seconds: float, plan: Plan | None) -> None:
    """How long each lane was busy, against the step and what the plan predicts."""
    predicted = _predicted_s(plan)
    colors = {band.lane: band.color for band in _BANDS if band.text not in ("compute waits", "NVMe writes")}
    widest = max([seconds, *predicted.values()])
    for row, lane in enumerate(_LANES):
        worked_s = busy_s(events, lane)
        axes.barh(row, seconds, height=0.62, color="#ECEEF1")
        axes.barh(row, worked_s, height=0.62, color=colors[lane])
        if lane in predicted:
            axes.plot([predicted[lane]] * 2, [row - 0.42, row + 0.42], color="black", linewidth=2.2)
        axes.text(1.02 * widest, row, f"{format_seconds(worked_s)}  {worked_s / seconds:4.0%}", va="center", fontsize=9)
    axes.set_xlim(0, 1.3 * widest)
    axes.set_ylim(len(_LANES) - 0.5, -0.5)
    axes.set_yticks(range(len(_LANES)), _LANES)
    axes.set_xlabel("seconds")
    marked = " (black: as predicted)" if predicted else ""
    axes.set_title(f"how long each was busy, of {format_seconds(seconds)}{marked}", loc="left", fontsize=11)
    _plain(axes)


def _predicted_s(plan: Plan | None) -> Mapping[str, float]:
    if plan is None or plan.prediction is None:
        return {}
    lanes_s = dict.fromkeys(_LANES, 0.0) | plan.prediction.lanes_s
    # By a profile without drives, what is on NVMe takes for ever.
    return {lane: seconds for lane, seconds in lanes_s.items() if math.isfinite(seconds)}


def _draw_stages(axes: Any, stages: _Stages) -> None:
    """The step from its begin to its end."""
    rows = (
        ("forward", stages.forward_s, _SKY),
        ("backward", stages.backward_s, _BLUE),
        ("compute waits", stages.stall_s, _RED),
        ("rest of the\noptimizer", stages.rest_s, _GREY),
    )
    total = sum(seconds for _, seconds, _ in rows)
    begin = 0.0
    for row, (_, seconds, color) in enumerate(rows):
        axes.barh(row, seconds, left=begin, height=0.62, color=color)
        right = begin + seconds
        place, align, ink = right + 0.02 * total, "left", "black"
        if right >= 0.6 * total:
            place, align = begin - 0.02 * total, "right"
            if begin < 0.35 * total:  # left of it are the names
                place, align, ink = begin + seconds / 2, "center", "white"
        axes.text(
            place,
            row,
            f"{format_seconds(seconds)}  {seconds / total:.0%}",
            va="center",
            ha=align,
            color=ink,
            fontsize=9,
        )
        begin = right
    axes.set_xlim(0, total)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(range(len(rows)), [name for name, _, _ in rows])
    axes.set_xlabel("seconds")
    axes.set_title("where the time went", loc="left", fontsize=11)
    _plain(axes)


def _plain(axes: Any) -> None:
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
