"""formulas: how the seconds of a forecast come about: our formula and those of the policy's system, term by term.

The papers' symbols stand for what this plan moves on this profile. Rates that the papers measured of a baseline (what
ZeRO-Infinity and Colossal-AI get from the drives, the link's rate to pageable memory) are the profile's own here: the
most that those systems could reach.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lohan_fx import cost
from lohan_fx.cost_models import lohan
from lohan_fx.cost_models.formula import CostModel
from lohan_fx.forecasting.forecast import Forecast
from lohan_fx.plan import Recompute
from lohan_fx.planning.budgets import mean_request_bytes
from lohan_fx.policies import named
from lohan_fx.reporting.plan_table import table
from lohan_fx.units import format_seconds

HALF_BYTES = 2
PERCENT = 0.01
EFFECT_S = 1e-6
"""Seconds of a step: what one per cent changes by less is left out of the table."""
_OF_DRIVES = {"BW_S2M", "BW_M2S", "BW_S2C", "BW_C2S", "BW_SSD", "BW_OPT"}
_AT_BEST = {"BW_SSD": "the drives give", "BW_OPT": "the drives give", "BW_PAGE": "the link gives"}


def formulas(found: Forecast) -> tuple[CostModel, ...]:
    """Ours, of which the forecast's seconds are, and those that the papers have for the policy's system; without drives only
    those that need none."""
    theirs = named(found.plan.policy).formulas
    if not found.asked.hw.nvme:
        theirs = tuple(model for model in theirs if not _OF_DRIVES & set(model.names))
    return (lohan.CORRECTED, *theirs)


def symbol_values(found: Forecast) -> dict[str, float]:
    """What the symbols of all cost models stand for: ``lohan_fx.cost``'s names and the papers'."""
    plan, work = found.plan, found.work
    hw = found.asked.hw.at_requests(mean_request_bytes(plan.parameters, plan.windows))
    ours = cost.values(work, hw)
    parameters = float(sum(p.numel for p in plan.parameters))
    trained = sum(p.numel for p in plan.parameters if p.trainable)
    # LoHan's own definition of THP_G: FLOPs of the forward over its seconds (mechanisms B1); a model without matmuls has none.
    flops = float(found.forward_flops)
    rate = flops / work.forward_s if flops and work.forward_s else hw.matmul_rate(found.asked.compute_dtype)
    free_host = plan.host_memory_bytes - found.prediction.peak_bytes["host"]
    mixed = min(ours["ssd_mixed_bytes_per_s"], hw.ssd_read_bytes_per_s, hw.ssd_write_bytes_per_s) or cost.NO_DRIVE
    adam_s = cost.update_s(trained, hw)
    link = min(hw.h2d_bytes_per_s, hw.d2h_bytes_per_s)
    drives = float(max(len(hw.nvme), 1))
    return {
        **ours,
        "FLOP_f": flops,
        "FLOP_r": work.recompute_s * rate,
        "THP_G": rate,
        **dict.fromkeys(("P", "p"), parameters),
        **dict.fromkeys(("A_G2M", "D_f"), float(work.swapped_bytes)),
        "A_all": float(sum(a.bytes for a in plan.activations if not isinstance(a.decision, Recompute))),
        "A_inter": float(sum(a.bytes for a in plan.activations if a.mandatory)),
        "MEM_avail": float(work.swapped_bytes - work.swapped_nvme_bytes + max(free_host, 0)),
        **dict.fromkeys(("BW_G", "BW_GPU", "BW_PAGE"), link),
        "BW_S2M": ours["ssd_read_bytes_per_s"],
        "BW_M2S": ours["ssd_write_bytes_per_s"],
        "BW_S2C": ours["ssd_read_bytes_per_s"] / drives,
        "BW_C2S": ours["ssd_write_bytes_per_s"] / drives,
        "N": drives,
        **dict.fromkeys(("BW_SSD", "BW_OPT"), mixed),
        "ADAM": hw.adam_parameters_per_s,
        "BW_M": hw.host_memory_bytes_per_s,
        "BW_GPU_MEM": hw.memory_bytes_per_s,
        **dict.fromkeys(("T_f_comp", "T_FWD"), work.forward_s),
        "RC": work.recompute_s,
        "T_BWD": work.backward_s + work.recompute_s,
        **dict.fromkeys(("T_o_comp", "T_UPD"), adam_s),
        "T_D2H": 2 * parameters / link,
        "T_H2D": 2 * parameters / link,
    }


def formula_text(found: Forecast, *, names: bool = False) -> str:
    """All formulas with numbers (or with ``names``), each with the slopes of what binds; without a newline at the end."""
    policy, values = named(found.plan.policy), symbol_values(found)
    parts = [_one(model, values, names=names) for model in formulas(found)]
    parts[0] = f"the formula that the seconds above are by, of what policy {policy.name} moves\n{parts[0]}"
    if not policy.formulas:
        why = (
            f"policy {policy.name} has no formula of its own in the papers: the one above is what its plan is judged by"
        )
        return "\n\n".join([*parts, why])
    if len(parts) == 1:
        return f"{parts[0]}\n\n{policy.source}'s own formula needs drives, which {found.asked.hw.name!r} has not"
    parts[1] = f"{policy.source}'s own, with what this plan moves on this machine\n{parts[1]}"
    used = {name for model in policy.formulas for name in model.names}
    best = [
        f"{name} is what the {whose} of the profile give at most" for name, whose in _AT_BEST.items() if name in used
    ]
    if any(not p.trainable or p.bytes != HALF_BYTES * p.numel for p in found.plan.parameters):
        best.append("it counts every parameter as trained, in half precision, which this model's are not")
    return "\n\n".join([*parts, *(["; ".join(best)] if best else [])])


def formula_data(found: Forecast) -> list[dict[str, Any]]:
    """The same as JSON-ready data: per formula its text, seconds, binding lanes, and slopes (s per unit)."""
    values = symbol_values(found)
    return [
        {
            "name": model.name,
            "formula": model.formula(),
            "with_numbers": model.formula(values),
            "seconds": model.seconds(values),
            "binding": model.binding(values),
            "slopes": _numbers(model, values),
        }
        for model in formulas(found)
    ]


def _one(model: CostModel, values: Mapping[str, float], *, names: bool) -> str:
    binding = "; ".join(f"{lane} in {stage}" for stage, lane in model.binding(values).items())
    lines = [model.formula(None if names else values), f"largest: {binding}"]
    return "\n".join([*lines, *_slopes(model, values, names=names)])


def _slopes(model: CostModel, values: Mapping[str, float], *, names: bool) -> list[str]:
    """A row per symbol that the seconds depend on here, the most effective first."""
    expressions, rows = model.slopes(values), []
    numbers = _numbers(model, values)
    one_percent = {name: slope * values[name] * PERCENT for name, slope in numbers.items()}
    for name in sorted(one_percent, key=lambda name: -abs(one_percent[name])):
        if abs(one_percent[name]) < EFFECT_S:
            continue
        slope = str(expressions[name]) if names else f"{numbers[name]:.3g}"
        changed = format_seconds(abs(one_percent[name]))
        sign = "+" if one_percent[name] > 0 else "-"
        rows.append([f"  {name}", f"{values[name]:.4g}", f"{sign}{changed}", slope])
    if not rows:
        return ["nothing here changes its seconds"]
    return table(["what changes it", "is", "1% more: T", "dT/d"], rows, left=(0, 3))


def _numbers(model: CostModel, values: Mapping[str, float]) -> dict[str, float]:
    found = {}
    for name, slope in model.slopes(values).items():
        number = float(slope.subs({s: values[s.name] for s in slope.free_symbols}))
        if math.isfinite(number):
            found[name] = number
    return found
