"""memory_report: where every byte of a process's peak went: what was in use at that moment, beside what was planned.

The kernel says what is resident, the C library what it has handed out and what it has free, the runtime what its buffers,
parameters, states and gradients take. What the graphs hold is told apart by time: between two steps, when no graph runs,
the same books show what capture has left behind (``MemoryAccounts.stage``). What no book explains is a row of its own.
"""

from __future__ import annotations

import linecache
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass

from lohan_fx import process_memory
from lohan_fx.plan import Plan, Swap, Tier
from lohan_fx.planning.budgets import staging_bytes
from lohan_fx.planning.memory_model import resident_bytes
from lohan_fx.process_memory import ProcessMemory
from lohan_fx.reporting.plan_table import table
from lohan_fx.runtime.memory_use import MemoryUse, Range
from lohan_fx.runtime.peak_watch import PeakWatch

EXPECTED_HOLE_BYTES, TOLERATED_HOLE_BYTES = 20 << 20, 40 << 20
"""Of holes in the heap, where a few values lie that have no place (docs/0029): what is expected, and what may be before they are
given back (``runtime.resident_limit``), which costs time. There could be 160 MiB of them."""
BETWEEN = "between two steps"
UNACCOUNTED = "not accounted for"
GRAPH_CODE = "<eval_with_key>"
"""How ``torch.fx`` calls the code that it makes of a graph."""


@dataclass(frozen=True)
class MemoryRow:
    """Bytes in RAM for one purpose at the peak, and what the plan in force has for it; None: it speaks of it elsewhere."""

    purpose: str
    bytes: int
    planned_bytes: int | None = None


@dataclass(frozen=True)
class MemoryReport:
    """The peak of the process's resident memory, and what it was made of: ``rows`` add up to it.

    ``stage`` and ``op``: what was running, the op as the graph calls it ("" for none). ``promised_bytes``: what the process
    may have at most. ``print`` shows it as a table.
    """

    peak_rss_bytes: int
    promised_bytes: int
    stage: str
    op: str
    rows: tuple[MemoryRow, ...]

    def __str__(self) -> str:
        rows = [
            [row.purpose, _mib(row.bytes), "" if row.planned_bytes is None else _mib(row.planned_bytes)]
            for row in self.rows
        ]
        planned = sum(row.planned_bytes or 0 for row in self.rows)
        where = f"{self.stage}, at {self.op}" if self.op else self.stage
        rows.append([f"peak RSS, {where}", _mib(self.peak_rss_bytes), _mib(planned) if planned else ""])
        rows.append(["promised", "", _mib(self.promised_bytes)])
        return "\n".join(table(["memory at the peak", "MiB", "planned"], rows, left=(0,)))


@dataclass(frozen=True)
class _Books:
    """What all books say at one moment. ``malloc_bytes``: of what the C library has handed out, what the runtime holds."""

    stage: str
    op: str
    process: ProcessMemory
    use: MemoryUse
    staging_bytes: int
    swapped_bytes: int
    landing_bytes: int
    workspace_bytes: int

    @property
    def resident_bytes(self) -> int:
        return self.use.parameter_bytes + self.use.state_bytes

    @property
    def malloc_bytes(self) -> int:
        return self.resident_bytes + self.use.gradient_bytes - self.use.gradient_workspace_bytes

    @property
    def runtime_bytes(self) -> int:
        return self.staging_bytes + self.swapped_bytes + self.landing_bytes + self.workspace_bytes + self.malloc_bytes


class MemoryAccounts:
    """Keeps what is needed for a ``MemoryReport``, while it watches.

    ``use`` asks the runtime. ``before``: the process before ``compile``, of which ``original_bytes`` were the model's
    parameters, which the runtime has taken over. ``stage`` is to be called as a graph begins and ends.
    """

    def __init__(self, use: Callable[[], MemoryUse], before: ProcessMemory, original_bytes: int) -> None:
        self._use = use
        self._before = before
        self._original_bytes = original_bytes
        self._stage = BETWEEN
        self._thread = threading.get_ident()
        self._quiet: _Books | None = None
        self._peak: _Books | None = None
        self._stale = True
        self._watch: PeakWatch | None = None

    def watch(self) -> None:
        """Watch from now on for a new peak."""
        self._quiet = self._peak = self._read()
        self._stale = True
        if self._watch is None:
            self._watch = PeakWatch(self._note)
        self._watch.begin_anew()

    def stop(self) -> None:
        """End the watch. Idempotent."""
        if self._watch is not None:
            self._watch.stop()

    def stage(self, name: str) -> None:
        """A graph begins (``name``), or has ended (``BETWEEN``)."""
        if self._watch is not None and self._stage == BETWEEN and name == "forward" and self._stale:
            # Read while nothing runs; and again after each new peak, because the first backward leaves more behind.
            self._quiet = self._read()
            self._stale = False
        self._stage, self._thread = name, threading.get_ident()

    def report(self, plan: Plan | None, promised_bytes: int) -> MemoryReport:
        """The peak since ``watch``. Raises ``ValueError`` if nobody has watched, ``LohanError`` if watching failed."""
        if self._watch is None or self._peak is None or self._quiet is None:
            raise ValueError("nobody has watched this model's memory: make a lohan_fx.Monitor(model) before training")
        self._watch.raise_error()
        peak_bytes = process_memory.peak_rss_bytes()
        rows = self._rows(self._quiet, self._peak)
        rest = peak_bytes - sum(nbytes for _, nbytes in rows)
        planned = _planned(plan, self._before.rss_bytes - self._original_bytes) if plan is not None else {}
        found = [MemoryRow(purpose, nbytes, planned.get(purpose)) for purpose, nbytes in rows]
        return MemoryReport(
            peak_bytes, promised_bytes, self._peak.stage, self._peak.op, (*found, MemoryRow(UNACCOUNTED, rest))
        )

    def expected_peak_bytes(self, added_bytes: int, hole_bytes: int = EXPECTED_HOLE_BYTES) -> int:
        """What the process will have in RAM at the peak: what is there, what steps add (``expected_peak``), and holes in the
        heap. To be asked between two steps."""
        return added_bytes + hole_bytes + self._elsewhere(self._read())

    def left_bytes(self) -> int:
        """What the process has come to have since ``compile`` that the runtime does not speak of: captured graphs, and what they
        have left. To be asked between two steps."""
        return self._elsewhere(self._read()) - self._before_bytes

    @property
    def _before_bytes(self) -> int:
        return max(0, self._before.rss_bytes - self._original_bytes - self._before.free_bytes)

    def _elsewhere(self, books: _Books) -> int:
        """Between two steps: what the process has that the runtime does not speak of, without what is free."""
        return books.process.rss_bytes - books.process.free_bytes - books.runtime_bytes

    def _rows(self, quiet: _Books, peak: _Books) -> list[tuple[str, int]]:
        left = self._elsewhere(quiet) - self._before_bytes
        graphs = (peak.process.used_bytes - peak.malloc_bytes) - (quiet.process.used_bytes - quiet.malloc_bytes)
        return [
            (BEFORE, self._before_bytes),
            (CAPTURED, left),
            (STAGING, peak.staging_bytes),
            (PARAMETERS, peak.use.parameter_bytes),
            (STATES, peak.use.state_bytes),
            (SWAPPED, peak.swapped_bytes),
            (GRADIENTS, peak.use.gradient_bytes),
            (LANDING, peak.landing_bytes),
            (VALUES, max(0, graphs) + peak.workspace_bytes - peak.use.gradient_workspace_bytes),
            (HOLES, peak.process.free_bytes),
        ]

    def _note(self) -> int:
        found = self._read()
        # A graph that ends meanwhile gives back more than books may be off by; then those before tell more of the peak.
        if self._peak is None or found.process.rss_bytes >= self._peak.process.rss_bytes:
            self._peak = found
        self._stale = True
        return found.process.rss_bytes

    def _read(self) -> _Books:
        stage, op, use = self._stage, _running(self._thread), self._use()
        touched = (_touched(ranges) for ranges in (use.staging, use.swapped, use.landing, use.workspace))
        return _Books(stage, op, process_memory.now(), use, *touched)


BEFORE = "the process before compile"
CAPTURED = "captured graphs and all else since"
STAGING = "staging buffers"
PARAMETERS = "parameters that stay"
STATES = "optimizer states that stay"
SWAPPED = "activations swapped to RAM"
GRADIENTS = "gradients that wait"
LANDING = "room for what drives bring"
VALUES = "activations and values at work"
HOLES = "free inside the heap"


def _planned(plan: Plan, before_bytes: int) -> dict[str, int]:
    """Bytes that ``plan`` has for each purpose, in host memory; nothing where it predicts nothing."""
    if plan.prediction is None:
        return {}
    shared = plan.device == "cpu"
    places = (Tier.DEVICE, Tier.HOST) if shared else (Tier.HOST,)
    device, host = resident_bytes(plan)
    waiting = sum(p.held_bytes for p in plan.parameters if p.gradient_home in places)
    parameters = sum(p.bytes for p in plan.parameters if p.home in places)
    # With the gradients and activations that are leaving, which the plan counts op by op.
    values = plan.prediction.peak_bytes["device"] - device if shared else 0
    found = {
        BEFORE: before_bytes,
        STAGING: staging_bytes(plan.windows, shared=shared),
        PARAMETERS: parameters,
        STATES: host + (device if shared else 0) - parameters - waiting,
        SWAPPED: plan.forwards * plan.bytes_of(Swap(Tier.HOST)),
        GRADIENTS: waiting,
        VALUES: values,
    }
    return found | {CAPTURED: before_bytes + plan.prediction.peak_bytes["host"] - sum(found.values())}


def _running(thread: int) -> str:
    """The op that ``thread`` executes, by the line of the graph's code that it is at; "" outside a graph."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(GRAPH_CODE):
            return linecache.getline(name, frame.f_lineno, frame.f_globals).partition(" = ")[0].strip()
        frame = frame.f_back
    return ""


def _touched(ranges: tuple[Range, ...]) -> int:
    return sum(process_memory.resident_bytes(address, nbytes) for address, nbytes in ranges)


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f}"
