"""dump: a compiled model or a plan as text that reads top to bottom, or as data.

The text is stable: the same model, inputs and hardware profile give the same text in every run, unless the profile is of this
machine, whose ops are timed. Tests compare it with golden files, so nothing in it may be an address or a slot number.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

from torch import nn

from lohan_fx import meta
from lohan_fx.compile import compiled
from lohan_fx.compiled_model import CompiledModel
from lohan_fx.passes.halves import Halves
from lohan_fx.plan import Plan
from lohan_fx.reporting.fold import Group, fold, relative_name
from lohan_fx.reporting.listing import Block, Line, Name, Read, listing, type_of
from lohan_fx.reporting.plan_table import plan_table


def dump(
    model_or_plan: nn.Module | Plan,
    *,
    format: Literal["text", "json"] = "text",
    unfold: bool = False,
    graph: int | None = None,
    width: int | None = None,
) -> str:
    """What the compiler decided, and the graphs it made.

    Of a plan: its tables. Of a compiled model: the tables of the plan and the rewritten forward and backward, one
    line per node. Layers whose listing is equal are shown once, with their count.

    Args:
        format: "text", or "json" for the same as data; there every node is listed, and the groups say what is equal.
        unfold: show every layer.
        graph: which of the captured graphs; None: the last one for training, or the last one if there is none; one of the
            whole model, or, where only parts of it were called (docs/0046), of a part.
        width: cut longer lines of the text to this many characters.

    Raises:
        TypeError: neither a module nor a plan.
        ValueError: the model is not compiled, or no graph has been captured yet, or an argument is not as above.
    """
    if format not in ("text", "json"):
        raise ValueError(f"format is {format!r}: expected 'text' or 'json'")
    if width is not None and width < 1:
        raise ValueError(f"width is {width}: expected at least 1 character, or None")
    if isinstance(model_or_plan, Plan):
        data: dict[str, Any] = {"plan": json.loads(model_or_plan.to_json())}
        return json.dumps(data, indent=2) if format == "json" else _cut([plan_table(model_or_plan)], width)
    if not isinstance(model_or_plan, nn.Module):
        raise TypeError(f"dump() takes a compiled model or a Plan; got {type(model_or_plan).__name__}")
    found = compiled(model_or_plan)
    plans, halves = found.plans, found.halves
    shown = _shown(found, graph)
    if format == "json":
        return json.dumps(_data(plans[shown], halves, shown, unfold=unfold), indent=2)
    checkpoints = found.engine.store.keeps
    return _cut(_text(plans[shown], halves, shown, checkpoints, unfold=unfold), width)


def _shown(found: CompiledModel, graph: int | None) -> int:
    """Which of the captured graphs to show."""
    main, count = found.main_graph(), len(found.halves)
    if main is None:
        raise ValueError("nothing has been captured yet: call the model, or lohan_fx.prepare(model, ...), before dump")
    if graph is not None:
        if not 0 <= graph < count:
            raise ValueError(f"graph is {graph}: {count} were captured, expected 0 to {count - 1}")
        return graph
    return main


def _inputs(halves: Halves) -> list[str]:
    """Types of what the model is called with, and of its buffers."""
    placeholders = halves.forward.graph.find_nodes(op="placeholder")
    return [type_of(meta.value(node)) for node in placeholders if node.name not in halves.parameters]


def _kind(halves: Halves) -> str:
    return "inference" if halves.backward is None else "training"


def _title_of(halves: Halves) -> str:
    part = f"{halves.module} by itself, " if halves.module else ""
    return f"{part}{_kind(halves)} of {', '.join(_inputs(halves))}"


# --- data -----------------------------------------------------------------------------------------------------


def _data(plan: Plan, captured: Sequence[Halves], shown: int, *, unfold: bool) -> dict[str, Any]:
    halves = captured[shown]
    graphs = {}
    for name, gm in halves.graphs():
        lines = listing(gm, halves, plan)
        graphs[name] = {
            "nodes": [_node(line, lines) for line in lines],
            "groups": [_group_data(group) for group in fold(lines, unfold=unfold)],
        }
    return {
        "plan": json.loads(plan.to_json()),
        "captured": [{"module": found.module, "kind": _kind(found), "inputs": _inputs(found)} for found in captured],
        "shown": shown,
        "graphs": graphs,
    }


def _node(line: Line, lines: Sequence[Line]) -> dict[str, Any]:
    return {
        "name": line.name,
        "type": line.type,
        "call": _call(line, lines, None),
        "reads": list(line.reads),
        "layer": line.layer,
        "lane": line.lane,
        "flops": line.flops,
        "bytes": line.bytes,
    }


def _group_data(group: Group) -> dict[str, Any]:
    """Nodes ``start`` to ``stop`` stand for ``repeats`` stretches of as many nodes, one after the other."""
    return {
        "start": group.segments[0].start,
        "stop": group.segments[-1].stop,
        "repeats": group.repeats,
        "layer": str(group.block) if group.block is not None else None,
        "layer_numbers": list(group.numbers),
    }


# --- text -----------------------------------------------------------------------------------------------------


def _text(plan: Plan, captured: Sequence[Halves], shown: int, checkpoints: int, *, unfold: bool) -> list[str]:
    text = ["captured graphs (> is shown below)"]
    for index, found in enumerate(captured):
        text.append(f"{'>' if index == shown else ' '} {index}: {_title_of(found)}")
    text += ["", plan_table(plan, checkpoints)]
    for name, gm in captured[shown].graphs():
        lines = listing(gm, captured[shown], plan)
        text += ["", f"{name}: {len(lines)} nodes"]
        for group in fold(lines, unfold=unfold):
            text += [f"  # {_title(group, lines)}", *_lines(group, lines)]
    return text


def _title(group: Group, lines: Sequence[Line]) -> str:
    """What the group stands for, and where its names come from."""
    first = group.segments[0]
    if group.block is None:
        inside = [line for line in lines[first.start : first.stop] if not line.is_start]
        layers = list(dict.fromkeys(line.layer for line in inside if line.layer))
        what = ", ".join(layers[:3]) + (", .." if len(layers) > 3 else "")
        return "inputs" if first.is_input else what or "outside of the layers"
    inputs = "inputs for " if first.is_input else ""
    if group.repeats == 1:
        return f"{inputs}{group.block}"
    layers = list(dict.fromkeys(_renamed(str(s.block), group.block) for s in group.segments if s.block is not None))
    return (
        f"{inputs}{', '.join(layers)} for i = {_progression(group.numbers)} (x{group.repeats} equal, "
        f"with the node names of i = {group.numbers[0]})"
    )


def _progression(numbers: Sequence[int]) -> str:
    """``1..4``, ``4..1`` or, where the step is another one, ``0, 2..6``."""
    start = f"{numbers[0]}" if abs(numbers[1] - numbers[0]) == 1 else f"{numbers[0]}, {numbers[1]}"
    return f"{start}..{numbers[-1]}"


def _lines(group: Group, lines: Sequence[Line]) -> list[str]:
    block = group.block if group.repeats > 1 else None
    shown = lines[group.segments[0].start : group.segments[-1].stop]
    return [f"    {f'{line.name}: {line.type} = ' if line.type else ''}{_call(line, lines, block)}" for line in shown]


def _call(line: Line, lines: Sequence[Line], block: Block | None) -> str:
    """The right side of a line; with ``block``, layer numbers count from it."""
    words = []
    for part in line.parts:
        if isinstance(part, Read):
            words.append(lines[part.place].name)
        else:
            words.append(_renamed(part.name, block) if isinstance(part, Name) else part)
    return "".join(words)


def _renamed(name: str, block: Block | None) -> str:
    """``model.layers.{i+1}.mlp.up_proj.weight`` of a name in the layer after ``block``, which is ``i``."""
    relative = relative_name(name, block)
    if isinstance(relative, str):
        return relative
    prefix, distance, rest = relative
    return f"{prefix}{{i{f'{distance:+d}' if distance else ''}}}{rest}"


def _cut(text: Sequence[str], width: int | None) -> str:
    lines = [line for part in text for line in part.split("\n")]
    if width is not None:
        lines = [line if len(line) <= width else line[: max(width - 2, 0)] + ".."[:width] for line in lines]
    return "\n".join(lines) + "\n"
