"""One line that says how the training goes: rewritten in place on a terminal, else printed now and then."""

from __future__ import annotations

import shutil
import statistics
import sys
from types import TracebackType
from typing import Self

from lohan_fx.monitor import StepReport

LANES = ("compute", "h2d", "d2h", "ssd", "cpu")
LINES = 8
"""How many are printed where there is no terminal."""
RECENT = 8


class LiveLine:
    """Use in a ``with`` block, and call ``show`` after each of ``steps`` steps."""

    def __init__(self, steps: int, *, tokens_per_step: int) -> None:
        self._steps = steps
        self._tokens_per_step = tokens_per_step
        self._seconds: list[float] = []
        self._live = sys.stdout.isatty()

    def show(self, loss: float, report: StepReport) -> None:
        """Say what the last step was like."""
        self._seconds.append(report.seconds)
        done = len(self._seconds)
        step_s = statistics.median(self._seconds[-RECENT:])
        left = round((self._steps - done) * step_s)
        busy = " ".join(f"{lane} {report.busy(lane):.0%}" for lane in LANES)
        line = (
            f"step {done}/{self._steps}  loss {loss:.4f}  {self._tokens_per_step / step_s:.0f} tokens/s  "
            f"{report.seconds:.2f} s (predicted {report.predicted_s:.2f})  ETA {left // 60}:{left % 60:02}  {busy}  "
            f"stall {report.stall_s / report.seconds:.0%}  "
            f"RAM {report.rss_bytes / 2**30:.2f} of {report.promised_rss_bytes / 2**30:.2f} GiB"
        )
        if self._live:
            columns = shutil.get_terminal_size().columns - 1
            print(f"\r{line[:columns]:<{columns}}", end="", flush=True)
        elif done in (1, self._steps) or done % max(1, self._steps // LINES) == 0:
            print(line, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live and self._seconds:
            print(flush=True)
