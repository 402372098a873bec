"""What the solver prints beneath Python does not reach standard output; what others print meanwhile does."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import numpy as np
import pytest
from scipy.optimize import Bounds, LinearConstraint, OptimizeResult

from lohan_fx.passes import solver


def test_its_debug_line_is_left_out(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    solved = OptimizeResult(status=0)

    def noisy(*args: object, **options: object) -> OptimizeResult:
        assert (args, options) == ((1,), {"two": 2, "options": {}})
        ctypes.CDLL(None).printf(solver.NOISE)  # stays in C's buffer, as that of HiGHS may
        os.write(1, b"another thread's\n")
        return solved

    monkeypatch.setattr(solver.optimize, "milp", noisy)
    print("before", flush=True)
    assert solver.milp(1, two=2) is solved
    print("after", flush=True)
    assert capfd.readouterr().out == "before\nanother thread's\nafter\n"


def test_an_error_leaves_standard_output_as_it_was(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(**options: object) -> None:
        raise ValueError("no such problem")

    monkeypatch.setattr(solver.optimize, "milp", failing)
    with pytest.raises(ValueError, match="no such problem"):
        solver.milp()
    print("after", flush=True)
    assert capfd.readouterr().out == "after\n"


def test_it_solves_where_standard_output_is_closed() -> None:
    code = (
        "import os, sys; os.close(1); import numpy as np; from lohan_fx.passes.solver import milp; "
        "sys.exit(int(milp(np.array([1.0]), integrality=np.array([1])).x[0]))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_it_is_scipys() -> None:
    result = solver.milp(np.array([-1.0]), integrality=np.array([1]), bounds=(0, 2.5))
    assert result.x.tolist() == [2.0]


def test_what_presolve_fails_at_is_solved_without(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def failing(*args: object, **options: object) -> OptimizeResult:
        asked.append((args, options))
        return OptimizeResult(status=solver.FAILED if len(asked) == 1 else 0)

    monkeypatch.setattr(solver.optimize, "milp", failing)
    assert solver.milp(1, options={"time_limit": 3.0}).status == 0
    assert asked == [
        ((1,), {"options": {"time_limit": 3.0}}),
        ((1,), {"options": {"time_limit": 3.0, "presolve": False}}),
    ]


def test_a_limit_of_nodes_is_a_limit_and_the_same_whatever_the_time() -> None:
    """A knapsack of twenty rows that takes some thousands of nodes: what is known where they end comes back."""
    weights = np.random.default_rng(0).integers(1, 100, (20, 60))
    options = {"node_limit": 50, "time_limit": 60.0}
    rows = LinearConstraint(weights, -np.inf, weights.sum(1) / 2)
    costs, whole, bounds = -weights.sum(0).astype(float), np.ones(60), Bounds(0, 1)
    once, again = (
        solver.milp(costs, integrality=whole, bounds=bounds, constraints=rows, options=options) for _ in range(2)
    )
    assert once.status == again.status == solver.LIMITED
    assert once.mip_node_count == again.mip_node_count == 50
    assert once.x.tolist() == again.x.tolist() and once.mip_dual_bound < once.fun < 0
    assert options == {"node_limit": 50, "time_limit": 60.0}
