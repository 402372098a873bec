"""simulator: never below the formula, never above a budget, and what more bandwidth and larger windows change."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lohan_fx import cost, simulate
from lohan_fx.hardware import HardwareProfile
from lohan_fx.meta import Cost
from lohan_fx.passes.halves import Halves
from lohan_fx.passes.liveness import device_peaks, peaks
from lohan_fx.passes.step_ends import NEGLIGIBLE
from lohan_fx.passes.traffic import traffic
from lohan_fx.plan import Decision, Keep, Plan, Recompute, Swap, Tier
from lohan_fx.planning.budgets import make_budgets
from lohan_fx.request import Request
from tests.exhaustive import examples
from tests.lohan_fx.simulation.simulated import DECISIONS, PAGE, drive, machine, run, second_each, windows
from tests.lohan_fx.test_pipeline import request, trained
from tests.passes.graphs import captured, plan_for, rewrite

# --- within the plan's memory ----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["keep", "recompute", "swap-nvme", "swap-host", "in-memory", "lohan"])
@pytest.mark.parametrize("name", ["two-layers", "dropout"])
def test_peaks_stay_within_the_plan(name: str, policy: str) -> None:
    """Also where the link is slow and much is still leaving."""
    halves, plan = trained(found := captured(name), counted(request(found, policy=policy)))
    assert plan.prediction is not None
    for link in (1e3, 1e9):
        hw = machine(h2d_bytes_per_s=link, d2h_bytes_per_s=link)
        step = simulate(halves, plan, hw, node_seconds=second_each)
        for tier, nbytes in step.peak_bytes.items():
            assert nbytes <= plan.prediction.peak_bytes[tier]
            assert nbytes == max(getattr(point, f"{tier}_bytes") for point in step.memory)
        assert [p.time_s for p in step.memory] == sorted(p.time_s for p in step.memory)


def counted(asked: Request) -> Request:
    """With the host memory that graphs of so many parameters take."""
    budgets = make_budgets(asked.hw, asked.budgets.host_memory_bytes, None, asked.windows, len(asked.parameters))
    return dataclasses.replace(asked, budgets=budgets)


@pytest.mark.parametrize("decision", [Swap(Tier.NVME), Swap(Tier.HOST)], ids=str)
@pytest.mark.parametrize("window", [0, 2 * PAGE, 1 << 20])
@pytest.mark.parametrize("name", ["dropout", "two-layers", "branches"])
def test_on_a_gpu_what_is_leaving_stays_within_its_window(name: str, window: int, decision: Decision) -> None:
    """The thread that launches the graph runs ahead of the device and of the link, until the window stops it."""
    given = windows(swap_out_bytes=window, gradient_bytes=PAGE)
    plan = dataclasses.replace(plan_for(found := captured(name), decision, windows=given), device="cuda")
    halves = rewrite(found, plan)
    most = max(half.bytes for half in device_peaks(halves, plan).values())
    unbounded = max(half.bytes for half in peaks(halves, plan).values())
    for link in (1e2, 1e4, 1e9):
        step = simulate(halves, plan, machine(device="cuda", d2h_bytes_per_s=link), node_seconds=second_each)
        assert step.peak_bytes["device"] <= most
    if name == "dropout":
        slow = simulate(halves, plan, machine(device="cuda", d2h_bytes_per_s=1e2), node_seconds=second_each)
        assert slow.peak_bytes["device"] > unbounded or window < 1 << 20
        assert any(e.label.startswith("wait:swap window") for e in slow.events) == (window < 1 << 20)


# --- against the formula --------------------------------------------------------------------------------------


rates = st.floats(1e3, 1e6)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@given(h2d=rates, d2h=rates, adam=rates, read=rates, write=rates, memory=rates, node_s=st.floats(1e-4, 1.0))
@example(h2d=1e6, d2h=1e6, adam=283727.0, read=16516.0, write=1e3, memory=10215.0, node_s=1.0)
@examples(15)
def test_never_below_the_formula(
    device: str, h2d: float, d2h: float, adam: float, read: float, write: float, memory: float, node_s: float
) -> None:
    """Lane by lane over the whole step. Stage by stage on a CPU where nothing is swapped: what a swap leaves for later
    the formula counts in the forward, and the thread that launches a GPU's work begins the backward before its time.

    What a CPU's compute waits for is a bound within ``NEGLIGIBLE`` (``step_ends``); beside a GPU the thread waits that
    launches, and what it has launched goes on meanwhile. What the lanes do is one to rounding."""
    hw = machine(
        h2d_bytes_per_s=h2d, d2h_bytes_per_s=d2h, adam_parameters_per_s=adam, host_memory_bytes_per_s=memory,
        nvme=(drive(read, write),),
    )  # fmt: skip
    # Compute and Adam are lanes of their own, as here with 1000 cores; on a CPU nothing crosses a link from NVMe.
    apart = dataclasses.replace(hw, device="cuda")
    if device == "cpu":
        apart = dataclasses.replace(apart, h2d_bytes_per_s=1e12, d2h_bytes_per_s=1e12)
    for halves, plan in rewritten(device):
        on = dataclasses.replace(hw, device=device)
        work = traffic(
            halves,
            plan,
            lambda c: 0.0 if c.is_view else node_s,
            drives_s=functools.partial(cost.ssd_seconds, hw=on),
            by_lane_s=functools.partial(cost.lane_update_s, hw=on),
        )
        step = simulate(halves, plan, on, node_seconds=lambda c: 0.0 if c.is_view else node_s)
        almost, nearly = 1 - 1e-8, 1 - NEGLIGIBLE
        waits = cost.backward_stage(work, apart)
        work = dataclasses.replace(work, blocking_read_bytes=0, blocking_write_bytes=0)
        forward, backward = cost.forward_stage(work, apart), cost.backward_stage(work, apart)
        after = cost.optimizer_stage(work, apart)
        if device == "cpu" and not work.swapped_bytes:
            assert step.forward_s >= forward.seconds * almost
            assert step.backward_s + step.tail_s >= max(backward.seconds * almost, waits.seconds * nearly)
            ends = max(backward.lanes_s["compute"], backward.lanes_s["ssd"]) + after.lanes_s.get("ssd", 0.0)
            assert step.backward_s + step.tail_s >= nearly * ends
        if device == "cpu":
            assert step.step_s >= nearly * (forward.lanes_s["compute"] + waits.lanes_s["compute"])
        for name in ("compute", "ssd", "cpu", *(("h2d", "d2h") if device == "cuda" else ())):
            stages = (forward, backward, after)
            assert step.step_s >= sum(stage.lanes_s.get(name, 0.0) for stage in stages) * almost


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize("per_request_s", [0.1, 10.0])
def test_what_requests_take_of_a_processor_is_what_the_formula_says(per_request_s: float, cores: int) -> None:
    """Also where that is longer than the drive takes for them, and where there is one core only."""
    plan = plan_for(found := captured("dropout"), Keep())
    hw = machine(device="cpu", cpu_cores=cores, io_core_s_per_request=per_request_s, adam_parameters_per_s=1e12)
    halves = rewrite(found, plan)

    def seconds(found: Cost) -> float:
        return 100 * second_each(found)

    work = traffic(halves, plan, seconds)
    step = simulate(halves, plan, hw, node_seconds=seconds)
    assert step.step_s == pytest.approx(cost.step_seconds(work, hw), rel=0.05)


@functools.cache
def rewritten(device: str) -> list[tuple[Halves, Plan]]:
    """A transformer with its activations treated in each way, with buffers for the writes of four updates and of two."""
    found, made = captured("dropout"), []
    for decision, buffers in itertools.product(DECISIONS, (4, 2)):
        given = windows(io_buffers=4, optimizer_buffers=buffers, gradient_bytes=PAGE)
        plan = dataclasses.replace(plan_for(found, decision, windows=given), device=device)
        made.append((rewrite(found, plan), plan))
    return made


# --- what more of anything changes ----------------------------------------------------------------------------

SPEEDS = ("h2d_bytes_per_s", "d2h_bytes_per_s", "adam_parameters_per_s", "host_memory_bytes_per_s")


def faster(
    hw: HardwareProfile, factor: float, names: Iterable[str] = SPEEDS, *, drives: bool = True
) -> HardwareProfile:
    changes: dict[str, Any] = {name: factor * getattr(hw, name) for name in names}
    if drives:
        (one,) = hw.nvme
        changes["nvme"] = (drive(factor * one.read_bytes_per_s, factor * one.write_bytes_per_s),)
    return dataclasses.replace(hw, **changes)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("decision", DECISIONS, ids=str)
def test_all_rates_doubled_halve_the_time(decision: Decision, device: str) -> None:
    plan = dataclasses.replace(plan_for(found := captured("dropout"), decision), device=device)
    halves = rewrite(found, plan)
    hw = machine(device=device, cpu_cores=2, host_memory_bytes_per_s=5e4, memory_bytes_per_s=5e4)
    slow = simulate(halves, plan, hw, node_seconds=second_each)
    fast_hw = faster(hw, 2.0, (*SPEEDS, "memory_bytes_per_s"))
    fast = simulate(halves, plan, fast_hw, node_seconds=lambda c: second_each(c) / 2)
    assert fast.step_s == pytest.approx(slow.step_s / 2)
    assert fast.busy_s == pytest.approx({name: seconds / 2 for name, seconds in slow.busy_s.items()})
    assert fast.bytes == slow.bytes


@given(which=st.sampled_from((*SPEEDS, "drives")), factor=st.floats(1.0, 8.0), base=st.floats(0.1, 10.0))
@examples(25)
def test_more_bandwidth_is_never_much_slower(which: str, factor: float, base: float) -> None:
    """Not "never slower": a transfer that ends sooner can put another one on the drive before one that compute waits
    for, as in any schedule by priority that is not interrupted (Graham's anomalies). It costs a few per cent at most."""
    hw = faster(machine(device="cuda"), base, drives=False)
    better = faster(hw, factor, [] if which == "drives" else [which], drives=which == "drives")
    for halves, plan in rewritten("cuda"):
        before = simulate(halves, plan, hw, node_seconds=second_each)
        after = simulate(halves, plan, better, node_seconds=second_each)
        assert after.step_s <= 1.05 * before.step_s


@given(which=st.sampled_from(SPEEDS), factor=st.floats(1.0, 8.0))
@examples(15)
def test_more_bandwidth_is_never_slower_where_lanes_work_in_order(which: str, factor: float) -> None:
    """Without a drive every lane works in the order of the graph."""
    plan = dataclasses.replace(plan_for(captured("dropout"), Keep(), home=Tier.HOST), device="cuda")
    halves, hw = rewrite(captured("dropout"), plan), machine(device="cuda")
    before = simulate(halves, plan, hw, node_seconds=second_each)
    after = simulate(halves, plan, faster(hw, factor, [which], drives=False), node_seconds=second_each)
    assert after.step_s <= before.step_s * (1 + 1e-9)


def with_windows(decision: Decision, **changes: int) -> float:
    """Seconds of a step whose transfers take about as long as what they are hidden behind."""
    wide = windows(fetch_bytes=PAGE, swap_in_bytes=PAGE, gradient_bytes=PAGE, optimizer_buffers=2)
    plan = plan_for(captured("dropout"), decision, windows=dataclasses.replace(wide, **changes))
    plan = dataclasses.replace(plan, device="cuda")
    return run(captured("dropout"), plan, machine(device="cuda")).step_s


@pytest.mark.parametrize("decision", DECISIONS, ids=str)
@pytest.mark.parametrize("window", ["io_buffers", "optimizer_buffers"])
def test_more_buffers_are_not_slower(window: str, decision: Decision) -> None:
    seconds = [with_windows(decision, **{window: count}) for count in (2, 4, 16)]
    assert seconds[1] <= 1.01 * seconds[0] and seconds[2] <= 1.01 * seconds[1]


@pytest.mark.parametrize("window", ["fetch_bytes", "gradient_bytes"])
def test_larger_windows_are_not_much_slower_where_nothing_is_swapped(window: str) -> None:
    """Not "never", for the reason given above."""
    seconds = [with_windows(Keep(), **{window: size}) for size in (0, PAGE, 1 << 20)]
    assert seconds[1] <= 1.02 * seconds[0] and seconds[2] <= 1.02 * seconds[1]


def test_fetching_far_ahead_does_not_delay_what_is_swapped_in() -> None:
    """Both have the same priority on the drive, but what has no buffer yet does not queue there: with a window for
    everything the parameters of the whole backward are not read before the first activation."""
    assert with_windows(Swap(Tier.NVME), fetch_bytes=1 << 20) < 1.02 * with_windows(Swap(Tier.NVME))


def test_what_compute_needs_goes_before_optimizer_traffic() -> None:
    """Reads of parameters start while writes of states are queued, and none of those starts while such a read waits."""
    plan = plan_for(found := captured("dropout"), Recompute(), windows=windows(optimizer_buffers=8, io_buffers=8))
    step = run(found, plan, machine(), lambda c: second_each(c) / 100)
    backward = [e for e in step.events if e.lane == "ssd" and e.start_s > step.forward_s]
    kinds = [e.label.rpartition(":")[2] == "compute" for e in backward]
    assert True in kinds and kinds.index(True) < len(kinds) - 1 - kinds[::-1].index(False)


def test_cores_that_compute_shares_make_it_slower() -> None:
    plan = plan_for(found := captured("dropout"), Keep())
    slow, fast = (
        run(found, plan, machine(device="cpu", cpu_cores=2, adam_parameters_per_s=rate)) for rate in (100.0, 1e12)
    )
    work = traffic(rewrite(found, plan), plan, second_each)
    assert fast.busy_s["compute"] == pytest.approx(work.forward_s + work.backward_s, rel=0.01)
    assert slow.busy_s["compute"] > 1.03 * fast.busy_s["compute"]
