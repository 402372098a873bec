"""policy_table: the policies as text: what goes where, which of them run."""

from __future__ import annotations

from lohan_fx.policies import ALL
from lohan_fx.reporting.plan_table import table

COLUMNS = ("policy", "source", "parameters", "states", "gradients", "optimizer", "activations", "runs")


def policies() -> str:
    """A line for each ``policy=`` that ``compile`` and ``lohan-fx plan`` take: where its parameters, optimizer states,
    gradients and activations go, when its optimizer runs, and whether this runtime executes it; below, why some are
    only planned and simulated. Without a newline at the end."""
    rows = [
        [p.name, p.source, p.parameters, p.states, p.gradients, p.optimizer, p.activations, "yes" if p.runs else "no"]
        for p in ALL
    ]
    reasons = [f"{p.name} is planned and simulated only: {p.why_not}" for p in ALL if not p.runs]
    return "\n".join([*table(COLUMNS, rows, left=tuple(range(len(COLUMNS)))), "", *reasons])
