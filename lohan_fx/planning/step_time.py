"""step_time: the work of a step by a plan before there are rewritten graphs, and its lanes as lines in what is decided."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

import torch

from lohan_fx import cost
from lohan_fx.cost import STATE_BYTES
from lohan_fx.hardware import HardwareProfile
from lohan_fx.meta import Lane
from lohan_fx.passes.activation_graph import closure
from lohan_fx.passes.decision_model import Adds, LaneTime, Line, Quantity
from lohan_fx.passes.lane_jobs import jobs_of_parameter, jobs_of_transfer
from lohan_fx.passes.traffic import blocking_written_bytes, hands_gradient_over, states_read_bytes
from lohan_fx.plan import (
    FETCHES_BOUND,
    PYTHON_LANE,
    SUM_BYTES,
    UPDATES_BOUND,
    OptimizerTiming,
    ParameterPlan,
    Plan,
    Recompute,
    Stage,
    Swap,
    Tier,
)
from lohan_fx.planning.problem import Problem


def parameter_adds(problem: Problem, p: ParameterPlan) -> dict[Quantity, float]:
    """What one parameter, updated on arrival of its gradient or in the next forward, adds to what a step moves."""
    return adds_of_a_read_one(problem, p) if is_read(problem, p.name) else {}


def adds_of_a_read_one(problem: Problem, p: ParameterPlan) -> dict[Quantity, float]:
    """``parameter_adds``, if the graph reads it."""
    fetches = fetches_of(problem, p.name)
    forward, backward = (p.bytes * times if p.home is not Tier.DEVICE else 0 for times in fetches)
    streamed = p.home is Tier.NVME
    away = p.states_home is Tier.NVME
    # Where the master is also what the graph computes with, writing the states back writes it.
    copied = p.trainable and p.home is Tier.NVME and not (away and p.bytes == 4 * p.numel)
    runs = p.runs_beside(problem.ends, device_of(problem))
    states, copies, returned, updated, held, by_lane = _BESIDE.get(runs, _EARLY)
    if p.optimizer_runs is OptimizerTiming.AFTER_BACKWARD:
        held = Quantity.LATE_SUMS_NVME
    return {
        Quantity.FETCHED_FORWARD: forward,
        Quantity.FETCHED_FORWARD_NVME: forward if streamed else 0,
        Quantity.FIRST_FETCHED_NVME: p.first_fetched_nvme_bytes(problem.ends),
        Quantity.FETCHED_BACKWARD: backward,
        Quantity.FETCHED_BACKWARD_NVME: backward if streamed else 0,
        (_READ_ALONE[states] if p.updated_twice else states): STATE_BYTES * p.numel if away else 0,
        copies: p.bytes if copied else 0,
        returned: p.bytes if p.returns_to(device_of(problem)) else 0,
        **({updated: p.numel} if updated is not None else {}),
        **({by_lane: p.numel} if by_lane is not None and _is_by_lane(problem, p) else {}),
        **(_blocking(problem, p) if states is Quantity.STATES else {}),
        **({held: p.held_bytes} if held is not None and p.gradient_home is Tier.NVME else {}),
        **(_repeated(p) if p.updated_twice else {}),
        **handover_adds(problem, *_handed_over(problem, p)),
        **_jobs(problem, jobs_of_parameter(p, fetches, runs, problem.windows)),
    }


def swap_adds(problem: Problem, nbytes: int, tier: Tier) -> dict[Quantity, float]:
    """What the way of an activation to ``tier`` and back adds beside its bytes."""
    jobs = jobs_of_transfer(nbytes, tier, problem.windows)
    return {**handover_adds(problem, 1, 1), **_jobs(problem, (jobs, jobs))}


def _jobs(problem: Problem, jobs: tuple[int, int]) -> dict[Quantity, float]:
    """Beside a GPU: what the interpreter is taken for."""
    if problem.budgets.shared:
        return {}
    return {Quantity.FORWARD_JOBS: jobs[0], Quantity.BACKWARD_JOBS: jobs[1]}


def handover_adds(problem: Problem, forward: int, backward: int) -> dict[Quantity, float]:
    """What so many transfers that compute hands over in each stage add."""
    if not problem.handover_s:
        return {}
    return {
        Quantity.HANDED_OVER_FORWARD_S: problem.handover_s * forward,
        Quantity.HANDED_OVER_BACKWARD_S: problem.handover_s * backward,
    }


def handover_seconds(problem: Problem, plan: Plan) -> tuple[float, float]:
    """What compute takes in the (forward, backward) of ``plan`` to hand transfers over."""
    swaps = _swaps(plan)
    parameters = [_handed_over(problem, p) for p in plan.parameters]
    forward, backward = (swaps + sum(counts) for counts in zip((0, 0), *parameters, strict=True))
    return problem.handover_s * forward, problem.handover_s * backward


def coming_back_seconds(problem: Problem, plan: Plan) -> float:
    """What compute waits in ``plan`` for swapped activations that it needs back sooner than they can be."""
    swapped = ((a.node, a.decision.tier) for a in plan.activations if isinstance(a.decision, Swap))
    return sum(problem.coming_back_s.get(away, 0.0) for away in swapped)


def _swaps(plan: Plan) -> int:
    return sum(isinstance(a.decision, Swap) for a in plan.activations)


def _handed_over(problem: Problem, p: ParameterPlan) -> tuple[int, int]:
    """How many transfers of one parameter and its gradient the (forward, backward) hand over, as ``traffic`` counts them."""
    forward, backward = fetches_of(problem, p.name) if p.home is not Tier.DEVICE else (0, 0)
    return forward, backward + (p.trainable and hands_gradient_over(p, device_of(problem)))


def _blocking(problem: Problem, p: ParameterPlan) -> dict[Quantity, float]:
    """What a parameter for whose update compute waits adds beside the traffic."""
    if p.name not in problem.ends.blocking or p.in_memory_of(device_of(problem)):
        return {}
    return {
        Quantity.BLOCKING_READ: states_read_bytes([p]),
        Quantity.BLOCKING_WRITTEN: blocking_written_bytes([p], problem.ends, problem.windows),
        Quantity.BLOCKING_HIDDEN_S: problem.ends.blocking[p.name].hidden_s,
        Quantity.BLOCKING_BY_LANE: p.numel,
    }


def _repeated(p: ParameterPlan) -> dict[Quantity, float]:
    """What the second time of an update that is made twice adds."""
    held = p.held_bytes if p.gradient_home is Tier.NVME else 0
    return {Quantity.REPEATED_STATES: STATE_BYTES * p.numel, Quantity.REPEATED_HELD_NVME: held}


_READ_ALONE = {Quantity.LATE_STATES: Quantity.LATE_STATES_READ, Quantity.NEXT_STATES: Quantity.NEXT_STATES_READ}
_EARLY = (Quantity.STATES, Quantity.COPIED, Quantity.RETURNED, None, None, Quantity.BY_LANE)
_BESIDE: Mapping[
    OptimizerTiming, tuple[Quantity, Quantity, Quantity, Quantity | None, Quantity | None, Quantity | None]
] = {
    OptimizerTiming.AFTER_BACKWARD: (
        Quantity.LATE_STATES,
        Quantity.LATE_COPIED,
        Quantity.LATE_RETURNED,
        Quantity.LATE_UPDATED,
        Quantity.LATE_HELD_NVME,
        Quantity.LATE_BY_LANE,
    ),
    OptimizerTiming.NEXT_FORWARD: (
        Quantity.NEXT_STATES,
        Quantity.NEXT_COPIED,
        Quantity.NEXT_RETURNED,
        Quantity.NEXT_UPDATED,
        Quantity.NEXT_HELD_NVME,
        None,
    ),
}
"""Stage of the update -> what its states, copy to NVMe, copy to a GPU, elements and gradient on NVMe count as, and its elements
where a lane's thread makes it, if not all of that stage are."""


def _is_by_lane(problem: Problem, p: ParameterPlan) -> bool:
    return p.trainable and not p.stays_in_memory_of(device_of(problem))


def device_of(problem: Problem) -> str:
    """What computes: memory is shared where it is the CPU."""
    return "cpu" if problem.budgets.shared else "cuda"


def fetches_of(problem: Problem, parameter: str) -> tuple[int, int]:
    """How often (forward, backward) fetch ``parameter``."""
    return problem.fetches.get(parameter, (1, 1))


def is_read(problem: Problem, parameter: str) -> bool:
    """Whether the graph reads ``parameter``: what it does not has no gradient either."""
    return not problem.fetches or parameter in problem.fetches


def quantities_of_plan(problem: Problem, plan: Plan) -> dict[Quantity, float]:
    """The sums of ``decision_model`` for ``plan``, memory aside."""
    found = problem.activations
    total: dict[Quantity, float] = dict.fromkeys(Quantity, 0)
    for p in plan.parameters:
        for quantity, added in parameter_adds(problem, p).items():
            total[quantity] += added
    saved = {a.node for a in plan.activations if not isinstance(a.decision, Recompute)}
    total[Quantity.RECOMPUTE_S] = sum(found.seconds[name] for name in closure(found, saved))
    total[Quantity.SWAPPED] = sum(a.bytes for a in plan.activations if isinstance(a.decision, Swap))
    total[Quantity.SWAPPED_NVME] = sum(a.bytes for a in plan.activations if a.decision == Swap(Tier.NVME))
    for a in plan.activations:
        if isinstance(a.decision, Swap):
            for quantity, added in swap_adds(problem, a.bytes, a.decision.tier).items():
                total[quantity] += added
    total[Quantity.COMING_BACK_S] = coming_back_seconds(problem, plan)
    return total


def work_of(problem: Problem, total: Adds) -> cost.Work:
    """The step's work, of which ``total`` are the sums."""
    trained = [p for p in problem.parameters if p.trainable and is_read(problem, p.name)]

    def of(quantity: Quantity) -> int:
        return int(total.get(quantity, 0))

    def requests(quantities: Iterable[Quantity]) -> float:
        return sum(_requests_per_byte(problem, quantity) * total.get(quantity, 0) for quantity in quantities)

    next_read_bytes = of(Quantity.NEXT_STATES) + of(Quantity.NEXT_STATES_READ)
    next_written_bytes = of(Quantity.NEXT_STATES) + of(Quantity.NEXT_COPIED)
    held_bytes = of(Quantity.LATE_HELD_NVME) + of(Quantity.LATE_SUMS_NVME)
    return cost.Work(
        forward_s=problem.forward_s + total.get(Quantity.HANDED_OVER_FORWARD_S, 0.0),
        backward_s=problem.backward_s + total.get(Quantity.HANDED_OVER_BACKWARD_S, 0.0),
        recompute_s=total.get(Quantity.RECOMPUTE_S, 0.0),
        coming_back_s=total.get(Quantity.COMING_BACK_S, 0.0),
        fetched_forward_bytes=of(Quantity.FETCHED_FORWARD),
        fetched_forward_nvme_bytes=of(Quantity.FETCHED_FORWARD_NVME),
        fetched_backward_bytes=of(Quantity.FETCHED_BACKWARD),
        fetched_backward_nvme_bytes=of(Quantity.FETCHED_BACKWARD_NVME),
        swapped_bytes=of(Quantity.SWAPPED),
        swapped_nvme_bytes=of(Quantity.SWAPPED_NVME),
        gradient_bytes=sum(p.bytes for p in trained),
        state_read_bytes=of(Quantity.STATES),
        state_write_bytes=of(Quantity.STATES) + of(Quantity.COPIED),
        by_lane=of(Quantity.BY_LANE),
        adam_parameters=sum(p.numel for p in trained) - of(Quantity.LATE_UPDATED) - of(Quantity.NEXT_UPDATED),
        first_fetched_nvme_bytes=of(Quantity.FIRST_FETCHED_NVME),
        fetches_read_bytes=of(Quantity.FETCHED_FORWARD_NVME) + next_read_bytes + of(Quantity.NEXT_HELD_NVME),
        fetches_written_bytes=next_written_bytes,
        behind_fetches_s=problem.ends.last_fetch_s,
        held_nvme_bytes=held_bytes,
        late_state_read_bytes=of(Quantity.LATE_STATES) + of(Quantity.LATE_STATES_READ),
        late_state_write_bytes=of(Quantity.LATE_STATES) + of(Quantity.LATE_COPIED),
        late_adam_parameters=of(Quantity.LATE_UPDATED),
        late_by_lane=of(Quantity.LATE_BY_LANE),
        updates_read_bytes=of(Quantity.STATES),
        updates_written_bytes=of(Quantity.STATES) + of(Quantity.COPIED) + held_bytes + of(Quantity.NEXT_HELD_NVME),
        before_updates_s=problem.ends.first_gradient_s,
        blocking_read_bytes=of(Quantity.BLOCKING_READ),
        blocking_write_bytes=of(Quantity.BLOCKING_WRITTEN),
        blocking_by_lane=of(Quantity.BLOCKING_BY_LANE),
        blocking_hidden_s=total.get(Quantity.BLOCKING_HIDDEN_S, 0.0),
        next_held_nvme_bytes=of(Quantity.NEXT_HELD_NVME),
        next_state_read_bytes=next_read_bytes,
        next_state_write_bytes=next_written_bytes,
        next_adam_parameters=of(Quantity.NEXT_UPDATED),
        repeated_held_nvme_bytes=of(Quantity.REPEATED_HELD_NVME),
        repeated_state_bytes=of(Quantity.REPEATED_STATES),
        returned_bytes=of(Quantity.RETURNED),
        late_returned_bytes=of(Quantity.LATE_RETURNED),
        next_returned_bytes=of(Quantity.NEXT_RETURNED),
        forward_requests=requests(_IN_FORWARD),
        backward_requests=requests(_IN_BACKWARD),
        forward_launches=problem.launches[0],
        backward_launches=problem.launches[1],
        forward_jobs=of(Quantity.FORWARD_JOBS),
        backward_jobs=of(Quantity.BACKWARD_JOBS),
    )


_UPDATED_IN_FORWARD = (
    Quantity.NEXT_STATES,
    Quantity.NEXT_STATES_READ,
    Quantity.NEXT_COPIED,
    Quantity.NEXT_HELD_NVME,
)
_IN_FORWARD = (Quantity.FETCHED_FORWARD_NVME, Quantity.SWAPPED_NVME, *_UPDATED_IN_FORWARD)
_IN_BACKWARD = (
    Quantity.FETCHED_BACKWARD_NVME,
    Quantity.SWAPPED_NVME,
    Quantity.STATES,
    Quantity.COPIED,
    Quantity.NEXT_HELD_NVME,
    Quantity.LATE_HELD_NVME,
    Quantity.LATE_SUMS_NVME,
    Quantity.REPEATED_STATES,
    Quantity.REPEATED_HELD_NVME,
)
"""What is on the drives beside either, and takes processor time from a CPU that computes."""


def _requests_per_byte(problem: Problem, quantity: Quantity) -> float:
    """Reads and writes of the drives per byte of ``quantity``, if all of them are as large as the windows allow."""
    windows = problem.windows
    if quantity in _STATES:  # counted once, as read; master and moments are two requests each way
        return 4 / (STATE_BYTES * windows.chunk_elements)
    if quantity is Quantity.NEXT_STATES_READ:
        return 2 / (STATE_BYTES * windows.chunk_elements)
    if quantity is Quantity.LATE_SUMS_NVME:
        return 1 / (SUM_BYTES * windows.chunk_elements)
    if quantity in _IN_CHUNKS:
        dtype: torch.dtype = getattr(torch, problem.compute_dtype)
        return 1 / (dtype.itemsize * windows.chunk_elements)
    return 1 / windows.io_bytes


_STATES = (Quantity.STATES, Quantity.NEXT_STATES, Quantity.REPEATED_STATES)
_IN_CHUNKS = (
    Quantity.COPIED,
    Quantity.NEXT_COPIED,
    Quantity.NEXT_HELD_NVME,
    Quantity.LATE_HELD_NVME,
    Quantity.REPEATED_HELD_NVME,
)


def _core_s(problem: Problem, hw: HardwareProfile, quantities: tuple[Quantity, ...]) -> dict[Quantity, float]:
    """On a CPU: what a byte on the drives takes from compute, as ``cost_models.lohan.CORRECTED`` says."""
    if hw.device != "cpu":
        return {}
    per_byte, per_request = hw.io_core_s_per_byte, hw.io_core_s_per_request
    found = {q: per_byte + per_request * _requests_per_byte(problem, q) for q in quantities}
    for states in found.keys() & set(_STATES):  # which are written, too
        found[states] += per_byte
    if Quantity.REPEATED_STATES in found:
        found[Quantity.REPEATED_STATES] += _one_core_s(hw) / STATE_BYTES
    return found


def _one_core_s(hw: HardwareProfile) -> float:
    """What a parameter's Adam by a lane's one thread takes longer on a CPU that computes than by all cores."""
    return (hw.cpu_cores - 1) / hw.adam_parameters_per_s


def _served_by_a_byte(hw: HardwareProfile) -> float:
    """What a byte on the drives takes from a CPU that computes, requests aside."""
    return hw.io_core_s_per_byte if hw.device == "cpu" else 0.0


def step_seconds(problem: Problem, hw: HardwareProfile, plan: Plan) -> float:
    """Seconds of a step by ``plan``."""
    work = work_of(problem, quantities_of_plan(problem, plan))
    return cost.step_seconds(dataclasses.replace(work, serial_optimizer=plan.windows.serial_optimizer), hw)


def stage_lanes(problem: Problem, hw: HardwareProfile) -> tuple[tuple[LaneTime, ...], ...]:
    """The lanes of forward, backward and what is left after it as lines: what ``cost`` computes, in the form that
    ``optimum`` solves.

    What no decision changes is asked of ``cost`` itself. Without drives there is no SSD lane: then nothing may go there.
    """
    nothing = work_of(problem, {})
    q, h2d, d2h = Quantity, hw.h2d_bytes_per_s, hw.d2h_bytes_per_s
    on_cpu = hw.device == "cpu"
    adam_s = cost.update_s(1, hw)
    copied_s = {q.SWAPPED: 1 / d2h} if on_cpu else {}
    returned_s = 0.0 if on_cpu else 1 / h2d
    next_on_device = {q.NEXT_UPDATED: adam_s + _one_core_s(hw)} if on_cpu else {}
    forward = _links(
        cost.forward_stage(nothing, hw),
        {
            Lane.COMPUTE: {
                q.HANDED_OVER_FORWARD_S: 1.0,
                **_core_s(problem, hw, _IN_FORWARD),
                **copied_s,
                **next_on_device,
                **({q.FIRST_FETCHED_NVME: 1 / hw.ssd_read_bytes_per_s} if hw.nvme else {}),
            },
            Lane.H2D: {q.FETCHED_FORWARD: 1 / h2d} | ({q.FETCHED_FORWARD_NVME: -1 / h2d} if on_cpu else {}),
            Lane.D2H: {q.SWAPPED: 1 / d2h},
            Lane.CPU: {q.NEXT_UPDATED: adam_s, q.NEXT_RETURNED: returned_s},
            PYTHON_LANE: {q.FORWARD_JOBS: hw.interpreter_s_per_job},
        },
    )
    back = {q.FETCHED_BACKWARD_NVME: -1 / h2d, q.SWAPPED_NVME: -1 / h2d} if on_cpu else {}
    not_here = {q.LATE_UPDATED: -adam_s, q.NEXT_UPDATED: -adam_s}
    again = {q.REPEATED_STATES: adam_s / STATE_BYTES}
    core_s = _core_s(problem, hw, _IN_BACKWARD)
    if on_cpu:
        core_s[q.REPEATED_STATES] += again[q.REPEATED_STATES]
    backward = _links(
        cost.backward_stage(nothing, hw),
        {
            Lane.COMPUTE: {
                q.RECOMPUTE_S: 1.0,
                q.HANDED_OVER_BACKWARD_S: 1.0,
                q.COMING_BACK_S: 1.0,
                **core_s,
                **({**not_here, q.BY_LANE: _one_core_s(hw)} if on_cpu else {}),
            },
            Lane.H2D: {q.FETCHED_BACKWARD: 1 / h2d, q.SWAPPED: 1 / h2d, **back},
            Lane.CPU: {**not_here, **again, q.RETURNED: returned_s},
            PYTHON_LANE: {q.BACKWARD_JOBS: hw.interpreter_s_per_job},
        },
    )
    late = {
        q.LATE_UPDATED: adam_s,
        q.LATE_RETURNED: returned_s,
        q.LATE_BY_LANE: _one_core_s(hw) if on_cpu else 0.0,
    }
    after: tuple[LaneTime, ...] = (LaneTime((Line(0.0, late),)),)
    if hw.nvme:
        late_held = (q.LATE_HELD_NVME, q.LATE_SUMS_NVME)
        fetches = (q.FETCHED_FORWARD_NVME, q.NEXT_STATES, q.NEXT_STATES_READ, q.NEXT_HELD_NVME)
        forward += _ssd(hw, fetches, (q.SWAPPED_NVME, q.NEXT_STATES, q.NEXT_COPIED))
        forward += _ssd(hw, fetches, (q.NEXT_STATES, q.NEXT_COPIED), problem.ends.last_fetch_s)
        backward += _ssd(
            hw,
            (q.FETCHED_BACKWARD_NVME, q.SWAPPED_NVME, q.STATES, q.REPEATED_STATES, q.REPEATED_HELD_NVME),
            (q.STATES, q.COPIED, q.NEXT_HELD_NVME, *late_held, q.REPEATED_STATES),
        )
        (compute,) = next(lane.lines for lane in backward if Quantity.RECOMPUTE_S in lane.lines[0].per)
        served_s = _served_by_a_byte(hw)
        beside = {
            **compute.per,
            q.BLOCKING_HIDDEN_S: -1.0,
            q.BLOCKING_READ: -served_s,
            q.BLOCKING_WRITTEN: -served_s,
            q.BLOCKING_BY_LANE: -(adam_s + _one_core_s(hw)) if on_cpu else 0.0,
        }
        backward += _ssd(hw, (q.BLOCKING_READ,), (q.BLOCKING_WRITTEN,), compute.seconds, beside)
        first_s = problem.ends.first_gradient_s
        backward += _ssd(hw, (q.STATES,), (q.STATES, q.COPIED, q.NEXT_HELD_NVME, *late_held), first_s)
        after += _ssd(hw, (q.LATE_STATES, q.LATE_STATES_READ, *late_held), (q.LATE_STATES, q.LATE_COPIED))
    return forward, backward, after


def _links(fixed: Stage, slopes: Mapping[str, Adds]) -> tuple[LaneTime, ...]:
    lanes = (lane for lane in fixed.lanes_s if lane not in (Lane.SSD.value, FETCHES_BOUND, UPDATES_BOUND))
    return tuple(LaneTime((Line(fixed.lanes_s[lane], slopes.get(lane, {})),)) for lane in lanes)


def _ssd(
    hw: HardwareProfile,
    reads: tuple[Quantity, ...],
    writes: tuple[Quantity, ...],
    from_s: float | None = None,
    beside: Adds | None = None,
) -> tuple[LaneTime, ...]:
    """The drives, simplex; with ``from_s`` a bound, made by them from then on and what ``beside`` adds. Where their mixed
    rate is the lower one, what is read and written in turns goes at that rate and the rest alone: the less of two lines,
    of which one holds where more is read and the other where more is written."""
    read_s, write_s = 1 / hw.ssd_read_bytes_per_s, 1 / hw.ssd_write_bytes_per_s
    both_s = 2 / hw.ssd_mixed_bytes_per_s

    def line(per_read_s: float, per_written_s: float) -> Line:
        per = {**dict.fromkeys((*reads, *writes), 0.0), **(beside or {})}
        for quantity in reads:
            per[quantity] += per_read_s
        for quantity in writes:
            per[quantity] += per_written_s
        return Line(from_s or 0.0, per)

    is_work = from_s is None
    one_way = LaneTime((line(read_s, write_s),), is_work)
    if both_s <= read_s + write_s:
        return (one_way,)
    return one_way, LaneTime((line(read_s, both_s - read_s), line(both_s - write_s, write_s)), is_work)
