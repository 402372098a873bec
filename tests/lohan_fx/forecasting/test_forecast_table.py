"""forecast_table: which lane binds, and by how much; how much work is done twice."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lohan_fx.forecasting.forecast_table import _binding, _recomputed
from lohan_fx.plan import Decision, Keep, Recompute, Stage


@pytest.mark.parametrize(
    ("lanes_s", "said"),
    [
        ({"compute": 4.0, "ssd": 2.0, "fetches": 3.0}, "compute: 4.00 s, 100% more than ssd"),
        ({"compute": 2.0, "ssd": 4.0, "fetches": 3.0}, "ssd: 4.00 s, 100% more than compute"),
        (
            {"compute": 2.0, "h2d": 1.0, "ssd": 3.9, "fetches": 4.0},
            "ssd with compute behind the last fetch: 4.00 s, 100% more than compute",
        ),
        (
            {"compute": 3.0, "ssd": 2.5, "updates": 4.5, "cpu": 3.6},
            "ssd with compute before the first gradient: 4.50 s, 25% more than cpu",
        ),
        ({"compute": 2.0, "ssd": 0.0, "fetches": 0.0}, "compute, alone"),
        ({"ssd": 0.0, "cpu": 1.0}, "cpu, alone"),
    ],
)
def test_the_margin_is_that_over_the_next_lane(lanes_s: dict[str, float], said: str) -> None:
    assert _binding(Stage(lanes_s)) == said


@pytest.mark.parametrize(
    ("decision", "again_flops", "said"),
    [
        (Keep(), 0, "nothing done twice"),
        (Recompute(), 0, "and hardly any work done twice"),  # pointwise ops, say
        (Recompute(), 4, "and hardly any work done twice"),
        (Recompute(), 100, "and 10% of the work done twice"),
    ],
)
def test_what_is_done_twice(decision: Decision, again_flops: int, said: str) -> None:
    plan = SimpleNamespace(activations=[SimpleNamespace(decision=Keep()), SimpleNamespace(decision=decision)])
    prediction = SimpleNamespace(flops=1000, recompute_flops=again_flops)
    found: Any = SimpleNamespace(plan=plan, prediction=prediction)
    assert _recomputed(found) == said
