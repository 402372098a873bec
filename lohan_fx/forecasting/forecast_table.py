"""forecast_table: a forecast as text for people and as data for programs."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from lohan_fx.forecasting.forecast import PRICE_YEARS, Forecast
from lohan_fx.plan import FETCHES_BOUND, UPDATES_BOUND, Division, OptimizerTiming, Recompute, Stage, Tier
from lohan_fx.planning.disk_space import capacity_bytes, disk_text, stored_bytes
from lohan_fx.planning.memory_model import states_bytes
from lohan_fx.reporting.plan_table import DECISIONS, division_table, table, windows_lines
from lohan_fx.simulation.simulated_waits import WORTH_A_REASON, waits_s
from lohan_fx.simulation.simulator import Simulation
from lohan_fx.units import format_bytes, format_seconds

LEAST = 0.005
"""Share of a step below which a wait is not worth a word, and of the work below which its share is not."""
_TIERS = {
    Tier.DEVICE: "fits on the device",
    Tier.HOST: "fits with host memory, without a drive",
    Tier.NVME: "fits with NVMe",
}
_TIMINGS = {
    OptimizerTiming.AFTER_BACKWARD: "after the backward",
    OptimizerTiming.NEXT_FORWARD: "beside the next forward",
}
_ENDS = {FETCHES_BOUND: " with compute behind the last fetch", UPDATES_BOUND: " with compute before the first gradient"}
_COUNTS = {"tokens": "tokens/s", "images": "images/s", "samples": "samples/s"}


def forecast_text(found: Forecast) -> str:
    """The whole answer, without a newline at the end."""
    subject, hw = found.subject, found.asked.hw
    has_tokens = subject.unit == "tokens" or subject.tokens > subject.samples
    shape = f"{subject.samples} x {subject.tokens // subject.samples} tokens" if has_tokens else ""
    lines = [
        f"{subject.name}: {_billions(subject.parameters)} parameters, {shape or _counted(subject.samples, 'sample')} per step, "
        f"policy {found.plan.policy}",
        f"on {hw.name}: {hw.device_name}, {format_bytes(found.plan.host_memory_bytes)} of host memory and "
        f"{format_bytes(found.plan.device_memory_bytes)} of the device's to use, {_counted(len(hw.nvme), 'drive')}",
        *(f"note: {note}" for note in found.notes),
        "",
        *table(["", ""], [["  " + name, value] for name, value in _answers(found)], left=(0, 1))[1:],
        "",
        *_stages(found),
        "",
        *_where(found),
        "",
        *([division_table(found.plan.division), ""] if found.plan.division is not None else []),
        *windows_lines(found.plan.windows),
        "",
        *_assumptions(found),
    ]
    return "\n".join(lines)


def _answers(found: Forecast) -> list[tuple[str, str]]:
    prediction, peaks = found.prediction, found.prediction.peak_bytes
    rows = [("fits", f"yes: {_TIERS[found.lowest_tier]}"), ("step", f"{format_seconds(found.step_s)} by formula")]
    if found.simulation is not None:
        simulated_s = found.simulation.step_s
        rows.append(("", f"{format_seconds(simulated_s)} simulated, {simulated_s / found.step_s - 1:+.1%}"))
        rows += _why_simulated_differs(found.simulation, found.step_s)
    rows += [
        ("throughput", _throughput(found)),
        ("compute", f"{found.flops_per_s / 1e12:,.1f} TFLOPS, {_recomputed(found)}"),
        *((f"bound in {name}", _binding(stage)) for name, stage in found.stages.items()),
        ("peak on device", f"{format_bytes(peaks['device'])} of {format_bytes(found.plan.device_memory_bytes)}"),
        ("peak in host memory", f"{format_bytes(peaks['host'])} of {format_bytes(found.plan.host_memory_bytes)}"),
    ]
    rows += [("updates", text) for text in _updates(found)]
    hw = found.asked.hw
    disk = f" of {format_bytes(capacity_bytes(hw)[0])}" if hw.nvme else ""
    rows += [
        ("disk needed", f"{format_bytes(found.disk_bytes)}{disk}"),
        ("", disk_text(found.plan, found.asked.checkpoints)),
        (
            "NVMe traffic",
            f"{format_bytes(prediction.nvme_read_bytes)} read and {format_bytes(prediction.nvme_write_bytes)} written per step",
        ),
        ("drive wear", _wear(found)),
    ]
    if found.usd_per_million is not None:
        rows.append(("cost", f"${found.usd_per_million:,.3g} per million {found.subject.unit}"))
    return rows


def _updates(found: Forecast) -> list[str]:
    """When parameters are updated, where it is not in the backward, and where their gradients wait for it."""
    texts = []
    for timing, when in _TIMINGS.items():
        put_off = [p for p in found.plan.parameters if p.optimizer_runs is timing]
        if not put_off:
            continue
        waiting = {tier: sum(p.held_bytes for p in put_off if p.gradient_home is tier) for tier in Tier}
        where = [f"{format_bytes(nbytes)} on {tier}" for tier, nbytes in waiting.items() if nbytes]
        twice = sum(p.numel for p in put_off if p.updated_twice)
        again = f", of {_billions(twice)} once more beside the backward, which writes the states" if twice else ""
        texts.append(
            f"of {_billions(sum(p.numel for p in put_off))} parameters {when}{again}; gradients wait: {', '.join(where)}"
        )
    return texts


def _why_simulated_differs(simulation: Simulation, formula_s: float) -> list[tuple[str, str]]:
    """Where it does by much: the formula takes every lane as always at work, and leaves out filling and draining."""
    if abs(simulation.step_s / formula_s - 1) <= WORTH_A_REASON:
        return []
    waits = [f"{format_seconds(s)} for {kind}" for kind, s in waits_s(simulation).items() if s > LEAST * formula_s]
    return [("", f"because compute waits: {'; '.join(waits)}")] if waits else []


def _throughput(found: Forecast) -> str:
    subject, by = found.subject, "by formula" if found.simulation is None else "as simulated"
    if subject.unit == "images":
        return f"{format_rate(found.samples_per_s)} images/s ({format_rate(found.tokens_per_s)} tokens/s), {by}"
    return f"{format_rate(found.tokens_per_s)} {_COUNTS[subject.unit]}, {by}"


def format_rate(per_s: float) -> str:
    """``55.5``, ``8,731``: at least three digits, and no exponent where there are many."""
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:,.3g}"


def _recomputed(found: Forecast) -> str:
    if not any(isinstance(a.decision, Recompute) for a in found.plan.activations):
        return "nothing done twice"
    again = found.prediction.recompute_flops / found.prediction.flops if found.prediction.flops else 0.0
    return f"and {again:.0%} of the work done twice" if again >= LEAST else "and hardly any work done twice"


def _binding(stage: Stage) -> str:
    """Which lane binds, with compute at one end of it where that counts, and by how much more than the next one."""
    others = {lane: seconds for lane, seconds in stage.work_s.items() if lane != stage.bottleneck}
    first, second = f"{stage.bottleneck}{_ENDS.get(stage.bound, '')}", max(others, key=lambda lane: others[lane])
    if not others[second]:
        return f"{first}, alone"
    return f"{first}: {format_seconds(stage.seconds)}, {stage.seconds / others[second] - 1:.0%} more than {second}"


def _wear(found: Forecast) -> str:
    if found.wear_years is None:
        return "none: nothing is written"
    return f"{found.wear_years:,.1f} years of uninterrupted training until the rated writes are used up"


def _stages(found: Forecast) -> list[str]:
    lanes = list(dict.fromkeys(lane for stage in found.stages.values() for lane in stage.lanes_s))
    rows = [
        [f"  {name}", format_seconds(stage.seconds), *(format_seconds(stage.lanes_s.get(lane, 0.0)) for lane in lanes)]
        for name, stage in found.stages.items()
    ]
    return table(["seconds by lane", "bound", *lanes], rows, left=(0,))


def _where(found: Forecast) -> list[str]:
    plan = found.plan
    homes = [("device", Tier.DEVICE), ("host", Tier.HOST), ("NVMe", Tier.NVME)]
    parameters = {text: sum(p.bytes for p in plan.parameters if p.home is tier) for text, tier in homes}
    states = {
        text: sum(states_bytes(p, plan.device) for p in plan.parameters if p.states_home is tier)
        for text, tier in homes
    }
    activations = {
        "device" if name == "kept" else name.replace("swap host", "host").replace("swap nvme", "NVMe"): sum(
            a.bytes for a in plan.activations if a.decision == decision
        )
        for name, decision in DECISIONS
        if not isinstance(decision, Recompute)
    }
    again = sum(a.bytes for a in plan.activations if isinstance(a.decision, Recompute))
    rows = []
    for name, sizes, extra in (
        ("parameters", parameters, 0),
        ("optimizer states", states, 0),
        ("activations", activations, again),
    ):
        cells = [format_bytes(sizes[text]) if sizes[text] else "-" for text, _ in homes]
        rows.append([f"  {name}", *cells, format_bytes(extra) if extra else "-"])
    return table(["what is where", *(text for text, _ in homes), "recomputed"], rows, left=(0,))


def _assumptions(found: Forecast) -> list[str]:
    lines = ["assumed: drives are rated for one full write a day for five years (data-centre drives; others a third)"]
    if found.machine_usd is not None:
        lines.append(
            f"assumed: ${found.machine_usd:,.0f} for the machine, spread over {PRICE_YEARS} years of use; power is left out"
        )
    return lines


def _counted(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'' if number == 1 else 's'}"


def _billions(count: int) -> str:
    return f"{count / 1e9:,.4g}e9" if count >= 1e8 else f"{count:,}"


def forecast_data(found: Forecast) -> dict[str, Any]:
    """The same as JSON-ready data in SI units."""
    prediction, simulation = found.prediction, found.simulation
    return {
        "fits": True,
        "model": found.subject.name,
        "policy": found.plan.policy,
        "hardware": found.asked.hw.name,
        "parameters": found.subject.parameters,
        "samples": found.subject.samples,
        "tokens": found.subject.tokens,
        "lowest_tier": found.lowest_tier.value,
        "step_s": found.step_s,
        "simulated_step_s": None if simulation is None else simulation.step_s,
        "simulated_waits_s": None if simulation is None else waits_s(simulation),
        "tokens_per_s": found.tokens_per_s,
        "samples_per_s": found.samples_per_s,
        "flops_per_s": found.flops_per_s,
        "flops": prediction.flops,
        "recompute_flops": prediction.recompute_flops,
        "lanes_s": {name: dict(stage.lanes_s) for name, stage in found.stages.items()},
        "bottleneck": {name: stage.bottleneck for name, stage in found.stages.items()},
        "peak_bytes": dict(prediction.peak_bytes),
        "budget_bytes": {"device": found.plan.device_memory_bytes, "host": found.plan.host_memory_bytes},
        "windows": dataclasses.asdict(found.plan.windows),
        "division": _division_data(found.plan.division),
        "disk_bytes": found.disk_bytes,
        "forwards": found.asked.forwards,
        "loss_only": found.asked.loss_only,
        "checkpoints": found.asked.checkpoints,
        "bytes_per_checkpoint": stored_bytes(found.plan),
        "nvme_read_bytes": prediction.nvme_read_bytes,
        "nvme_write_bytes": prediction.nvme_write_bytes,
        "wear_years": found.wear_years,
        "usd_per_million_tokens": found.usd_per_million if found.subject.unit == "tokens" else None,
        "usd_per_million_samples": None if found.subject.unit == "tokens" else found.usd_per_million,
        "notes": list(found.notes),
    }


def _division_data(division: Division | None) -> list[dict[str, Any]] | None:
    """What each use of memory saves; None in place of seconds where nothing goes without it."""
    if division is None:
        return None
    return [
        {
            "tier": share.tier.value,
            "use": share.use.value,
            "bytes": share.bytes,
            "saves_s": share.saves_s if share.saves_s < math.inf else None,
        }
        for share in division.shares
    ]
