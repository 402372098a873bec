"""simulator: steps by hand, bytes against what counts them otherwise, and what it says of models, charts, bad input."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

import lohan_fx
from lohan_fx import simulate
from lohan_fx.compile import compiled
from lohan_fx.meta import Cost, Phase
from lohan_fx.passes.traffic import traffic
from lohan_fx.plan import Decision, Keep, OptimizerTiming, Plan, Swap, Tier
from lohan_fx.planning import holding
from lohan_fx.reporting import timeline_chart
from lohan_fx.request import node_seconds
from lohan_fx.runtime.machine import start_machine
from lohan_fx.runtime.nvme_store import NvmeStore
from lohan_fx.runtime.timeline import Timeline
from lohan_fx.simulation import simulated_machine
from lohan_fx.simulation.simulated_machine import SimulatedMachine
from tests import tiny
from tests.lohan_fx.simulation.simulated import DECISIONS, PAGE, drive, lane, machine, run, second_each, windows
from tests.passes import graphs
from tests.passes.graphs import Captured, captured, plan_for, rewrite


class OneLayer(nn.Module):
    """One weight of a page per row; its forward and its backward are one op each, and the sum."""

    def __init__(self, pages: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(pages, PAGE // 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).sum()


def one_layer(pages: int) -> Captured:
    return graphs.capture(OneLayer(pages), torch.ones(pages, PAGE // 4))


# --- by hand --------------------------------------------------------------------------------------------------


def test_one_layer_of_one_page_by_hand() -> None:
    """Fetch 1 + 1 s, mul and sum 1 s each; in the backward mul, then the gradient's page leaves, 3 pages of states are
    read, updated and written."""
    plan = plan_for(found := one_layer(1), Keep())
    step = run(found, plan, machine())
    assert lane(step, "h2d") == [("fetch of weight", 1.0, 2.0)]
    assert (step.forward_s, step.backward_s) == pytest.approx((4.0, 1.0))
    assert lane(step, "d2h") == [("gradient of weight", 5.0, 6.0)]
    # The page of the master shares the drive with the two of the moments until it is there.
    assert lane(step, "ssd") == [
        ("read weight:compute", 0.0, 1.0),
        ("read weight:master", 6.0, 8.0),
        ("read weight:moments", 6.0, 9.0),
        ("write weight:master", 10.0, 14.0),
        ("write weight:moments", 10.0, 16.0),
    ]
    assert lane(step, "cpu") == [("update of weight", 9.0, 10.0)]
    assert (step.tail_s, step.step_s, step.stall_s) == pytest.approx((11.0, 16.0, 2.0))
    assert lane(step, "compute") == [
        ("wait:fetch of weight", 0.0, 2.0), ("forward", 0.0, 4.0), ("wait:launching", 2.0, 2.0), ("backward", 4.0, 5.0),
    ]  # fmt: skip
    assert step.busy_s == pytest.approx({"compute": 3.0, "h2d": 1.0, "d2h": 1.0, "ssd": 10.0, "cpu": 1.0})
    assert step.bottleneck == "ssd" and step.busy("ssd") == pytest.approx(10 / 16)
    assert (step.nvme_read_bytes, step.nvme_write_bytes) == (4 * PAGE, 3 * PAGE)


def test_with_one_buffer_a_piece_is_read_once_the_one_before_is_copied() -> None:
    plan = plan_for(found := one_layer(3), Keep(), windows=windows(io_buffers=1))
    step = run(found, plan, machine())
    assert [start for _, start, _ in lane(step, "h2d")] == [1.0, 3.0, 5.0]
    assert step.stall_s == pytest.approx(6.0)


def test_with_two_buffers_reading_and_copying_overlap() -> None:
    """Two pieces share the drive and are there at 2; the third starts when the first is copied."""
    plan = plan_for(found := one_layer(3), Keep(), windows=windows(io_buffers=2))
    step = run(found, plan, machine())
    assert lane(step, "h2d") == [
        ("fetch of weight", 2.0, 3.0), ("fetch of weight", 3.0, 4.0), ("fetch of weight", 4.0, 5.0),
    ]  # fmt: skip
    assert step.stall_s == pytest.approx(5.0)


def test_each_job_takes_the_interpreter_which_one_thread_has_at_a_time() -> None:
    """As above, and a second of it before each read, copy, update and write."""
    plan = plan_for(found := one_layer(1), Keep())
    step = run(found, plan, machine(interpreter_s_per_job=1.0))
    assert lane(step, "h2d") == [("fetch of weight", 3.0, 4.0)]
    assert (step.forward_s, step.backward_s) == pytest.approx((6.0, 1.0))
    assert lane(step, "d2h") == [("gradient of weight", 8.0, 9.0)]
    assert lane(step, "cpu") == [("update of weight", 14.0, 15.0)]
    # The moments are asked for when the master is; both may be read, one after the other has the interpreter.
    assert lane(step, "ssd") == [
        ("read weight:compute", 1.0, 2.0),
        ("read weight:master", 10.0, 11.0),
        ("read weight:moments", 11.0, 13.0),
        ("write weight:master", 16.0, 19.0),
        ("write weight:moments", 17.0, 22.0),
    ]


def test_compute_waits_for_kernels_that_are_launched_late() -> None:
    """Two ops in a row that take a second each take two to launch each."""
    plan = plan_for(found := one_layer(1), Keep(), home=Tier.DEVICE)
    step = run(found, plan, machine(op_overhead_s=2.0))
    assert step.forward_s == pytest.approx(2 * 2.0 + 2 * 1.0)
    assert lane(step, "compute")[0] == ("wait:launching", 0.0, 4.0)


def test_the_next_chunk_is_read_before_the_last_one_is_written() -> None:
    """LoHan IV-C: R(i-1) is queued before W(i), which then overlaps what follows; with three buffers the third chunk is
    read before the first one is written."""
    given = windows(gradient_bytes=1 << 20, optimizer_buffers=3, gradient_buffers=3)
    plan = plan_for(found := one_layer(12), Keep(), windows=given)
    step = run(found, plan, machine(d2h_bytes_per_s=1e12))
    reads = [start for label, start, _ in lane(step, "ssd") if label == "read weight:moments"]
    writes = [start for label, start, _ in lane(step, "ssd") if label == "write weight:moments"]
    assert len(reads) == len(writes) == 3
    assert max(reads) < min(writes)
    assert step.tail_s == pytest.approx(36 + 72, abs=1e-3)  # all updates are hidden behind reading and writing


def test_with_one_optimizer_buffer_nothing_of_the_optimizer_overlaps() -> None:
    """LoHan's naive handler: for each of three chunks 12 s of reading, 4 of updating, 24 of writing."""
    given = windows(gradient_bytes=1 << 20, optimizer_buffers=1, gradient_buffers=1)
    plan = plan_for(found := one_layer(12), Keep(), windows=given)
    assert run(found, plan, machine(d2h_bytes_per_s=1e12)).tail_s == pytest.approx(3 * (12 + 4 + 24), abs=1e-3)


@pytest.mark.parametrize(("chunk_elements", "optimizer_buffers"), [(PAGE, 4), (1 << 20, 4), (1 << 20, 1)])
def test_staging_buffers_are_those_of_the_runtime(chunk_elements: int, optimizer_buffers: int, tmp_path: Path) -> None:
    given = windows(chunk_elements=chunk_elements, optimizer_buffers=optimizer_buffers)
    simulated = SimulatedMachine(plan_for(one_layer(8), Keep(), windows=given), machine(device="cpu"), fused_adam=True)
    with NvmeStore([tmp_path]) as store:
        real = start_machine(store, torch.device("cpu"), Timeline(), given)
        counts = {purpose: shelf.count for purpose, shelf in real.pool._shelves.items() if purpose != "activations"}
        real.close()
    assert {purpose: shelf.count for purpose, shelf in simulated.pool.items()} == counts
    assert (counts["small"] > 0) == (chunk_elements > PAGE and optimizer_buffers > 1)


def test_a_piece_that_stands_for_several_requests_costs_a_processor_as_many() -> None:
    hw = machine(device="cpu", io_core_s_per_request=0.25)
    plan = plan_for(one_layer(8), Keep(), windows=windows(io_bytes=PAGE, chunk_elements=PAGE))
    simulated = SimulatedMachine(plan, hw, fused_adam=True)
    one, four = simulated.reading("weight", PAGE), simulated.reading("weight", 4 * PAGE, simulated.of_io(4 * PAGE))
    assert four.seconds == 4 * one.seconds
    assert four.cores == pytest.approx(one.cores) == pytest.approx(0.25)  # of a core, for as long as it takes
    assert simulated.writing("weight", 8 * PAGE, simulated.of_chunk(2 * PAGE)).cores == pytest.approx(0.25 * 2 / 16)


def test_a_parameter_at_home_is_updated_by_compute_on_a_cpu() -> None:
    plan = plan_for(found := one_layer(2), Keep(), home=Tier.DEVICE)
    step = run(found, plan, machine(device="cpu"))
    assert (step.forward_s, step.backward_s, step.tail_s) == pytest.approx((2.0, 3.0, 0.0))
    assert lane(step, "cpu") == [("update of weight", 3.0, 5.0)]
    assert not any(step.bytes[name] for name in ("h2d", "d2h", "ssd"))


def test_on_a_gpu_every_gradient_leaves() -> None:
    plan = dataclasses.replace(plan_for(found := one_layer(2), Keep(), home=Tier.DEVICE), device="cuda")
    step = run(found, plan, machine(device="cuda"))
    assert lane(step, "d2h") == [("gradient of weight", 3.0, 5.0)]
    assert step.backward_s == 1.0 and step.tail_s >= 4.0


def late(plan: Plan, home: Tier, runs: OptimizerTiming = OptimizerTiming.AFTER_BACKWARD) -> Plan:
    """``plan`` with all updates after the backward; gradients wait for that at ``home``."""
    parameters = (dataclasses.replace(p, optimizer_runs=runs, gradient_home=home) for p in plan.parameters)
    return dataclasses.replace(plan, parameters=tuple(parameters))


def test_an_optimizer_after_the_backward_overlaps_nothing_of_it() -> None:
    plan = plan_for(found := captured("transformer"), Keep())
    inside, after = run(found, plan, machine()), run(found, late(plan, Tier.HOST), machine())
    backward_ends_s = after.forward_s + after.backward_s
    states = [e for e in after.events if e.label.endswith((":master", ":moments"))]
    assert states and all(e.start_s >= backward_ends_s for e in states)
    assert after.step_s > inside.step_s and after.tail_s > inside.tail_s


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("gradients", [Tier.HOST, Tier.NVME])
def test_updates_beside_the_next_forward_are_there_and_before_their_fetch(device: str, gradients: Tier) -> None:
    plan = late(plan_for(found := captured("transformer"), Keep()), gradients, OptimizerTiming.NEXT_FORWARD)
    plan = dataclasses.replace(plan, device=device)
    halves, hw = rewrite(found, plan), machine(device=device)
    step, work = simulate(halves, plan, hw, node_seconds=second_each), traffic(halves, plan, second_each)
    assert (step.nvme_read_bytes, step.nvme_write_bytes) == (work.nvme_read_bytes, work.nvme_write_bytes)
    assert step.tail_s == pytest.approx(0.0, abs=1e-6) or device == "cuda" or gradients is Tier.NVME
    for name in (p.name for p in plan.parameters):
        updated = [e.end_s for e in step.events if e.label == f"write {name}:master"]
        fetched = [e.start_s for e in step.events if e.label == f"read {name}:compute"]
        assert updated and max(updated) <= min(fetched) + 1e-9
        assert max(updated) <= step.forward_s


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("gradients", [Tier.HOST, Tier.NVME])
def test_the_second_time_of_updates_made_twice_moves_states_beside_the_backward(device: str, gradients: Tier) -> None:
    """Where the forward is bound by drives that rest in the backward, the step is shorter; what moves is as counted."""
    plan = late(plan_for(found := captured("transformer"), Keep()), gradients, OptimizerTiming.NEXT_FORWARD)
    halved = (dataclasses.replace(p, bytes=p.bytes // 2) for p in plan.parameters)  # copies of their own
    once = dataclasses.replace(plan, device=device, parameters=tuple(halved))
    twice = holding.updated_twice(once, 1.0)
    assert all(p.updated_twice for p in twice.parameters)

    def seconds(cost: Cost) -> float:
        return 0.0 if cost.is_view else 0.01 if cost.phase is Phase.FORWARD else 5.0

    steps = {}
    for made in (once, twice):
        halves, hw = rewrite(found, made), machine(device=device, adam_parameters_per_s=1e9)
        step, work = simulate(halves, made, hw, node_seconds=seconds), traffic(halves, made, seconds)
        assert (step.nvme_read_bytes, step.nvme_write_bytes) == (work.nvme_read_bytes, work.nvme_write_bytes)
        steps[made.parameters[0].updated_twice] = step, work
    assert steps[True][0].step_s < 0.95 * steps[False][0].step_s
    assert steps[True][1].nvme_write_bytes == steps[False][1].nvme_write_bytes
    states, numel = steps[True][1].repeated_state_bytes, sum(p.numel for p in plan.parameters)
    held = steps[True][1].repeated_held_nvme_bytes
    assert (states, held) == (12 * numel, 2 * numel * (gradients is Tier.NVME))
    assert steps[True][1].nvme_read_bytes == steps[False][1].nvme_read_bytes + states + held
    step = steps[True][0]
    for name in (p.name for p in twice.parameters):
        (copied,) = (e for e in step.events if e.label == f"write {name}:compute")
        fetched = [e.start_s for e in step.events if e.label == f"read {name}:compute"]
        written = [e.start_s for e in step.events if e.label == f"write {name}:master"]
        assert copied.end_s <= min(fetched) + 1e-9
        assert min(written) >= copied.start_s


def test_putting_off_what_the_drives_have_no_time_for_shortens_the_step() -> None:
    """The forward computes long, the backward moves much: the last layers' updates go to the forward."""
    plan = plan_for(found := captured("transformer"), Keep())

    def seconds(cost: Cost) -> float:
        return 0.0 if cost.is_view else 1.0 if cost.phase is Phase.FORWARD else 0.01

    put_off = tuple(
        dataclasses.replace(p, optimizer_runs=OptimizerTiming.NEXT_FORWARD, gradient_home=Tier.HOST)
        if p.name.startswith(("layers.1", "layers.2"))
        else p
        for p in plan.parameters
    )
    inside = run(found, plan, machine(), seconds)
    later = run(found, dataclasses.replace(plan, parameters=put_off), machine(), seconds)
    assert later.step_s < 0.95 * inside.step_s
    assert (later.nvme_read_bytes, later.nvme_write_bytes) == (inside.nvme_read_bytes, inside.nvme_write_bytes)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_waiting_at_the_barrier_before_an_update_in_memory_is_no_stall(device: str) -> None:
    """It is in the tail, and takes nothing from what compute did in its stages."""
    plan = dataclasses.replace(plan_for(found := captured("transformer"), Keep()), device=device)
    first, *others = plan.parameters
    at_home = dict.fromkeys(("home", "states_home", "gradient_home"), Tier.DEVICE)
    step = run(
        found,
        dataclasses.replace(plan, parameters=(dataclasses.replace(first, **at_home), *others)),
        machine(device=device),
    )
    stages_s = step.forward_s + step.backward_s
    assert step.tail_s > 1 and any(e.is_stall for e in step.events)
    assert all(e.end_s <= stages_s + 1e-9 for e in step.events if e.is_stall)
    assert step.busy_s["compute"] + step.stall_s == pytest.approx(stages_s)


def test_what_the_step_before_began_is_busy_from_the_begin_of_this_one() -> None:
    """Compute makes the updates that it has in memory, beside others that are put off, and then the next forward begins."""
    plan = late(plan_for(found := captured("dropout"), Keep(), home=Tier.HOST), Tier.HOST, OptimizerTiming.NEXT_FORWARD)
    first, *others = plan.parameters
    moved = dataclasses.replace(first, states_home=Tier.NVME)
    step = run(found, dataclasses.replace(plan, parameters=(moved, *others)), machine(device="cpu"))
    (update,) = (e for e in step.events if e.label == f"update of {first.name}")
    assert update.start_s == min(e.start_s for e in step.events) == 0.0
    assert step.busy("cpu") <= 1.0


def test_gradients_that_wait_on_nvme_are_written_and_read_back() -> None:
    plan = late(plan_for(found := captured("transformer"), Keep()), Tier.NVME)
    halves = rewrite(found, plan)
    work, step = traffic(halves, plan, second_each), simulate(halves, plan, machine(), node_seconds=second_each)
    assert work.held_nvme_bytes > 0
    assert (step.nvme_read_bytes, step.nvme_write_bytes) == (work.nvme_read_bytes, work.nvme_write_bytes)


# --- against what is counted otherwise ------------------------------------------------------------------------


def in_memory(plan: Plan) -> set[str]:
    """Parameters whose gradients never leave: a CPU that has all of them at hand."""
    near = (Tier.DEVICE, Tier.HOST) if plan.device == "cpu" else (Tier.DEVICE,)
    return {p.name for p in plan.parameters if p.home in near and p.states_home in near}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("decision", DECISIONS, ids=str)
@pytest.mark.parametrize("name", ["two-layers", "dropout", "tied", "branches"])
def test_bytes_are_those_of_traffic(name: str, decision: Decision, device: str) -> None:
    found = captured(name)
    for home in Tier:
        plan = dataclasses.replace(plan_for(found, decision, home=home), device=device)
        halves = rewrite(found, plan)
        work = traffic(halves, plan, second_each)
        step = simulate(halves, plan, machine(device=device), node_seconds=second_each)
        stay = sum(p.bytes for p in plan.parameters if p.name in in_memory(plan) and p.trainable)
        if device == "cuda":
            assert step.bytes["h2d"] == work.fetched_forward_bytes + work.fetched_backward_bytes + work.swapped_bytes
            assert step.bytes["d2h"] == work.gradient_bytes + work.swapped_bytes - stay
        else:  # what comes from NVMe is read to where it belongs, and gradients are updated where they are
            nvme = work.fetched_forward_nvme_bytes + work.fetched_backward_nvme_bytes + work.swapped_nvme_bytes
            fetched = work.fetched_forward_bytes + work.fetched_backward_bytes + work.swapped_bytes
            assert (step.bytes["h2d"], step.bytes["d2h"]) == (fetched - nvme, work.swapped_bytes)
        assert (step.nvme_read_bytes, step.nvme_write_bytes) == (work.nvme_read_bytes, work.nvme_write_bytes)
        assert step.bytes["ssd"] == work.nvme_read_bytes + work.nvme_write_bytes
        assert step.bytes["cpu"] == 4 * (work.adam_parameters + work.late_adam_parameters)


@pytest.mark.parametrize("decision", DECISIONS, ids=str)
def test_a_gpu_computes_for_as_long_as_its_nodes_take(decision: Decision) -> None:
    plan = dataclasses.replace(plan_for(found := captured("transformer"), decision), device="cuda")
    halves = rewrite(found, plan)
    work = traffic(halves, plan, second_each)
    step = simulate(halves, plan, machine(device="cuda"), node_seconds=second_each)
    assert step.busy_s["compute"] == pytest.approx(work.forward_s + work.backward_s + work.recompute_s)
    stages = [e for e in step.events if e.label in ("forward", "backward")]
    assert sum(e.end_s - e.start_s for e in stages) == pytest.approx(step.busy_s["compute"] + step.stall_s)
    assert step.step_s == pytest.approx(step.forward_s + step.backward_s + step.tail_s)


# --- the rest -------------------------------------------------------------------------------------------------


def test_many_transfers_are_simulated_as_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Totals stay; time by no more than filling and draining."""
    found = one_layer(400)
    plan = plan_for(found, Keep(), windows=windows(io_buffers=4, optimizer_buffers=4, gradient_buffers=4))
    fine = run(found, plan, machine())
    monkeypatch.setattr(simulated_machine, "TRANSFERS", 100)
    coarse = run(found, plan, machine())
    assert len(coarse.events) < len(fine.events) / 3
    assert coarse.bytes == fine.bytes and coarse.nvme_read_bytes == fine.nvme_read_bytes
    assert coarse.step_s == pytest.approx(fine.step_s, rel=0.05)


class Uneven(nn.Module):
    """Many small layers and a large one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(OneLayer(pages) for pages in (*[8] * 30, 160))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(layer(x[: len(layer.weight)]) for layer in self.layers)  # type: ignore[return-value, arg-type]


@pytest.mark.parametrize(("buffers", "too_fast"), [(8, 0.03), (24, 0.02), (96, 0.01)])
def test_small_layers_keep_their_buffers_where_large_ones_are_simulated_coarsely(
    buffers: int, too_fast: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What of a small layer's gradients and states there is room for is what the drives work on while compute is slow. What
    stands for several takes fewer buffers than they do where there are few, so that as many are under way: up to 3 % too fast."""
    found = graphs.capture(Uneven(), torch.ones(160, PAGE // 4))
    room = windows(
        io_buffers=8, optimizer_buffers=buffers, gradient_buffers=8, gradient_bytes=8 * PAGE, chunk_elements=PAGE
    )
    plan = plan_for(found, Keep(), windows=room)

    def slow(found: Cost) -> float:
        return 120 * second_each(found)

    fine = run(found, plan, machine(), slow)
    monkeypatch.setattr(simulated_machine, "TRANSFERS", 700)
    coarse = run(found, plan, machine(), slow)
    assert len(coarse.events) < 0.6 * len(fine.events) and coarse.bytes == fine.bytes
    assert (1 - too_fast) * fine.step_s <= coarse.step_s <= 1.01 * fine.step_s


def test_the_chart_draws_what_is_simulated(tmp_path: Path) -> None:
    plan = plan_for(found := captured("dropout"), Swap(Tier.NVME))
    step = run(found, plan, machine())
    timeline_chart.draw(step.events, tmp_path / "step.png")
    assert (tmp_path / "step.png").stat().st_size > 1000
    assert [e.start_s for e in step.events] == sorted(e.start_s for e in step.events)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_step_is_like_the_first(device: str) -> None:
    """Because ``optimizer.step()`` is a barrier."""
    plan = dataclasses.replace(plan_for(found := captured("dropout"), Swap(Tier.NVME)), device=device)
    halves = rewrite(found, plan)
    first, third = (
        simulate(halves, plan, machine(device=device), node_seconds=second_each, steps=steps) for steps in (1, 3)
    )
    assert (third.step_s, third.tail_s) == pytest.approx((first.step_s, first.tail_s))
    assert third.bytes == first.bytes and len(third.events) == len(first.events)
    assert third.peak_bytes["device"] == first.peak_bytes["device"]
    with pytest.raises(ValueError, match="steps is 0"):
        simulate(halves, plan, machine(), steps=0)


def test_inference_is_a_forward() -> None:
    plan = plan_for(found := captured("two-layers"), Keep())
    halves = rewrite(found, plan)
    halves.backward = None
    step = simulate(halves, plan, machine(), node_seconds=second_each)
    assert step.step_s == step.forward_s > 0 and step.backward_s == step.tail_s == 0.0
    assert step.bytes["d2h"] == step.bytes["cpu"] == 0


def test_a_compiled_model_brings_its_plan(tmp_path: Path) -> None:
    model, profile = tiny.Tiny(), tiny.profile(nvme=(drive(1e9, 1e9),))
    with lohan_fx.releasing(lohan_fx.compile(model, profile, nvme=tmp_path, host_memory="1GiB", policy="keep")):
        with pytest.raises(ValueError, match="no graphs yet"):
            simulate(model)
        lohan_fx.prepare(model, tiny.batch().bfloat16())
        step = simulate(model)
        assert step.nvme_read_bytes > 0 and step.step_s > 0
        assert simulate(model, hw=dataclasses.replace(profile, nvme=(drive(5e8, 5e8),))).step_s > step.step_s
        with torch.no_grad():
            model(tiny.batch().bfloat16())
        assert simulate(model) == step, "an evaluation is no training step"


def test_a_compiled_model_is_simulated_by_what_its_steps_have_corrected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, profile = tiny.Tiny(), tiny.profile(nvme=(drive(1e9, 1e9),))
    with lohan_fx.releasing(lohan_fx.compile(model, profile, nvme=tmp_path, host_memory="1GiB", policy="keep")):
        lohan_fx.prepare(model, tiny.batch().bfloat16())
        as_planned, known = simulate(model), compiled(model).request()
        assert simulate(model, hw=known.hw).step_s == as_planned.step_s
        slower = dataclasses.replace(known, compute_scale=1e3, matmul_rate=known.matmul_rate / 1e3)
        monkeypatch.setattr(compiled(model), "request", lambda: slower)
        step = simulate(model)
        assert step.busy_s["compute"] > 100 * as_planned.busy_s["compute"]
        assert step.step_s == simulate(model, node_seconds=node_seconds(slower)).step_s
        assert simulate(model, hw=known.hw).step_s == as_planned.step_s


def test_an_unfused_adam_is_slower() -> None:
    plan = plan_for(found := one_layer(2), Keep())
    halves = rewrite(found, plan)
    fused, unfused = (simulate(halves, plan, machine(), node_seconds=second_each, fused_adam=f) for f in (True, False))
    assert unfused.busy_s["cpu"] == pytest.approx(2.2 * fused.busy_s["cpu"])


def test_what_is_missing_is_named() -> None:
    plan = plan_for(found := one_layer(1), Keep())
    halves = rewrite(found, plan)
    with pytest.raises(ValueError, match=r"simulate\(halves, plan, hw\)"):
        simulate(halves, plan)
    with pytest.raises(ValueError, match="'by hand' has no drive"):
        simulate(halves, plan, machine(nvme=()))
