"""pipeline: the way of a captured graph through the compiler, top to bottom."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch.fx import GraphModule

from lohan_fx import inductor
from lohan_fx.errors import InfeasiblePlan
from lohan_fx.measuring.op_times import time_ops
from lohan_fx.passes.annotate import annotate
from lohan_fx.passes.halves import Halves, ParameterInput, Pass
from lohan_fx.passes.insert_fetches import insert_fetches
from lohan_fx.passes.insert_gradient_offload import insert_gradient_offload
from lohan_fx.passes.insert_recompute import insert_recompute
from lohan_fx.passes.insert_swaps import insert_swaps
from lohan_fx.passes.own_gradients import own_gradients
from lohan_fx.passes.partition import note_reads, partition
from lohan_fx.passes.schedule import schedule
from lohan_fx.passes.verify import verify
from lohan_fx.plan import Plan
from lohan_fx.planning.memory_model import at_home_bytes, with_less_at_home
from lohan_fx.planning.plan_search import Rewrites, search
from lohan_fx.planning.predict import host_bytes_short, predict, predict_placed
from lohan_fx.request import Request, node_seconds, plan_of_homes

PASSES: tuple[Pass, ...] = (
    insert_recompute,
    insert_fetches,
    insert_swaps,
    insert_gradient_offload,
    schedule,
)


def compile_training(
    joint: GraphModule,
    request: Request,
    *,
    num_outputs: int,
    parameters: dict[str, ParameterInput],
    activation_slots: Callable[[int], range],
) -> tuple[Halves, Plan]:
    """Joint graph in, linked halves and their plan out."""
    annotate(joint)
    own_gradients(joint, num_outputs)
    if request.hw.is_this_machine():
        time_ops(joint, torch.device(request.hw.device))
    plan = request.plan or _no_more_at_home(rewrites_of(joint, num_outputs, parameters), request)
    slots = activation_slots(len(plan.activations))
    if request.plan:  # that a plan given needs too much is its maker's mistake, not a pass's, as the verifier would say
        predict(_rewrite(joint, plan, num_outputs, parameters, slots, checked=False), plan, request)
    halves = _rewrite(joint, plan, num_outputs, parameters, slots, checked=True)
    if request.segments != inductor.BOXED:
        inductor.compile_segments(halves, plan, request.segments, node_seconds(request))
        inductor.copy_seconds(halves, joint)
    plan = dataclasses.replace(plan, prediction=predict_placed(halves, plan, request))
    halves.recompile()
    return halves, plan


def _no_more_at_home(rewrites: Rewrites, request: Request) -> Plan:
    """The plan searched for; with the homes of an earlier one, for another shape, where those take less memory: its graphs may
    run again, beside what is at home then, and beside what captures since have left."""
    plan = _no_more_than_before(rewrites, search(rewrites, request), request)
    if request.most_at_home_bytes is None or at_home_bytes(plan)[-1] <= request.most_at_home_bytes:
        return plan
    note = "less is kept in memory than there is room for: graphs of an earlier shape may come again"
    found = with_less_at_home(plan, request.most_at_home_bytes)
    found = dataclasses.replace(found, division=None, notes=(*plan.notes, note))
    predict(rewrites.halves(found), found, request)
    return found


def _no_more_than_before(rewrites: Rewrites, plan: Plan, request: Request) -> Plan:
    least = {p.name: p for p in request.least_homes}
    before = at_home_bytes(dataclasses.replace(plan, parameters=request.least_homes))
    if not least or all(now <= least_bytes for now, least_bytes in zip(at_home_bytes(plan), before, strict=True)):
        return plan
    moved = tuple(
        dataclasses.replace(p, home=least[p.name].home, states_home=least[p.name].states_home, updated_twice=False)
        for p in plan.parameters
    )
    note = "parameters and states are where the plan of an earlier shape has them, which may come again"
    found = dataclasses.replace(plan, parameters=moved, division=None, notes=(*plan.notes, note))
    try:
        predict(rewrites.halves(found), found, request)
    except InfeasiblePlan:
        return plan
    return found


def plan_training(
    joint: GraphModule, request: Request, *, num_outputs: int, parameters: dict[str, ParameterInput]
) -> tuple[Halves, Plan]:
    """What ``compile_training`` decides, and the halves to simulate, without what only running them needs: they are not
    verified and have no code. The joint graph must be annotated."""
    rewrites = rewrites_of(joint, num_outputs, parameters)
    plan = search(rewrites, request)
    halves = rewrites.halves(plan)
    return halves, dataclasses.replace(plan, prediction=predict_placed(halves, plan, request))


def replan(joint: GraphModule, num_outputs: int, parameters: dict[str, ParameterInput], request: Request) -> Plan:
    """The plan that ``request`` would get for a joint graph that was compiled before, with its prediction."""
    return plan_training(joint, request, num_outputs=num_outputs, parameters=parameters)[1]


def compile_inference(
    gm: GraphModule, request: Request, *, parameters: dict[str, ParameterInput]
) -> tuple[Halves, Plan]:
    """Inference graph in, linked graph and its plan out: nothing is saved, and parameters are read where they are."""
    annotate(gm)
    if request.hw.is_this_machine():
        time_ops(gm, torch.device(request.hw.device))
    note_reads(gm)
    plan = dataclasses.replace(request.plan or plan_of_homes(request), forwards=1)
    if request.homes:
        plan = dataclasses.replace(plan, parameters=request.homes)
    halves = Halves(gm, None, len(gm.graph.output_node().args[0]), parameters, {}, range(0))  # type: ignore[arg-type]
    _apply_passes(halves, plan, PASSES[:-1], checked=True)
    plan = _at_home_to_fit(halves, plan, request)
    plan = dataclasses.replace(plan, prediction=predict_placed(halves, plan, request))
    halves.recompile()
    return halves, plan


def _at_home_to_fit(halves: Halves, plan: Plan, request: Request) -> Plan:
    """``plan``, scheduled for the one graph of ``halves``. What a training plan keeps in memory may be all that it was promised,
    and its capture stays there: where that leaves too little for this graph, less is kept from now on.

    Raises ``InfeasiblePlan`` where the graph takes too much with nothing at home, too.
    """
    less = plan
    while True:
        try:
            found = _scheduled_to_fit(halves, less, request)
            break
        except InfeasiblePlan as error:
            as_read = dataclasses.replace(less, windows=dataclasses.replace(less.windows, fetch_bytes=0))
            over = host_bytes_short(halves, as_read, request)
            if not over:
                raise
            try:
                less = with_less_at_home(less, at_home_bytes(less)[-1] - over)
            except InfeasiblePlan:
                raise error from None
    if less is plan:
        return found
    note = "less is kept in memory than before: a call without gradients had no room beside it"
    return dataclasses.replace(found, notes=(*plan.notes, note))


def _scheduled_to_fit(halves: Halves, plan: Plan, request: Request) -> Plan:
    """``plan``, scheduled for the one graph of ``halves``, with as much of its window for fetches as memory allows.

    Raises ``InfeasiblePlan`` where the graph takes too much also with every parameter fetched as it is read.
    """
    most = plan.windows.fetch_bytes
    for fetch_bytes in (most, most // 2, most // 4, most // 8, 0):
        tried = dataclasses.replace(plan, windows=dataclasses.replace(plan.windows, fetch_bytes=fetch_bytes))
        schedule(halves, tried)  # anew: starts go where this window lets them
        try:
            predict(halves, tried, request, what="a call of this model without gradients")
        except InfeasiblePlan:
            if not fetch_bytes:
                raise
        else:
            break
    verify(halves, tried, after=schedule.__name__)
    return tried


def rewrites_of(joint: GraphModule, num_outputs: int, parameters: dict[str, ParameterInput]) -> Rewrites:
    """What makes the halves of any plan for ``joint``, which must be annotated."""

    def rewrite(plan: Plan) -> Halves:
        slots = range(len(plan.activations))
        return _rewrite(joint, plan, num_outputs, parameters, slots, checked=False)

    return Rewrites(joint, num_outputs, rewrite)


def _rewrite(
    joint: GraphModule,
    plan: Plan,
    num_outputs: int,
    parameters: dict[str, ParameterInput],
    slots: range,
    *,
    checked: bool,
) -> Halves:
    halves = partition(joint, plan, num_outputs=num_outputs, parameters=parameters, activation_slots=slots)
    if checked:
        verify(halves, plan, after="partition")
    _apply_passes(halves, plan, PASSES, checked=checked)
    return halves


def _apply_passes(halves: Halves, plan: Plan, passes: Sequence[Pass], *, checked: bool) -> None:
    for apply in passes:
        apply(halves, plan)
        if checked:
            verify(halves, plan, after=apply.__name__)
