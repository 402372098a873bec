"""What the example prints as tables: the machine, predictions beside measurements, lohan_fx beside plain PyTorch."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

from lohan_fx.hardware import HardwareProfile
from lohan_fx.meta import Lane
from lohan_fx.plan import Plan, Prediction
from lohan_fx.planning.self_check import STAGES, StepCheck, foretold
from lohan_fx.reporting.monitor import StepReport
from lohan_fx.reporting.plan_table import table
from lohan_fx.units import format_bytes, format_seconds

COMPARED_STEPS = 8


def show_hardware(hw: HardwareProfile, dtype: torch.dtype) -> None:
    rate = f"{hw.matmul_rate(dtype) / 1e12:.2f} TFLOP/s in {str(dtype).removeprefix('torch.')}"
    drives = f"{len(hw.nvme)} director{'y' if len(hw.nvme) == 1 else 'ies'}"
    ssd = (hw.ssd_read_bytes_per_s, hw.ssd_write_bytes_per_s, hw.ssd_mixed_bytes_per_s)
    rows = [
        ["machine", f"{hw.device_name}, {hw.cpu_cores} cores, {format_bytes(hw.host_memory_bytes)} RAM"],
        ["compute", f"{rate}, {hw.memory_bytes_per_s / 1e9:.1f} GB/s of memory"],
        ["NVMe", "{}: {:.2f} GB/s read, {:.2f} written, {:.2f} mixed".format(drives, *(r / 1e9 for r in ssd))],
        ["CPU Adam", f"{hw.adam_parameters_per_s / 1e6:.0f}M parameters/s"],
        ["measured", hw.measured_at or "not measured: a preset"],
    ]
    print("\n".join(table(["hardware", ""], rows, left=(0, 1))), end="\n\n")


def show_predicted_and_measured(
    plan: Plan, reports: Sequence[StepReport], expected_peak_bytes: int
) -> dict[str, dict[str, float]]:
    """A table of medians over the steps; the same as data. The first step, which warms everything up, is left out.

    ``expected_peak_bytes``: of the process's memory (``Monitor.expected_peak_rss_bytes``).
    """
    prediction = plan.prediction
    assert prediction is not None
    steady = reports[1:] or reports

    def median(of: Callable[[StepReport], float]) -> float:
        return statistics.median(of(report) for report in steady)

    seconds = {"step": (prediction.step_s, median(lambda r: r.seconds))}
    for lane in Lane:
        found = median(lambda r, lane=lane: r.lanes_s.get(lane, 0.0))  # type: ignore[misc]
        seconds[lane] = (prediction.lanes_s.get(lane, 0.0), found)
    nbytes = {
        "peak RSS": (expected_peak_bytes, max(r.peak_rss_bytes for r in reports)),
        "NVMe read": (prediction.nvme_read_bytes, median(lambda r: r.nvme_read_bytes)),
        "NVMe written": (prediction.nvme_write_bytes, median(lambda r: r.nvme_written_bytes)),
    }
    rows = [[name, *map(format_seconds, pair)] for name, pair in seconds.items()]
    if (corrected := reports[-1].corrected) is not None:
        rows[0].append(f"{format_seconds(corrected.step_s)} by the rates that the first steps have corrected")
    rows.append(["stall", "", format_seconds(median(lambda r: r.stall_s))])
    rows += [[name, *(format_bytes(int(value)) for value in pair)] for name, pair in nbytes.items()]
    last = reports[-1]
    rows[-3].append(f"at most {format_bytes(last.promised_rss_bytes)} promised")
    limit = "" if last.max_nvme_written_bytes is None else f" of at most {format_bytes(last.max_nvme_written_bytes)}"
    rows[-1].append(f"{format_bytes(last.nvme_total_written_bytes)} in all{limit}")
    rows = [[*row, ""][:4] for row in rows]
    print("\n".join(table(["per step", "predicted", "measured", ""], rows, left=(0, 3))), end="\n\n")
    both = {**seconds, **nbytes}
    return {name: {"predicted": pair[0], "measured": pair[1]} for name, pair in both.items()}


def show_stages(plan: Plan, corrected: Prediction | None, measured: StepCheck) -> None:
    """Seconds of each lane in each stage: where a prediction is off, and by whom.

    ``corrected``: the prediction at the rates that the first steps have corrected, where there is one.
    """
    said = {"predicted": plan.prediction, "corrected": corrected}
    known = {name: foretold(found) for name, found in said.items() if found is not None} | {"measured": measured}
    rows = []
    for name in STAGES:
        cells = [[check.lanes_s[name].get(lane, 0.0) for check in known.values()] for lane in Lane]
        cells.append([check.stages_s[name] for check in known.values()])
        rows.append([name, *(" / ".join(map(format_seconds, cell)) for cell in cells)])
    print("\n".join(table([" / ".join(known), *Lane, "in all"], rows, left=(0,))), end="\n\n")


def show_comparison(
    losses: Sequence[float],
    plain_losses: Sequence[float],
    seconds: Sequence[float],
    plain_seconds: Sequence[float],
    peak_bytes: int,
    plain_peak_bytes: int,
) -> float:
    """A table of both; the largest difference between the losses. ``*peak_bytes``: of model and training alone."""
    count = len(losses)
    shown = sorted({*range(0, count, max(1, count // COMPARED_STEPS)), count - 1})
    rows = [[str(n + 1), f"{losses[n]:.6f}", f"{plain_losses[n]:.6f}"] for n in shown]
    rows.append(["s/step", *(f"{statistics.median(found[1:] or found):.2f}" for found in (seconds, plain_seconds))])
    rows.append(["RAM", format_bytes(peak_bytes), format_bytes(plain_peak_bytes)])
    print("\n".join(table(["loss at step", "lohan_fx", "plain"], rows, left=(0,))))
    difference = max(abs(a - b) for a, b in zip(losses, plain_losses, strict=True))
    print(f"largest difference between the losses: {difference:g}\n")
    return difference
