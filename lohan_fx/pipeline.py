"""pipeline: the way of a captured graph through the compiler, top to bottom."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.fx import GraphModule
from torch.fx.graph import _BoxedCodeGen

from lohan_fx import cost, inductor, meta, staging
from lohan_fx.budgets import largest_layer, staging_bytes
from lohan_fx.cost import Work
from lohan_fx.errors import InfeasiblePlan
from lohan_fx.hardware import HardwareProfile
from lohan_fx.memory_model import host_bytes, resident_bytes
from lohan_fx.meta import Cost
from lohan_fx.op_times import time_ops
from lohan_fx.passes.activation_graph import activation_graph
from lohan_fx.passes.annotate import annotate
from lohan_fx.passes.assign_buffers import assign_buffers
from lohan_fx.passes.halves import Halves, ParameterInput, Pass
from lohan_fx.passes.insert_fetches import insert_fetches
from lohan_fx.passes.insert_gradient_offload import insert_gradient_offload
from lohan_fx.passes.insert_recompute import insert_recompute
from lohan_fx.passes.insert_swaps import insert_swaps
from lohan_fx.passes.liveness import device_peaks, swap_out_room
from lohan_fx.passes.partition import note_reads, partition
from lohan_fx.passes.schedule import schedule
from lohan_fx.passes.step_ends import step_ends
from lohan_fx.passes.traffic import fetch_counts, padding_bytes, traffic
from lohan_fx.passes.verify import verify
from lohan_fx.plan import ParameterPlan, Plan, Prediction, Swap, Tier, Use, Windows
from lohan_fx.plan_builder import homes_only
from lohan_fx.planner import make_plan
from lohan_fx.problem import Budgets, ParameterFacts, Problem
from lohan_fx.simulated_step import simulated_step_s
from lohan_fx.step_program import step_program

PASSES: tuple[Pass, ...] = (
    insert_recompute,
    insert_fetches,
    insert_swaps,
    insert_gradient_offload,
    schedule,
)


BUFFERS_ROOM_BYTES = 16 << 20
"""Values may take so much more in their places than without even where a plan fills the promise: holes in the heap, of which
no plan speaks, would take more."""


@dataclass(frozen=True)
class Request:
    """What ``compile`` was asked for, as far as the pipeline needs it.

    ``homes``: where an earlier plan of this model has put the parameters; empty before the first. ``compute_scale``: how
    many times longer than measured op by op the graphs turned out to take (``self_check``), which ``revise`` allows to
    replace the plan. ``segments``: what of the graphs to compile (``inductor.MODES``). ``chooses_staging``: whether the plan
    may change the buffers of ``windows`` (``staging``); not once the runtime has them. ``holds``: all gradients wait for
    ``step()`` (docs/0014).
    """

    hw: HardwareProfile
    policy: str
    compute_dtype: str
    matmul_rate: float
    parameters: tuple[ParameterFacts, ...]
    budgets: Budgets
    windows: Windows
    plan: Plan | None
    homes: tuple[ParameterPlan, ...] = ()
    compute_scale: float = 1.0
    revise: bool = True
    segments: str = inductor.BOXED
    chooses_staging: bool = True
    holds: bool = False


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
    if request.hw.is_this_machine():
        time_ops(joint, torch.device(request.hw.device))
    plan = request.plan or _search(_Rewrites(joint, num_outputs, parameters), request)
    slots = activation_slots(len(plan.activations))
    if request.plan:  # that a plan given needs too much is its maker's mistake, not a pass's, as the verifier would say
        _predict(_rewrite(joint, plan, num_outputs, parameters, slots, checked=False), plan, request)
    halves = _rewrite(joint, plan, num_outputs, parameters, slots, checked=True)
    if request.segments != inductor.BOXED:
        inductor.compile_segments(halves, plan, request.segments, _node_seconds(request))
        inductor.copy_seconds(halves, joint)
    plan = dataclasses.replace(plan, prediction=_placed(halves, plan, request))
    halves.recompile()
    return halves, plan


def plan_training(
    joint: GraphModule, request: Request, *, num_outputs: int, parameters: dict[str, ParameterInput]
) -> tuple[Halves, Plan]:
    """What ``compile_training`` decides, and the halves to simulate, without what only running them needs: they are not
    verified and have no code. The joint graph must be annotated."""
    rewrites = _Rewrites(joint, num_outputs, parameters)
    plan = _search(rewrites, request)
    halves = rewrites.halves(plan)
    return halves, dataclasses.replace(plan, prediction=_placed(halves, plan, request))


def replan(joint: GraphModule, num_outputs: int, parameters: dict[str, ParameterInput], request: Request) -> Plan:
    """The plan that ``request`` would get for a joint graph that was compiled before, with its prediction."""
    return plan_training(joint, request, num_outputs=num_outputs, parameters=parameters)[1]


def work_of(halves: Halves, plan: Plan, request: Request) -> Work:
    """What a step of ``halves`` does, for a cost model."""
    return traffic(halves, plan, _node_seconds(request))


def compile_inference(
    gm: GraphModule, request: Request, *, parameters: dict[str, ParameterInput]
) -> tuple[Halves, Plan]:
    """Inference graph in, linked graph and its plan out: nothing is saved, and parameters are read where they are."""
    annotate(gm)
    if request.hw.is_this_machine():
        time_ops(gm, torch.device(request.hw.device))
    note_reads(gm)
    plan = request.plan or _homes_only(request)
    if request.homes:
        plan = dataclasses.replace(plan, parameters=request.homes)
    halves = Halves(gm, None, len(gm.graph.output_node().args[0]), parameters, {}, range(0))  # type: ignore[arg-type]
    _apply_passes(halves, plan, checked=True)
    plan = dataclasses.replace(plan, prediction=_placed(halves, plan, request))
    halves.recompile()
    return halves, plan


class _Rewrites:
    """The halves that plans make of one joint graph, unverified; only the last are kept, for whoever asks again."""

    def __init__(self, joint: GraphModule, num_outputs: int, parameters: dict[str, ParameterInput]) -> None:
        self.joint, self.num_outputs, self._parameters = joint, num_outputs, parameters
        self._last: tuple[Plan, Halves] | None = None
        self._peaks: dict[tuple[object, ...], int] = {}

    def device_peak(self, plan: Plan) -> int:
        """Most device bytes alive, remembered: a model that is planned again is asked for some plans again."""
        key = (*_of_graphs(plan), plan.windows.gradient_bytes, plan.windows.swap_out_bytes)
        if key not in self._peaks:
            self._peaks[key] = _device_peak(self.halves(plan), plan)
        return self._peaks[key]

    def halves(self, plan: Plan) -> Halves:
        if self._last is None or not _same_graphs(self._last[0], plan):
            slots = range(len(plan.activations))
            self._last = None  # before the next are made: the halves of a large model are large
            made = _rewrite(self.joint, plan, self.num_outputs, self._parameters, slots, checked=False)
            self._last = (plan, made)
        return self._last[1]


def _same_graphs(one: Plan, other: Plan) -> bool:
    """Whether two plans make the same graphs, in which of all windows only those of ``schedule`` show."""
    return _of_graphs(one) == _of_graphs(other)


def _of_graphs(plan: Plan) -> tuple[object, ...]:
    return plan.activations, plan.parameters, plan.windows.fetch_bytes, plan.windows.swap_in_bytes


def _search(rewrites: _Rewrites, request: Request) -> Plan:
    seconds = _node_seconds(request)
    keeping = rewrites.halves(_keep_everything(request))
    costs = traffic(keeping, _keep_everything(request), seconds)
    problem = Problem(
        policy=request.policy,
        compute_dtype=request.compute_dtype,
        parameters=request.parameters,
        activations=activation_graph(rewrites.joint, num_outputs=rewrites.num_outputs, node_seconds=seconds),
        forward_s=costs.forward_s,
        backward_s=costs.backward_s,
        budgets=request.budgets,
        windows=request.windows,
        device_peak=rewrites.device_peak,
        fetches=fetch_counts(keeping),
        ends=step_ends(keeping, seconds, request.windows.gradient_bytes),
        holds=request.holds,
    )
    plan = make_plan(problem, request.hw)
    if request.chooses_staging:
        plan = _with_staging(plan, problem, rewrites, request)
    return _with_swap_out_room(plan, rewrites.halves(plan))


def _with_staging(plan: Plan, problem: Problem, rewrites: _Rewrites, request: Request) -> Plan:
    """``plan`` with the staging that pays, and made again where that takes memory from other uses, or leaves them more."""
    division, shared = plan.division, request.budgets.shared
    if division is None or all(p.home is Tier.DEVICE and p.states_home is not Tier.NVME for p in plan.parameters):
        return plan
    program = step_program(rewrites.halves(plan), plan, _node_seconds(request))

    def step_s(windows: Windows) -> float:
        tried = dataclasses.replace(plan, windows=windows)
        return simulated_step_s(program, tried, request.hw, transfers=staging.TRANSFERS)

    free = sum(s.bytes for s in division.shares if s.tier is Tier.HOST and s.use is Use.FREE)
    per_byte_s = division.per_byte_s.get(Tier.HOST.value, 0.0)
    chunks = -(-largest_layer(problem.parameters)[1] // plan.windows.chunk_elements)
    found = staging.choose(
        plan.windows, step_s, layer_chunks=chunks, shared=shared, per_byte_s=per_byte_s, free_bytes=free
    )
    more = staging_bytes(found.windows, shared=shared) - staging_bytes(plan.windows, shared=shared)
    if 0 <= more <= free:
        return staging.with_staging(plan, found, more)
    asked = settled(request, found.windows)
    try:
        again = make_plan(dataclasses.replace(problem, budgets=asked.budgets, windows=asked.windows), request.hw)
    except InfeasiblePlan:
        return plan
    return staging.with_staging(again, found, 0)


def settled(request: Request, windows: Windows) -> Request:
    """``request`` with the staging of ``windows`` from now on: its bytes count as spent, and nobody changes it again."""
    shared = request.budgets.shared
    more = staging_bytes(windows, shared=shared) - staging_bytes(request.windows, shared=shared)
    return dataclasses.replace(
        request,
        windows=staging.with_buffers_of(request.windows, windows),
        budgets=dataclasses.replace(request.budgets, fixed_bytes=request.budgets.fixed_bytes + more),
        chooses_staging=False,
    )


def _with_swap_out_room(plan: Plan, halves: Halves) -> Plan:
    """``plan`` with all the room for activations on their way out that costs nothing: usually the forward, where they
    leave, is not where memory is short. On a GPU that is what the plan leaves of its memory, on a CPU what its peak has
    at other moments."""
    if not any(isinstance(a.decision, Swap) for a in plan.activations):
        return plan
    on_cpu = plan.device == "cpu"
    limit = _device_peak(halves, plan) if on_cpu else plan.device_memory_bytes - resident_bytes(plan)[0]
    room = max(plan.windows.swap_out_bytes, swap_out_room(halves, plan, limit))
    return dataclasses.replace(plan, windows=dataclasses.replace(plan.windows, swap_out_bytes=room))


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
    _apply_passes(halves, plan, checked=checked)
    return halves


def _apply_passes(halves: Halves, plan: Plan, *, checked: bool) -> None:
    for apply in PASSES:
        apply(halves, plan)
        if checked:
            verify(halves, plan, after=apply.__name__)


def _node_seconds(request: Request) -> Callable[[Cost], float]:
    def seconds(found: Cost) -> float:
        scale = request.compute_scale if found.measured_s is not None else 1.0
        return scale * cost.node_seconds(found, request.hw, request.matmul_rate)

    return seconds


def _keep_everything(request: Request) -> Plan:
    """A plan without decisions: all that the backward reads is kept. Only good for counting."""
    return dataclasses.replace(_homes_only(request), device_memory_bytes=2**62)


def _homes_only(request: Request) -> Plan:
    return homes_only(request.policy, request.compute_dtype, request.parameters, request.budgets, request.windows)


def _device_peak(halves: Halves, plan: Plan) -> int:
    """Most device bytes alive in either half, with what is on its way out."""
    return max(half.bytes for half in device_peaks(halves, plan).values())


def _placed(halves: Halves, plan: Plan, request: Request) -> Prediction:
    """The prediction for final ``halves``, whose values get their places in what the plan leaves of the promise."""
    prediction = _predict(halves, plan, request)
    room = plan.host_memory_bytes - prediction.peak_bytes["host"]
    more = assign_buffers(halves, plan, room_bytes=max(room, BUFFERS_ROOM_BYTES))
    more = max(0, min(more, room))
    return dataclasses.replace(
        prediction, peak_bytes={tier: nbytes + more for tier, nbytes in prediction.peak_bytes.items()}
    )


def _predict(halves: Halves, plan: Plan, request: Request) -> Prediction:
    work = traffic(halves, plan, _node_seconds(request))
    fixed_bytes = settled(request, plan.windows).budgets.fixed_bytes
    device, host = resident_bytes(plan)[0], host_bytes(fixed_bytes, plan)
    device += _device_peak(halves, plan)
    if request.budgets.shared:
        host += device
    over = {"device": device - plan.device_memory_bytes, "host": host - plan.host_memory_bytes}
    short = [f"{tier}_memory is {nbytes:,} bytes short" for tier, nbytes in over.items() if nbytes > 0]
    if short:
        raise InfeasiblePlan(f"the plan given needs more memory than was promised: {'; '.join(short)}")
    more_read, more_written = padding_bytes(halves, plan)
    flops = [(n.name.startswith("recompute_"), n) for _, gm in halves.graphs() for n in gm.graph.nodes]
    return Prediction(
        forward=cost.forward_stage(work, request.hw),
        backward=cost.backward_stage(work, request.hw),
        peak_bytes={"device": device, "host": host},
        optimizer=cost.optimizer_stage(work, request.hw),
        nvme_read_bytes=work.nvme_read_bytes + more_read,
        nvme_write_bytes=work.nvme_write_bytes + more_written,
        flops=sum(meta.cost(n).flops for again, n in flops if not again),
        recompute_flops=sum(meta.cost(n).flops for again, n in flops if again),
    )


def boxed(gm: GraphModule) -> Callable[[list[object]], object]:
    """``gm`` as a function of one list, which it empties: every value dies at its last use."""
    gm.graph.set_codegen(_BoxedCodeGen())
    gm.recompile()

    def run(args: list[object]) -> object:
        return gm.forward(args)

    return run
