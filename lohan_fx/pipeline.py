"""pipeline: the way of a captured graph through the compiler, top to bottom."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.fx import GraphModule
from torch.fx.graph import _BoxedCodeGen

from lohan_fx import cost, inductor, meta
from lohan_fx.cost import Work
from lohan_fx.errors import InfeasiblePlan
from lohan_fx.hardware import HardwareProfile
from lohan_fx.memory_model import host_bytes, resident_bytes
from lohan_fx.meta import Cost
from lohan_fx.op_times import time_ops
from lohan_fx.passes.activation_graph import activation_graph
from lohan_fx.passes.annotate import annotate
from lohan_fx.passes.halves import Halves, ParameterInput, Pass
from lohan_fx.passes.insert_fetches import insert_fetches
from lohan_fx.passes.insert_gradient_offload import insert_gradient_offload
from lohan_fx.passes.insert_recompute import insert_recompute
from lohan_fx.passes.insert_swaps import insert_swaps
from lohan_fx.passes.liveness import peaks
from lohan_fx.passes.partition import note_reads, partition
from lohan_fx.passes.schedule import schedule
from lohan_fx.passes.traffic import fetch_counts, padding_bytes, traffic
from lohan_fx.passes.verify import verify
from lohan_fx.plan import ParameterPlan, Plan, Prediction, Windows
from lohan_fx.plan_builder import homes_only
from lohan_fx.planner import make_plan
from lohan_fx.problem import Budgets, ParameterFacts, Problem

PASSES: tuple[Pass, ...] = (
    insert_recompute,
    insert_fetches,
    insert_swaps,
    insert_gradient_offload,
    schedule,
)


@dataclass(frozen=True)
class Request:
    """What ``compile`` was asked for, as far as the pipeline needs it.

    ``homes``: where an earlier plan of this model has put the parameters; empty before the first. ``compute_scale``: how
    many times longer than measured op by op the graphs turned out to take (``self_check``), which ``revise`` allows to
    replace the plan. ``segments``: what of the graphs to compile (``inductor.MODES``).
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
    plan = dataclasses.replace(plan, prediction=_predict(halves, plan, request))
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
    return halves, dataclasses.replace(plan, prediction=_predict(halves, plan, request))


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
    plan = dataclasses.replace(plan, prediction=_predict(halves, plan, request))
    halves.recompile()
    return halves, plan


class _Rewrites:
    """The halves that plans make of one joint graph, unverified; only the last are kept, for whoever asks again."""

    def __init__(self, joint: GraphModule, num_outputs: int, parameters: dict[str, ParameterInput]) -> None:
        self.joint, self.num_outputs, self._parameters = joint, num_outputs, parameters
        self._last: tuple[Plan, Halves] | None = None

    def halves(self, plan: Plan) -> Halves:
        if self._last is None or not _same_graphs(self._last[0], plan):
            slots = range(len(plan.activations))
            self._last = None  # before the next are made: the halves of a large model are large
            made = _rewrite(self.joint, plan, self.num_outputs, self._parameters, slots, checked=False)
            self._last = (plan, made)
        return self._last[1]


def _same_graphs(one: Plan, other: Plan) -> bool:
    return (one.activations, one.parameters, one.windows) == (other.activations, other.parameters, other.windows)


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
        device_peak=lambda plan: _device_peak(rewrites.halves(plan), plan, plan.windows),
        fetches=fetch_counts(keeping),
    )
    return make_plan(problem, request.hw)


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


def _device_peak(halves: Halves, plan: Plan, windows: Windows) -> int:
    """Most device bytes alive in either half, with gradients on their way out."""
    peak = max(half.bytes for half in peaks(halves, plan).values())
    return peak + (windows.gradient_bytes if halves.backward is not None else 0)


def _predict(halves: Halves, plan: Plan, request: Request) -> Prediction:
    work = traffic(halves, plan, _node_seconds(request))
    device, host = resident_bytes(plan)[0], host_bytes(request.budgets.fixed_bytes, plan)
    device += _device_peak(halves, plan, plan.windows)
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
