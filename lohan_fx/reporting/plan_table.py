"""plan_table: a Plan as text: budgets, prediction, what happens to the activations, where the parameters live.

Rows stand for what is alike: activations of one layer kind with the same op, size and cost, and parameters of one
place in their layer with the same size and homes. Every number follows from the plan alone.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from lohan_fx.plan import (
    ActivationPlan,
    Decision,
    Division,
    Keep,
    ParameterPlan,
    Plan,
    Prediction,
    Recompute,
    Swap,
    Tier,
    Windows,
)
from lohan_fx.planning.budgets import MIB
from lohan_fx.planning.disk_space import disk_text
from lohan_fx.planning.memory_model import states_bytes
from lohan_fx.runtime.state_buffer import SMALL_ELEMENTS, small_buffers
from lohan_fx.units import format_bytes, format_flops, format_seconds

K = TypeVar("K")
T = TypeVar("T")

DECISIONS: tuple[tuple[str, Decision], ...] = (
    ("kept", Keep()),
    ("swap host", Swap(Tier.HOST)),
    ("swap nvme", Swap(Tier.NVME)),
    ("recomputed", Recompute()),
)


def plan_table(plan: Plan, checkpoints: int = 0) -> str:
    """The tables of ``plan``, without a newline at the end. ``checkpoints``: how many its store has room for."""
    parts = [_header(plan, checkpoints)]
    if plan.prediction is not None:
        parts.append(_prediction(plan.prediction))
    if plan.division is not None:
        parts.append(division_table(plan.division))
    parts += [_activations(plan.activations), _parameters(plan.parameters)]
    return "\n\n".join(part for part in parts if part)


def division_table(division: Division) -> str:
    """What each tier's memory is used for, what a step would take longer without, and what more of it would save."""
    rows = []
    for share in division.shares:
        saves = "needed" if share.saves_s == math.inf else format_seconds(share.saves_s) if share.saves_s else "-"
        rows.append([f"  {share.tier}", share.use.value, format_bytes(share.bytes), saves])
    worth = ", ".join(
        f"{format_seconds(rate * 2**30)} per GiB of {tier}" for tier, rate in division.per_byte_s.items() if rate
    )
    walk = format_seconds(division.walk_s) if division.walk_s < math.inf else "does not fit"
    gap = 1 - division.bound_s / division.step_s if division.step_s > 0 else 0.0
    return "\n".join(
        [
            *table(["memory of", "for", "bytes", "saves per step"], rows, left=(0, 1)),
            f"  more of it would save: {worth or 'nothing'}",
            f"  Algorithm 1 alone: {walk}; no plan is more than {gap:.1%} faster than this one",
        ]
    )


def plan_summary(plan: Plan, checkpoints: int = 0) -> str:
    """The same in short: of activations, parameters and states only how many bytes are where."""
    parts = [_header(plan, checkpoints)]
    if plan.prediction is not None:
        parts.append(_prediction(plan.prediction))
    if plan.division is not None:
        parts.append(division_table(plan.division))
    return "\n\n".join([*parts, _sums(plan)])


def _sums(plan: Plan) -> str:
    activations = [(name, [a.bytes for a in plan.activations if a.decision == d]) for name, d in DECISIONS]
    parameters = [(f"on {tier}", [p.bytes for p in plan.parameters if p.home is tier]) for tier in Tier]
    in_tier = {tier: [p for p in plan.parameters if p.states_home is tier] for tier in Tier}
    states = [(f"on {tier}", [states_bytes(p, plan.device) for p in found]) for tier, found in in_tier.items()]
    rows = []
    for name, places in (("activations", activations), ("parameters", parameters), ("states", states)):
        sizes = [f"{format_bytes(sum(found))} {place}" for place, found in places if found]
        rows.append([name, format_bytes(sum(sum(found) for _, found in places)), ", ".join(sizes)])
    return "\n".join(table(["bytes of", "in all", "of which"], rows, left=(0, 2)))


def _header(plan: Plan, checkpoints: int) -> str:
    shared = " (the device's memory is part of it)" if plan.device == "cpu" else ""
    lines = [
        f"plan: policy {plan.policy}, on {plan.device}, in {plan.compute_dtype}",
        f"budgets: host {format_bytes(plan.host_memory_bytes)}{shared}, "
        f"device {format_bytes(plan.device_memory_bytes)}",
        *windows_lines(plan.windows),
        f"disk: {disk_text(plan, checkpoints)}",
    ]
    if plan.forwards > 1:
        lines.append(f"forwards: {plan.forwards} wait for their backwards at once, and each keeps its activations")
    if not plan.loss_only and plan.outputs_bytes >= MIB:
        lines.append(
            f"outputs: {format_bytes(plan.outputs_bytes)}, which the caller may hold until after the next call"
        )
    return "\n".join([*lines, *(f"note: {note}" for note in plan.notes)])


def windows_lines(windows: Windows) -> list[str]:
    """How far movements run ahead on the device, and the buffers in host memory."""
    return [
        f"windows: fetch {format_bytes(windows.fetch_bytes)}, swap in {format_bytes(windows.swap_in_bytes)}, "
        f"swap out {format_bytes(windows.swap_out_bytes)}, gradients {format_bytes(windows.gradient_bytes)}",
        f"staging: {windows.io_buffers} buffers of {format_bytes(windows.io_bytes)} per lane, "
        f"{windows.optimizer_buffers} of {windows.chunk_elements:,} elements for the optimizer{_small(windows)}, "
        f"{windows.gradient_buffers} for gradients",
    ]


def _small(windows: Windows) -> str:
    count = small_buffers(windows)
    return f" and {count} of {SMALL_ELEMENTS:,}" if count else ""


def _prediction(prediction: Prediction) -> str:
    stages = [("forward", prediction.forward), ("backward", prediction.backward)]
    stages += [("optimizer", prediction.optimizer)] if prediction.optimizer.lanes_s else []
    lanes = list(dict.fromkeys(lane for _, stage in stages for lane in stage.lanes_s))
    rows = [
        [f"  {name}", format_seconds(stage.seconds), stage.bottleneck]
        + [format_seconds(stage.lanes_s.get(lane, 0.0)) for lane in lanes]
        for name, stage in stages
    ]
    peaks = ", ".join(f"{tier} {format_bytes(nbytes)}" for tier, nbytes in prediction.peak_bytes.items())
    return "\n".join(
        [
            *table(["predicted", "bound", "by", *lanes], rows, left=(0, 2)),
            f"  step      {format_seconds(prediction.step_s)}",
            f"  FLOPs     {format_flops(prediction.flops)}, and {format_flops(prediction.recompute_flops)} recomputed",
            f"  peak      {peaks}",
            f"  NVMe      {format_bytes(prediction.nvme_read_bytes)} read, "
            f"{format_bytes(prediction.nvme_write_bytes)} written per step",
        ]
    )


# --- activations ----------------------------------------------------------------------------------------------


def _activations(activations: Sequence[ActivationPlan]) -> str:
    if not activations:
        return ""
    layers = _grouped(activations, lambda a: a.layer_kind)
    kinds = {kind: len({a.layer for a in found}) for kind, found in layers.items()}
    alike = _grouped(activations, lambda a: (a.layer_kind, a.op, a.mandatory, a.bytes, a.flops))
    rows = []
    for (kind, op, mandatory, nbytes, flops), found in alike.items():
        name = f"{kind} x{kinds[kind]}" if kinds[kind] > 1 else kind
        each = [format_bytes(nbytes), format_flops(flops), _ratio(found[0].benefit)]
        rows.append([f"  {name}", op + " *" * mandatory, str(len(found)), *each, *_decided(found)])
    total = ["  all", "", str(len(activations)), "", "", "", *_decided(activations)]
    columns = ["activations", "op", "count", "bytes each", "FLOPs each", "FLOP/B", *(name for name, _ in DECISIONS)]
    legend = ["  * must be saved"] if any(a.mandatory for a in activations) else []
    return "\n".join([*table(columns, [*rows, total], left=(0, 1)), *legend])


def _decided(activations: Iterable[ActivationPlan]) -> list[str]:
    """Per decision how many of these there are, and their bytes."""
    cells = []
    for _, decision in DECISIONS:
        sizes = [a.bytes for a in activations if a.decision == decision]
        cells.append(f"{len(sizes)} ({format_bytes(sum(sizes))})" if sizes else "-")
    return cells


def _ratio(benefit: float) -> str:
    return f"{benefit:,.1f}" if benefit else "0"


# --- parameters -----------------------------------------------------------------------------------------------


def _parameters(parameters: Sequence[ParameterPlan]) -> str:
    alike = _grouped(parameters, lambda p: dataclasses.replace(p, name=_numbers_out(p.name), layer=""))
    rows = []
    # Rows of one name stand together, whatever the homes.
    by_name = _grouped(alike.values(), lambda found: _numbers_out(found[0].name))
    for found in (found for group in by_name.values() for found in group):
        first = found[0]
        states = str(first.states_home) if first.states_home is not None else "-"
        runs = first.optimizer_runs.replace("_", " ") if first.trainable else "frozen"
        runs += f", gradient waits on {first.gradient_home}" if first.gradient_home is not None else ""
        runs += ", states in the backward" if first.updated_twice else ""
        size = [str(len(found)), f"{first.numel:,}", format_bytes(first.bytes)]
        rows.append([f"  {_names(found)}", *size, str(first.home), states, runs])
    total = [
        str(len(parameters)),
        f"{sum(p.numel for p in parameters):,}",
        format_bytes(sum(p.bytes for p in parameters)),
    ]
    columns = ["parameters", "count", "numel each", "bytes each", "home", "states", "updated"]
    return "\n".join(table(columns, [*rows, ["  all", *total, "", "", ""]], left=(0, 4, 5, 6)))


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)")


def _numbers_out(name: str) -> str:
    """``name`` without the number of its layer, which is its first component that is a number."""
    return _NUMBER.sub("*", name, count=1)


def _names(parameters: Sequence[ParameterPlan]) -> str:
    """One name for parameters that differ in their layer's number: ``model.layers.0-5.mlp.up_proj.weight``."""
    numbers = sorted({int(found.group()) for p in parameters if (found := _NUMBER.search(p.name))})
    return _NUMBER.sub(ranges(numbers), parameters[0].name, count=1)


def ranges(numbers: Sequence[int]) -> str:
    """Ascending whole numbers in short: ``0-3,7``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


# --- text -----------------------------------------------------------------------------------------------------


def _grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """The items by key, in the order in which the keys first appear."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: Sequence[int]) -> list[str]:
    """Lines with aligned columns: those in ``left`` to the left, the others to the right."""
    lines = [columns, *rows]
    widths = [max(len(line[place]) for line in lines) for place in range(len(columns))]
    return [
        "  ".join(
            cell.ljust(width) if place in left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
