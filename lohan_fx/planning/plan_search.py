"""plan_search: the plan for a joint graph: the policy's, with the staging and the windows that suit it."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

from torch.fx import GraphModule

from lohan_fx import cost
from lohan_fx.errors import InfeasiblePlan
from lohan_fx.inductor import BOXED
from lohan_fx.passes.activation_graph import activation_graph
from lohan_fx.passes.assign_buffers import assignments, cleared_bytes
from lohan_fx.passes.halves import Halves
from lohan_fx.passes.liveness import device_peak, outputs_bytes, swap_out_room
from lohan_fx.passes.schedule import schedule
from lohan_fx.passes.step_ends import step_ends
from lohan_fx.passes.traffic import fetch_counts, traffic
from lohan_fx.passes.turn import seconds_away
from lohan_fx.plan import Plan, Share, Swap, Tier, Use, Windows
from lohan_fx.planning import staging
from lohan_fx.planning.budgets import largest_layer, staging_bytes
from lohan_fx.planning.memory_model import lowest_tier, resident_bytes
from lohan_fx.planning.planner import make_plan
from lohan_fx.planning.predict import BUFFERS_ROOM_BYTES
from lohan_fx.planning.problem import Budgets, Problem
from lohan_fx.request import Request, node_seconds, plan_of_homes, settled
from lohan_fx.simulation.simulated_step import Simulation, simulate_program, simulated_step_s
from lohan_fx.simulation.simulated_waits import COMING_BACK, LEAVING, waits_s
from lohan_fx.simulation.step_program import StepProgram, step_program

WORTH_PLACES = 0.005
"""Share of a step that places for values must save before a plan is made that leaves them memory."""
PLACES_ATTEMPTS = 2
SWAP_WINDOWS = ("swap_in_bytes", "swap_out_bytes")
TIMES_LARGEST = (1, 2, 3, 4)
"""The largest activation that is swapped, so many times: the windows that are tried."""
SPARE_TRIPS = 2
"""What is away for no longer than it takes and so many activations more may stand behind them in line."""
ALL_OF_THEM = 2**62
"""Room for all values that can be given a place."""


class Rewrites:
    """The halves that plans make of one joint graph, unverified; only the last are kept, for whoever asks again."""

    def __init__(self, joint: GraphModule, num_outputs: int, rewrite: Callable[[Plan], Halves]) -> None:
        self.joint, self.num_outputs, self._rewrite = joint, num_outputs, rewrite
        self._last: tuple[Plan, Halves] | None = None
        self._peaks: dict[tuple[object, ...], int] = {}

    def device_peak(self, plan: Plan) -> int:
        """Most device bytes alive, remembered: a model that is planned again is asked for some plans again."""
        key = (*_of_graphs(plan), plan.windows.gradient_bytes, plan.windows.swap_out_bytes, plan.forwards)
        if key not in self._peaks:
            self._peaks[key] = device_peak(self.halves(plan), plan)
        return self._peaks[key]

    def halves(self, plan: Plan) -> Halves:
        """Those of ``plan``, until others are asked for: of the same decisions they are scheduled anew."""
        last, self._last = self._last, None
        if last is not None and _decided(last[0]) == _decided(plan):
            if _scheduled(last[0]) != _scheduled(plan):
                schedule(last[1], plan)
            self._last = (plan, last[1])
        else:
            del last  # before the next are made: the halves of a large model are large
            self._last = (plan, self._rewrite(plan))
        return self._last[1]


def _of_graphs(plan: Plan) -> tuple[object, ...]:
    """What of a plan its graphs show."""
    return *_decided(plan), *_scheduled(plan)


def _decided(plan: Plan) -> tuple[object, ...]:
    return plan.activations, plan.parameters


def _scheduled(plan: Plan) -> tuple[object, ...]:
    """Of all windows only those of ``schedule`` show in graphs."""
    return plan.windows.fetch_bytes, plan.windows.swap_in_bytes


def search(rewrites: Rewrites, request: Request) -> Plan:
    """The plan for a joint graph that the policy of ``request`` makes, with staging and windows to match.

    Raises ``InfeasiblePlan`` where there is none with the smallest requests either, which take the least memory.
    """
    try:
        return _planned(rewrites, request)
    except InfeasiblePlan:
        if not request.chooses_staging:
            raise
    # A resumed training's states are in the pieces of the one before: its other sizes may still be the smallest.
    smallest = functools.partial(staging.smallest, cut=not request.chooses_sizes)
    windows_of = None if request.windows_of is None else functools.partial(_smallest_of, request.windows_of, smallest)
    asked = settled(request, smallest(request.windows))
    return _planned(rewrites, dataclasses.replace(asked, chooses_staging=True, windows_of=windows_of))


def _smallest_of(
    windows_of: Callable[[int], Windows], smallest: Callable[[Windows], Windows], promise_bytes: int
) -> Windows:
    return smallest(windows_of(promise_bytes))


def _planned(rewrites: Rewrites, request: Request) -> Plan:
    seconds = node_seconds(request)
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
        ends=step_ends(keeping, seconds, request.windows),
        holds=request.holds,
        handover_s=cost.handover_s(request.hw),
        launches=(costs.forward_launches, costs.backward_launches),
        windows_of=request.windows_of,
        forwards=request.forwards,
        outputs_bytes=outputs_bytes(keeping),
        loss_only=request.loss_only,
    )
    problem = _with_turn(problem, keeping, request)
    plan, problem = _running_ahead(make_plan(problem, request.hw), problem, rewrites, request)
    plan, places_bytes = _with_places(plan, problem, rewrites, request)
    if places_bytes:
        budgets = _with_fixed(problem.budgets, places_bytes)
        problem, request = dataclasses.replace(problem, budgets=budgets), dataclasses.replace(request, budgets=budgets)
    if request.chooses_staging:
        plan = _with_staging(plan, problem, rewrites, request)
    return _with_swap_out_room(_moved(plan, places_bytes, Use.CAPTURE, Use.PLACES), rewrites.halves(plan))


def _with_turn(problem: Problem, keeping: Halves, request: Request) -> Problem:
    """``problem`` with what is known of activations at the turn from forward to backward, where ``keeping`` keeps them all."""
    activations = problem.activations.activations
    away_s = {name: s for name, s in seconds_away(keeping, node_seconds(request)).items() if name in activations}
    tiers = Tier.HOST, Tier.NVME
    # As long as it takes is how long what is needed back at once would be waited for.
    takes_s = {(n, t): cost.coming_back_s(request.hw, activations[n].bytes, t, 0.0) for n in away_s for t in tiers}
    late_s = {(name, tier): seconds - away_s[name] for (name, tier), seconds in takes_s.items()}
    spare_s = SPARE_TRIPS * max(
        (takes_s[at] for at, late in late_s.items() if at[1] is Tier.HOST and late <= 0), default=0
    )
    return dataclasses.replace(
        problem,
        coming_back_s={at: late for at, late in late_s.items() if late > 0},
        soon_back=frozenset(name for name in away_s if late_s[name, Tier.HOST] > -spare_s),
    )


def _running_ahead(plan: Plan, problem: Problem, rewrites: Rewrites, request: Request) -> tuple[Plan, Problem]:
    """``plan``, or one where compute waits less for activations on their way, and ``problem`` as it was asked for that.

    The formula takes every lane as always at work. But where all that is swapped is made first, the link is not done with it
    when the next comes; and a layer's backward may begin with an activation larger than the window, which then comes back while
    compute waits. So where it waits, activations that stay and activations that go may take turns, and more of the
    device's memory may be for what is on its way. Each is tried in the simulator, and the plan made for it must be faster.
    """
    swapped = any(isinstance(a.decision, Swap) for a in plan.activations)
    lacks_drives = lowest_tier(plan) is Tier.NVME and not request.hw.nvme  # which is said later
    if request.budgets.shared or not swapped or lacks_drives:
        return plan, problem
    began = _simulated(plan, rewrites, request)
    for takes_turns in (True, False):
        waits = waits_s(began)
        if waits.get(COMING_BACK, 0.0) + waits.get(LEAVING, 0.0) < staging.WORTH_IT * began.step_s:
            break
        asked = _taking_turns(problem) if takes_turns else _with_wider_windows(plan, problem, rewrites, request, began)
        if asked == problem:
            continue
        try:
            again = make_plan(asked, request.hw)
        except InfeasiblePlan:
            continue
        if _of_graphs(again) == _of_graphs(plan) and again.windows == plan.windows:
            continue
        found = _simulated(again, rewrites, request)
        if found.step_s < began.step_s:
            plan, problem, began = again, asked, found
    return plan, problem


def _taking_turns(problem: Problem) -> Problem:
    """``problem`` with activations that stay and activations that go in turns."""
    return dataclasses.replace(problem, in_turns=True)


def _with_wider_windows(
    plan: Plan, problem: Problem, rewrites: Rewrites, request: Request, began: Simulation
) -> Problem:
    """``problem`` with the windows for activations that are best for ``plan``, at the price that their bytes have elsewhere."""
    largest = max(a.bytes for a in plan.activations if isinstance(a.decision, Swap))
    per_byte_s = 0.0 if plan.division is None else plan.division.per_byte_s.get(Tier.DEVICE.value, 0.0)

    def with_price_s(tried: Plan) -> float:
        more: int = sum(getattr(tried.windows, window) - getattr(problem.windows, window) for window in SWAP_WINDOWS)
        return _simulated(tried, rewrites, request, with_room=False).step_s + per_byte_s * more

    best = dataclasses.replace(plan, windows=with_swaps_of(plan.windows, problem.windows))
    best_s = with_price_s(best)
    for window in SWAP_WINDOWS:
        windows = best.windows
        for wider in (largest * times for times in TIMES_LARGEST if largest * times > getattr(windows, window)):
            tried = dataclasses.replace(plan, windows=dataclasses.replace(windows, **{window: wider}))
            if (took_s := with_price_s(tried)) < best_s - staging.WORTH_IT * began.step_s:
                best, best_s = tried, took_s
    return dataclasses.replace(problem, windows=with_swaps_of(problem.windows, best.windows))


def _simulated(plan: Plan, rewrites: Rewrites, request: Request, *, with_room: bool = True) -> Simulation:
    """A step of ``plan``, ``with_room`` for what leaves as far as it costs nothing."""
    tried = _with_swap_out_room(plan, rewrites.halves(plan)) if with_room else plan
    program = _program(tried, rewrites, request)
    return simulate_program(program, tried, request.hw, transfers=staging.TRANSFERS)


def _program(plan: Plan, rewrites: Rewrites, request: Request) -> StepProgram:
    return step_program(rewrites.halves(plan), plan, node_seconds(request), cost.handover_s(request.hw))


def with_swaps_of(windows: Windows, other: Windows) -> Windows:
    """``windows`` with the room of ``other`` for activations on their way."""
    return dataclasses.replace(windows, swap_in_bytes=other.swap_in_bytes, swap_out_bytes=other.swap_out_bytes)


def _with_places(plan: Plan, problem: Problem, rewrites: Rewrites, request: Request) -> tuple[Plan, int]:
    """A plan that leaves so many bytes of the promise to the values of its graphs: in places of their own the largest need
    not be cleared by the kernel each time they are made (docs/0035). ``plan``, if it has that much to spare or other uses save
    more; 0 where nothing is to be reserved. What is compiled makes its values itself."""
    if plan.division is None or not problem.budgets.shared or request.segments != BOXED:
        return plan, 0
    halves = rewrites.halves(plan)
    worth_bytes = WORTH_PLACES * plan.division.step_s / request.hw.clearing_s_per_byte
    if cleared_bytes(halves, {}) < worth_bytes:
        return plan, 0
    apart, more = assignments(halves, plan, room_bytes=ALL_OF_THEM)
    without, _ = assignments(halves, plan, room_bytes=BUFFERS_ROOM_BYTES)
    fewer_bytes = cleared_bytes(halves, without) - cleared_bytes(halves, apart)
    if fewer_bytes < worth_bytes:
        return plan, 0
    saved_s = fewer_bytes * request.hw.clearing_s_per_byte
    if more <= plan.division.bytes_of(Tier.HOST, Use.FREE):
        return _moved(plan, more, Use.FREE, Use.CAPTURE), more  # as a plan that is made so shows it
    for _ in range(PLACES_ATTEMPTS):
        try:
            other = make_plan(dataclasses.replace(problem, budgets=_with_fixed(problem.budgets, more)), request.hw)
        except InfeasiblePlan:
            return plan, 0
        assert other.division is not None
        if other.division.step_s >= plan.division.step_s + saved_s:
            return plan, 0
        # Its graphs are others, and may need more.
        wanted = assignments(rewrites.halves(other), other, room_bytes=ALL_OF_THEM)[1]
        if wanted <= max(more, BUFFERS_ROOM_BYTES):
            return other, more
        more = wanted
    return plan, 0


def _moved(plan: Plan, nbytes: int, source: Use, target: Use) -> Plan:
    """``plan``, in whose division so many bytes of host memory have another use."""
    if not nbytes or plan.division is None:
        return plan
    found = {(share.tier, share.use): share for share in plan.division.shares}
    for use, change in ((source, -nbytes), (target, nbytes)):
        share = found.get((Tier.HOST, use), Share(Tier.HOST, use, 0, 0.0))
        found[Tier.HOST, use] = dataclasses.replace(share, bytes=share.bytes + change)
    order = list(Use)
    shares = sorted(found.values(), key=lambda share: (share.tier is Tier.HOST, order.index(share.use)))
    return dataclasses.replace(plan, division=dataclasses.replace(plan.division, shares=tuple(shares)))


def _with_fixed(budgets: Budgets, nbytes: int) -> Budgets:
    return dataclasses.replace(budgets, fixed_bytes=budgets.fixed_bytes + nbytes)


def _with_staging(plan: Plan, problem: Problem, rewrites: Rewrites, request: Request) -> Plan:
    """``plan`` with the staging that pays, and made again where that takes memory from other uses, or leaves them more."""
    division, shared = plan.division, request.budgets.shared
    if division is None or all(p.home is Tier.DEVICE and p.states_home is not Tier.NVME for p in plan.parameters):
        return plan
    program = _program(plan, rewrites, request)

    def step_s(windows: Windows, transfers: int | None = staging.TRANSFERS) -> float:
        tried = dataclasses.replace(plan, windows=windows)
        return simulated_step_s(program, tried, request.hw, transfers=transfers)

    free = division.bytes_of(Tier.HOST, Use.FREE)
    per_byte_s = division.per_byte_s.get(Tier.HOST.value, 0.0)
    found = staging.choose(
        plan.windows,
        step_s,
        layer_elements=largest_layer(problem.parameters)[1],
        shared=shared,
        per_byte_s=per_byte_s,
        free_bytes=free,
        # On a CPU nothing says what a size costs where no rates by size were measured; beside a GPU the interpreter does.
        sizes=request.chooses_sizes and (not shared or any(drive.by_request for drive in request.hw.nvme)),
        finer_s=None if shared else functools.partial(step_s, transfers=None),
    )
    more = staging_bytes(found.windows, shared=shared) - staging_bytes(plan.windows, shared=shared)
    resized = not staging.same_sizes(found.windows, plan.windows)
    if 0 <= more <= free and not resized:
        return staging.with_staging(plan, found, more)
    # What the buffers' bytes would save elsewhere is known at the margin only: the plan made for them must be faster.
    tried = [found] if found.windows == found.sized or not resized else [found, found.with_fewer()]
    again = [made for chosen in tried if (made := _made_for(chosen, problem, rewrites, request, resized)) is not None]
    fastest, again_s = min(again, key=lambda made: made[1], default=(plan, math.inf))
    if again_s < found.began_s:
        return fastest
    if not resized:
        return plan
    return _with_staging(plan, problem, rewrites, dataclasses.replace(request, chooses_sizes=False))


def _made_for(
    found: staging.Staging, problem: Problem, rewrites: Rewrites, request: Request, resized: bool
) -> tuple[Plan, float] | None:
    """The plan that has the staging ``found`` from the start, and the simulated seconds of a step by it; None where it does
    not fit."""
    asked = settled(request, found.windows)
    windows = with_swaps_of(asked.windows, problem.windows)
    changed = dataclasses.replace(problem, budgets=asked.budgets, windows=windows)
    if resized:
        keeping = rewrites.halves(_keep_everything(request))
        changed = dataclasses.replace(changed, ends=step_ends(keeping, node_seconds(request), asked.windows))
        changed = _with_turn(changed, keeping, asked)
    try:
        plan = staging.with_staging(make_plan(changed, asked.hw), found, 0)
    except InfeasiblePlan:
        return None
    program = _program(plan, rewrites, asked)
    return plan, simulated_step_s(program, plan, asked.hw, transfers=staging.TRANSFERS)


def _with_swap_out_room(plan: Plan, halves: Halves) -> Plan:
    """``plan`` with all the room for activations on their way out that costs nothing: usually the forward, where they
    leave, is not where memory is short. On a GPU that is what the plan leaves of its memory, on a CPU what its peak has
    at other moments."""
    if not any(isinstance(a.decision, Swap) for a in plan.activations):
        return plan
    on_cpu = plan.device == "cpu"
    limit = device_peak(halves, plan) if on_cpu else plan.device_memory_bytes - resident_bytes(plan)[0]
    room = max(plan.windows.swap_out_bytes, swap_out_room(halves, plan, limit - plan.waiting_bytes))
    return dataclasses.replace(plan, windows=dataclasses.replace(plan.windows, swap_out_bytes=room))


def _keep_everything(request: Request) -> Plan:
    """A plan without decisions: all that the backward reads is kept. Only good for counting."""
    return dataclasses.replace(plan_of_homes(request), device_memory_bytes=2**62)
