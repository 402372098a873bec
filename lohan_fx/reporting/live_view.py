"""live_view: how a training goes, step by step, with what each lane took in each stage beside what was predicted.

On a terminal it is a table that is redrawn in place, elsewhere a line now and then. Where the first steps have corrected the
profile and the plan has stayed, both predictions are shown: the plan's own, and the same plan's at the corrected rates.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from lohan_fx.meta import Lane
from lohan_fx.planning.self_check import STAGES, StepCheck, foretold
from lohan_fx.reporting.monitor import StepReport
from lohan_fx.reporting.plan_table import table

LINES = 8
"""How many are printed where there is no terminal."""
RECENT = 8
"""The time left is told from the median of so many steps."""


class LiveView:
    """Use in a ``with`` block, and call ``show`` after each of ``steps`` steps.

        monitor = lohan_fx.Monitor(model)
        with lohan_fx.LiveView(len(loader)) as live:
            for batch in loader:
                ...
                optimizer.step()
                live.show(loss.item(), monitor.step())

    ``tokens_per_step``: to tell tokens per second too. ``console``: where to, by default the standard output.
    """

    def __init__(self, steps: int, *, tokens_per_step: int | None = None, console: Console | None = None) -> None:
        self._steps = steps
        self._tokens_per_step = tokens_per_step
        self._seconds: list[float] = []
        self._console = console or Console()
        in_place = self._console.is_terminal and not self._console.is_dumb_terminal
        # Its own thread would redraw between two steps, when nothing has changed.
        self._live = Live(console=self._console, auto_refresh=False) if in_place else None

    def show(self, loss: float, report: StepReport) -> None:
        """Say what the last step was like."""
        self._seconds.append(report.seconds)
        done = len(self._seconds)
        line = self._line(loss, report)
        if self._live is not None:
            lines = [line, *stages_table(report)]
            self._live.update(Text("\n".join(lines), no_wrap=True, overflow="ellipsis"), refresh=True)
        elif done in (1, self._steps) or done % max(1, self._steps // LINES) == 0:
            print(f"{line}  {in_short(report)}", file=self._console.file, flush=True)

    def _line(self, loss: float, report: StepReport) -> str:
        done = len(self._seconds)
        step_s = statistics.median(self._seconds[-RECENT:])
        left = round(max(0, self._steps - done) * step_s)
        # Predictions are of one forward and backward, as stages are measured only where the step had no more.
        comparable = report.stages is not None
        said = {"predicted": report.predicted, "corrected": report.corrected} if comparable else {}
        expected = ", ".join(f"{name} {found.step_s:.2f}" for name, found in said.items() if found is not None)
        parts = [
            f"step {done}/{self._steps}",
            f"loss {loss:.4f}",
            f"{self._tokens_per_step / step_s:.0f} tokens/s" if self._tokens_per_step is not None else "",
            f"{report.seconds:.2f} s" + (f" ({expected})" if expected else ""),
            f"ETA {left // 60}:{left % 60:02}",
            f"stall {report.stall_s / report.seconds:.0%}",
            f"RAM {report.rss_bytes / 2**30:.2f} of {report.promised_rss_bytes / 2**30:.2f} GiB",
        ]
        return "  ".join(part for part in parts if part)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()


def stages_table(report: StepReport) -> list[str]:
    """Seconds of each lane in each stage, measured beside predicted; nothing where the step's stages were not measured."""
    known = _known(report)
    if not known:
        return []
    checks, lanes = known.values(), _busy_lanes(known)
    rows = []
    for stage in STAGES:
        each = [_beside(check.lanes_s[stage].get(lane, 0.0) for check in checks) for lane in lanes]
        rows.append([stage, _beside(check.stages_s[stage] for check in checks), *each])
    each = [_beside(check.lane_s(lane) for check in checks) for lane in lanes]
    rows.append(["step", _beside(check.seconds for check in checks), *each])
    return table([f"{'/'.join(known)} s", "in all", *lanes], rows, left=(0,))


def in_short(report: StepReport) -> str:
    """The sums of ``stages_table`` in one line: by stage, and by lane; what lanes took where stages were not measured."""
    known = _known(report)
    if not known:
        return "measured s: " + ", ".join(f"{lane} {took_s:.2f}" for lane, took_s in report.lanes_s.items())
    checks = known.values()
    stages = [f"{stage} {_beside(check.stages_s[stage] for check in checks)}" for stage in STAGES]
    lanes = [f"{lane} {_beside(check.lane_s(lane) for check in checks)}" for lane in _busy_lanes(known)]
    return f"{'/'.join(known)} s: " + ", ".join([*stages, *lanes])


def _known(report: StepReport) -> dict[str, StepCheck]:
    """What is known of the step, by its name: what was measured, and each prediction."""
    if report.stages is None:
        return {}
    said = {"predicted": report.predicted, "corrected": report.corrected}
    return {"measured": report.stages, **{name: foretold(found) for name, found in said.items() if found is not None}}


def _busy_lanes(known: Mapping[str, StepCheck]) -> list[Lane]:
    return [lane for lane in Lane if any(check.lane_s(lane) for check in known.values())]


def _beside(seconds: Iterable[float]) -> str:
    return "/".join(f"{value:.2f}" for value in seconds)
