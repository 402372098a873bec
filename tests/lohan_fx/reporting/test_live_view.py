"""live_view: measured beside predicted, per stage and lane; redrawn on a terminal, a line elsewhere."""

from __future__ import annotations

import dataclasses
import io

import pytest
from rich.console import Console

from lohan_fx.plan import Prediction, Stage
from lohan_fx.planning.self_check import StepCheck
from lohan_fx.reporting.live_view import LiveView, in_short, stages_table
from lohan_fx.reporting.monitor import StepReport

PREDICTED = Prediction(
    forward=Stage({"compute": 0.58, "ssd": 0.4, "fetches": 0.1}),
    backward=Stage({"compute": 1.0, "ssd": 1.5, "updates": 1.6}),
    optimizer=Stage({"ssd": 0.25}),
    peak_bytes={"device": 1, "host": 1},
    nvme_read_bytes=0,
    nvme_write_bytes=0,
    flops=0,
    recompute_flops=0,
)
CORRECTED = dataclasses.replace(PREDICTED, forward=Stage({"compute": 0.62, "ssd": 0.41}))
MEASURED = StepCheck(
    {"forward": {"compute": 0.61, "ssd": 0.44}, "backward": {"compute": 1.02, "ssd": 1.4}, "optimizer": {"ssd": 0.2}},
    {"forward": 0.63, "backward": 1.7, "optimizer": 0.21},
)
REPORT = StepReport(
    seconds=2.6,
    lanes_s={"compute": 1.63, "ssd": 2.04},
    stall_s=0.26,
    nvme_read_bytes=0,
    nvme_written_bytes=0,
    rss_bytes=1 << 30,
    peak_rss_bytes=1 << 30,
    promised_rss_bytes=2 << 30,
    predicted=PREDICTED,
    stages=MEASURED,
)


def shown(report: StepReport, *, terminal: bool, steps: int = 1) -> str:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=120, _environ={"TERM": "xterm"})
    with LiveView(steps, tokens_per_step=520, console=console) as live:
        for _ in range(steps):
            live.show(3.5, report)
    return file.getvalue()


def test_each_lane_of_each_stage_has_its_prediction_beside_it() -> None:
    assert stages_table(REPORT) == [
        "measured/predicted s     in all    compute        ssd",
        "forward               0.63/0.58  0.61/0.58  0.44/0.40",
        "backward              1.70/1.60  1.02/1.00  1.40/1.50",
        "optimizer             0.21/0.25  0.00/0.00  0.20/0.25",
        "step                  2.54/2.43  1.63/1.58  2.04/2.15",
    ]


def test_in_short_it_is_one_line_of_the_sums() -> None:
    assert in_short(REPORT) == (
        "measured/predicted s: forward 0.63/0.58, backward 1.70/1.60, optimizer 0.21/0.25, compute 1.63/1.58, ssd 2.04/2.15"
    )


def test_a_corrected_prediction_is_told_from_the_plans_own() -> None:
    report = dataclasses.replace(REPORT, corrected=CORRECTED)
    line = shown(report, terminal=False)
    assert "2.60 s (predicted 2.43, corrected 2.47)" in line
    assert "measured/predicted/corrected s: forward 0.63/0.58/0.62, backward" in line
    assert stages_table(report)[1].split()[1:] == ["0.63/0.58/0.62", "0.61/0.58/0.62", "0.44/0.40/0.41"]


def test_steps_whose_stages_are_not_measured_show_what_lanes_took() -> None:
    report = dataclasses.replace(REPORT, stages=None)
    assert stages_table(report) == []
    assert in_short(report) == "measured s: compute 1.63, ssd 2.04"
    assert "predicted" not in shown(report, terminal=False), "that is of one backward, and the step may have had more"


def test_more_steps_than_were_told_leave_no_time() -> None:
    file = io.StringIO()
    with LiveView(1, console=Console(file=file, force_terminal=False)) as live:
        live.show(3.5, REPORT)
        live.show(3.5, REPORT)
    assert [line.split("  ")[3] for line in file.getvalue().splitlines()] == ["ETA 0:00", "ETA 0:00"]


def test_a_plan_without_a_prediction_is_shown_as_measured() -> None:
    report = dataclasses.replace(REPORT, predicted=None)
    assert "predicted" not in shown(report, terminal=False)
    assert in_short(report).startswith("measured s: forward 0.63, backward 1.70")


def test_on_a_terminal_the_table_is_redrawn_in_place() -> None:
    out = shown(REPORT, terminal=True, steps=2)
    assert "step 1/2  loss 3.5000  200 tokens/s" in out and "step 2/2" in out
    assert out.count("backward              1.70/1.60") >= 2
    assert "\x1b[1A" in out, "the cursor goes up again"


@pytest.mark.parametrize(("steps", "lines"), [(1, 1), (5, 5), (80, 9)])
def test_elsewhere_some_lines_are_printed(steps: int, lines: int) -> None:
    printed = shown(REPORT, terminal=False, steps=steps).splitlines()
    assert len(printed) == lines and all(line.startswith("step ") for line in printed)
    assert printed[-1].startswith(
        f"step {steps}/{steps}  loss 3.5000  200 tokens/s  2.60 s (predicted 2.43)  ETA 0:00  "
    )
    assert "stall 10%  RAM 1.00 of 2.00 GiB" in printed[-1]
