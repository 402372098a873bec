"""step_time: the work of a step by a plan before there are rewritten graphs, and its lanes as lines in what is decided."""

from __future__ import annotations

from lohan_fx import cost
from lohan_fx.cost import STATE_BYTES
from lohan_fx.hardware import HardwareProfile
from lohan_fx.meta import Lane
from lohan_fx.passes.activation_graph import closure
from lohan_fx.passes.decision_model import Adds, LaneTime, Line, Quantity
from lohan_fx.plan import ParameterPlan, Plan, Recompute, Stage, Swap, Tier
from lohan_fx.problem import Problem


def parameter_adds(p: ParameterPlan, fetches: tuple[int, int]) -> dict[Quantity, float]:
    """What one parameter that is fetched so often (forward, backward) and updated in the backward adds to traffic."""
    forward, backward = (p.bytes * times if p.home is not Tier.DEVICE else 0 for times in fetches)
    streamed = p.home is Tier.NVME
    away = p.states_home is Tier.NVME
    # Where the master is also what the graph computes with, writing the states back writes it.
    copied = p.trainable and p.home is Tier.NVME and not (away and p.bytes == 4 * p.numel)
    return {
        Quantity.FETCHED_FORWARD: forward,
        Quantity.FETCHED_FORWARD_NVME: forward if streamed else 0,
        Quantity.FETCHED_BACKWARD: backward,
        Quantity.FETCHED_BACKWARD_NVME: backward if streamed else 0,
        Quantity.STATES: STATE_BYTES * p.numel if away else 0,
        Quantity.COPIED: p.bytes if copied else 0,
    }


def fetches_of(problem: Problem, parameter: str) -> tuple[int, int]:
    """How often (forward, backward) fetch ``parameter``."""
    return problem.fetches.get(parameter, (1, 1))


def quantities_of_plan(problem: Problem, plan: Plan) -> dict[Quantity, float]:
    """The sums of ``decision_model`` for ``plan``, memory aside."""
    found = problem.activations
    total: dict[Quantity, float] = dict.fromkeys(Quantity, 0)
    for p in plan.parameters:
        for quantity, added in parameter_adds(p, fetches_of(problem, p.name)).items():
            total[quantity] += added
    saved = {a.node for a in plan.activations if not isinstance(a.decision, Recompute)}
    total[Quantity.RECOMPUTE_S] = sum(found.seconds[name] for name in closure(found, saved))
    total[Quantity.SWAPPED] = sum(a.bytes for a in plan.activations if isinstance(a.decision, Swap))
    total[Quantity.SWAPPED_NVME] = sum(a.bytes for a in plan.activations if a.decision == Swap(Tier.NVME))
    return total


def work_of(problem: Problem, total: Adds) -> cost.Work:
    """The step's work, with everything updated in the backward."""
    trained = [p for p in problem.parameters if p.trainable]
    states = int(total.get(Quantity.STATES, 0))
    requests = {quantity: _requests_per_byte(problem, quantity) * total.get(quantity, 0) for quantity in _ON_DRIVES}
    return cost.Work(
        forward_s=problem.forward_s,
        backward_s=problem.backward_s,
        recompute_s=total.get(Quantity.RECOMPUTE_S, 0.0),
        fetched_forward_bytes=int(total.get(Quantity.FETCHED_FORWARD, 0)),
        fetched_forward_nvme_bytes=int(total.get(Quantity.FETCHED_FORWARD_NVME, 0)),
        fetched_backward_bytes=int(total.get(Quantity.FETCHED_BACKWARD, 0)),
        fetched_backward_nvme_bytes=int(total.get(Quantity.FETCHED_BACKWARD_NVME, 0)),
        swapped_bytes=int(total.get(Quantity.SWAPPED, 0)),
        swapped_nvme_bytes=int(total.get(Quantity.SWAPPED_NVME, 0)),
        gradient_bytes=sum(p.bytes for p in trained),
        state_read_bytes=states,
        state_write_bytes=states + int(total.get(Quantity.COPIED, 0)),
        adam_parameters=sum(p.numel for p in trained),
        forward_requests=requests[Quantity.FETCHED_FORWARD_NVME] + requests[Quantity.SWAPPED_NVME],
        backward_requests=sum(requests.values()) - requests[Quantity.FETCHED_FORWARD_NVME],
    )


_ON_DRIVES = (
    Quantity.FETCHED_FORWARD_NVME,
    Quantity.FETCHED_BACKWARD_NVME,
    Quantity.SWAPPED_NVME,
    Quantity.STATES,
    Quantity.COPIED,
)


def _requests_per_byte(problem: Problem, quantity: Quantity) -> float:
    """Reads and writes of the drives per byte of ``quantity``, if all of them are as large as the windows allow."""
    windows = problem.windows
    if quantity is Quantity.STATES:  # counted once, as read; master and moments are two requests each way
        return 4 / (STATE_BYTES * windows.chunk_elements)
    return 1 / (2 * windows.chunk_elements if quantity is Quantity.COPIED else windows.io_bytes)


def _core_s(problem: Problem, hw: HardwareProfile, quantities: tuple[Quantity, ...]) -> dict[Quantity, float]:
    """On a CPU: what a byte on the drives takes from compute, as ``cost_models.lohan.CORRECTED`` says."""
    if hw.device != "cpu":
        return {}
    per_byte, per_request = hw.io_core_s_per_byte, hw.io_core_s_per_request
    found = {q: per_byte + per_request * _requests_per_byte(problem, q) for q in quantities}
    if Quantity.STATES in found:
        beside_s = (hw.cpu_cores - 1) / STATE_BYTES / hw.adam_parameters_per_s
        found[Quantity.STATES] += per_byte + beside_s
    return found


def step_seconds(problem: Problem, hw: HardwareProfile, plan: Plan) -> float:
    """Seconds of a step by ``plan``, whose optimizer runs in the backward."""
    return cost.step_seconds(work_of(problem, quantities_of_plan(problem, plan)), hw)


def stage_lanes(problem: Problem, hw: HardwareProfile) -> tuple[tuple[LaneTime, ...], ...]:
    """The lanes of forward and backward as lines: what ``cost`` computes, in the form that ``optimum`` solves.

    What no decision changes is asked of ``cost`` itself. Without drives there is no SSD lane: then nothing may go there.
    """
    nothing = work_of(problem, {})
    q, h2d, d2h = Quantity, hw.h2d_bytes_per_s, hw.d2h_bytes_per_s
    on_cpu = hw.device == "cpu"
    copied_s = {q.SWAPPED: 1 / d2h} if on_cpu else {}
    forward = _links(
        cost.forward_stage(nothing, hw),
        {
            Lane.COMPUTE: {**_core_s(problem, hw, (q.FETCHED_FORWARD_NVME, q.SWAPPED_NVME)), **copied_s},
            Lane.H2D: {q.FETCHED_FORWARD: 1 / h2d} | ({q.FETCHED_FORWARD_NVME: -1 / h2d} if on_cpu else {}),
            Lane.D2H: {q.SWAPPED: 1 / d2h},
        },
    )
    on_drives = (q.FETCHED_BACKWARD_NVME, q.SWAPPED_NVME, q.STATES, q.COPIED)
    back = {q.FETCHED_BACKWARD_NVME: -1 / h2d, q.SWAPPED_NVME: -1 / h2d} if on_cpu else {}
    backward = _links(
        cost.backward_stage(nothing, hw),
        {
            Lane.COMPUTE: {q.RECOMPUTE_S: 1.0, **_core_s(problem, hw, on_drives)},
            Lane.H2D: {q.FETCHED_BACKWARD: 1 / h2d, q.SWAPPED: 1 / h2d, **back},
        },
    )
    if hw.nvme:
        forward += _ssd(hw, (q.FETCHED_FORWARD_NVME,), (q.SWAPPED_NVME,))
        backward += _ssd(hw, (q.FETCHED_BACKWARD_NVME, q.SWAPPED_NVME, q.STATES), (q.STATES, q.COPIED))
    return forward, backward


def _links(fixed: Stage, slopes: dict[Lane, Adds]) -> tuple[LaneTime, ...]:
    lanes = (lane for lane in fixed.lanes_s if lane != Lane.SSD.value)
    return tuple(LaneTime((Line(fixed.lanes_s[lane], slopes.get(Lane(lane), {})),)) for lane in lanes)


def _ssd(hw: HardwareProfile, reads: tuple[Quantity, ...], writes: tuple[Quantity, ...]) -> tuple[LaneTime, ...]:
    """The drives, simplex. Where their mixed rate is the lower one, what is read and written in turns goes at that rate
    and the rest alone: the less of two lines, of which one holds where more is read and the other where more is written."""
    read_s, write_s = 1 / hw.ssd_read_bytes_per_s, 1 / hw.ssd_write_bytes_per_s
    both_s = 2 / hw.ssd_mixed_bytes_per_s

    def line(per_read_s: float, per_written_s: float) -> Line:
        per = dict.fromkeys((*reads, *writes), 0.0)
        for quantity in reads:
            per[quantity] += per_read_s
        for quantity in writes:
            per[quantity] += per_written_s
        return Line(0.0, per)

    one_way = LaneTime((line(read_s, write_s),))
    if both_s <= read_s + write_s:
        return (one_way,)
    return one_way, LaneTime((line(read_s, both_s - read_s), line(both_s - write_s, write_s)))
