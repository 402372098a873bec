"""solver: scipy's ``milp``, without the debug line that its HiGHS prints on standard output whatever it is told, and once
more where HiGHS fails.

HiGHS 1.12, of scipy 1.17, prints it now and then with all output switched off (its issue 2783); among the lines of
``lohan-fx plan --json`` nobody could read those any more. It comes from C, beneath ``sys.stdout``. So while HiGHS
runs, what is written to the file descriptor goes to a file, and on to where it was meant for afterwards, that line left out.

With presolve it ends some problems, small ones too, with an error, which it solves without. An error says nothing of a
problem, and must not pass for "nothing fits".
"""

from __future__ import annotations

import ctypes
import os
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from scipy import optimize

NOISE = b"HighsMipSolverData::transformNewIntegerFeasibleSolution tmpSolver.run();\n"
FAILED, LIMITED = 4, 1
"""Statuses of a result: none of solved, out of time, infeasible and unbounded; and out of time or iterations."""
_STDOUT = 1
_one_at_a_time = threading.Lock()


def milp(*args: Any, options: Mapping[str, Any] | None = None, **more: Any) -> optimize.OptimizeResult:
    """``scipy.optimize.milp`` of the same arguments; without presolve where that fails with it. Status 1 where a limit, of time
    or of nodes, ended it."""

    def solved(**others: bool) -> optimize.OptimizeResult:
        # scipy takes what it reads out of the options that it is given.
        return optimize.milp(*args, options={**(options or {}), **others}, **more)

    with _one_at_a_time, _without_noise():
        result = solved()
        if result.status == FAILED and not _ended_by_nodes(result):
            result = solved(presolve=False)
        if _ended_by_nodes(result):
            result.status = LIMITED
        return result


def _ended_by_nodes(result: optimize.OptimizeResult) -> bool:
    """scipy 1.17 calls this an error."""
    return "Solution limit reached" in result.get("message", "")


@contextmanager
def _without_noise() -> Iterator[None]:
    try:
        before = os.dup(_STDOUT)
    except OSError:  # it is closed: nothing can be printed
        yield
        return
    with tempfile.TemporaryFile() as aside:
        _flush()
        os.dup2(aside.fileno(), _STDOUT)
        try:
            yield
        finally:
            _flush()
            os.dup2(before, _STDOUT)
            os.close(before)
            aside.seek(0)
            rest = memoryview(aside.read().replace(NOISE, b""))
            while rest:
                rest = rest[os.write(_STDOUT, rest) :]


def _flush() -> None:
    """Bring what C has buffered for any file to it."""
    ctypes.CDLL(None).fflush(None)
