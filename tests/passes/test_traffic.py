"""traffic: bytes by hand for a small model, and what the nodes say for others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lohan_fx import meta, ops
from lohan_fx.cost import Work
from lohan_fx.passes.traffic import fetch_counts, swap_sizes_bytes, traffic
from lohan_fx.passes.turn import seconds_away
from lohan_fx.plan import Keep, OptimizerTiming, Plan, Recompute, Swap, Tier
from tests.passes.graphs import DECISIONS, MODELS, both, captured, flops_as_seconds, nodes, plan_for, rewrite

WEIGHTS, BIAS = 4 * 32, 4 * 8  # two weights of 32 and one bias of 8 elements, fp32


def work(name: str, plan: Plan) -> Work:
    return traffic(rewrite(captured(name), plan), plan, flops_as_seconds)


def test_everything_on_nvme_by_hand() -> None:
    found = captured("two-layers")
    plan = plan_for(found, {"addmm": Recompute(), "relu": Swap(Tier.NVME), "mm": Swap(Tier.HOST)})
    assert work("two-layers", plan) == Work(
        forward_s=(2 * 3 * 4 * 8 + 1) + 1 + (2 * 3 * 8 * 4 + 1) + 1 + 1,  # addmm, relu, mm, pow, mean
        backward_s=3 * (2 * 3 * 4 * 8 + 1) + 6,  # three mm; div, pow, mul, mul, threshold_backward, sum
        recompute_s=0,
        fetched_forward_bytes=2 * WEIGHTS + BIAS,
        fetched_forward_nvme_bytes=2 * WEIGHTS + BIAS,
        fetched_backward_bytes=WEIGHTS,
        fetched_backward_nvme_bytes=WEIGHTS,
        swapped_bytes=4 * 3 * 8 + 4 * 3 * 4,
        swapped_nvme_bytes=4 * 3 * 8,
        gradient_bytes=2 * WEIGHTS + BIAS,
        state_read_bytes=12 * 32,
        state_write_bytes=12 * 32,  # the fp32 master is what the graph computes with
        adam_parameters=32,
        late_state_read_bytes=12 * (32 + 8),  # the first layer's gradients are the last
        late_state_write_bytes=12 * (32 + 8),
        late_adam_parameters=32 + 8,
        blocking_read_bytes=12 * 32,  # the second layer's gradient fills the window
        blocking_write_bytes=0,  # one chunk, which an optimizer's buffer holds
        blocking_hidden_s=2 * 3 * 4 * 8 + 1 + 2,  # mm, threshold_backward, sum
        first_fetched_nvme_bytes=WEIGHTS + BIAS,  # of the first layer
        fetches_read_bytes=2 * WEIGHTS + BIAS,
        behind_fetches_s=(2 * 3 * 8 * 4 + 1) + 1 + 1,  # mm, pow, mean behind the second weight
        updates_read_bytes=12 * 32,
        updates_written_bytes=12 * 32,
        before_updates_s=2 * (2 * 3 * 4 * 8 + 1) + 4,  # two mm; div, pow, mul, mul
        by_lane=32,
        late_by_lane=32 + 8,
        blocking_by_lane=32,
        forward_requests=3 + 1,  # three parameters fetched, one activation swapped out
        backward_requests=1 + 1 + 4,  # one fetched, one swapped in; master and moments of one, both ways
    )


def test_how_often_parameters_are_fetched() -> None:
    found = captured("two-layers")
    counts = fetch_counts(rewrite(found, plan_for(found, Keep())))
    assert sorted(counts.values()) == [(1, 0), (1, 0), (1, 1)]  # only the second weight leads on to a gradient


def test_what_is_recomputed_costs_its_time_and_the_parameters_it_reads() -> None:
    found = captured("two-layers")
    done = work("two-layers", plan_for(found, Recompute()))
    assert done.recompute_s == 2 * (2 * 3 * 4 * 8 + 1) + 1  # addmm, mm, relu
    assert done.backward_s == work("two-layers", plan_for(found, Keep())).backward_s
    assert done.fetched_backward_bytes == 2 * WEIGHTS + BIAS


def test_a_compute_copy_of_its_own_is_written_back() -> None:
    """bf16: half the bytes to the device, and 14 instead of 12 bytes per parameter to the drives."""
    plan = plan_for(captured("two-layers"), Keep())
    halved = replace(plan, parameters=tuple(replace(p, bytes=p.bytes // 2) for p in plan.parameters))
    done = work("two-layers", halved)
    assert done.state_write_bytes + done.late_state_write_bytes == 14 * 72
    assert done.gradient_bytes == 2 * 72


@pytest.mark.parametrize(
    ("home", "states", "fetched", "from_nvme", "read", "written"),
    [
        (Tier.DEVICE, Tier.HOST, 0, 0, 0, 0),
        (Tier.HOST, Tier.HOST, 288, 0, 0, 0),
        (Tier.HOST, Tier.NVME, 288, 0, 12 * 72, 12 * 72),
        (Tier.NVME, Tier.HOST, 288, 288, 0, 288),
        (Tier.NVME, Tier.NVME, 288, 288, 12 * 72, 12 * 72),
        (Tier.DEVICE, Tier.NVME, 0, 0, 12 * 72, 12 * 72),
    ],
)
def test_homes_decide_what_moves(
    home: Tier, states: Tier, fetched: int, from_nvme: int, read: int, written: int
) -> None:
    done = work("two-layers", plan_for(captured("two-layers"), Keep()).with_homes(home, states))
    assert (done.fetched_forward_bytes, done.fetched_forward_nvme_bytes) == (fetched, from_nvme)
    reads, writes = (
        done.state_read_bytes + done.late_state_read_bytes,
        done.state_write_bytes + done.late_state_write_bytes,
    )
    assert (reads, writes) == (read, written)
    assert (done.gradient_bytes, done.adam_parameters + done.late_adam_parameters) == (288, 72)
    # On a CPU what is in memory is updated where its gradient is made, also the last.
    assert done.late_adam_parameters == (40 if Tier.NVME in (home, states) else 0)


def test_a_frozen_parameter_is_fetched_and_nothing_else() -> None:
    found = captured("branches")
    done = work("branches", plan_for(found, Keep()))
    assert done.fetched_forward_bytes == 2 * 4 * (16 + 4)
    updated = done.adam_parameters + done.late_adam_parameters
    assert (done.gradient_bytes, updated, done.state_read_bytes + done.late_state_read_bytes) == (4 * 20, 20, 12 * 20)


def test_a_tied_weight_is_fetched_twice() -> None:
    found = captured("tied")
    done = work("tied", plan_for(found, Keep()))
    sizes = {p.name: found.parameter_values()[p.slot].nbytes for p in found.parameters.values()}
    assert done.fetched_forward_bytes == sum(sizes.values()) + sizes["embed.weight"]


@pytest.mark.parametrize("name", MODELS)
def test_swapped_bytes_are_those_of_the_plans_decisions_that_cross(name: str) -> None:
    found = captured(name)
    plan = plan_for(found, Swap(Tier.NVME))
    halves = rewrite(found, plan)
    crossing = {meta.origin(n) for n in nodes(halves.forward, ops.SWAP_OUT)}
    sizes = [a.bytes for a in plan.activations if a.node in crossing]
    assert sorted(swap_sizes_bytes(halves)) == sorted(sizes)
    assert traffic(halves, plan, flops_as_seconds).swapped_nvme_bytes == sum(sizes) > 0


def test_sizes_are_only_of_what_goes_to_nvme() -> None:
    found = captured("two-layers")
    plan = plan_for(found, {"addmm": Recompute(), "relu": Swap(Tier.NVME), "mm": Swap(Tier.HOST)})
    assert swap_sizes_bytes(rewrite(found, plan)) == [4 * 3 * 8]


def test_inference_fetches_and_computes_and_moves_nothing_else() -> None:
    found = captured("two-layers")
    plan = plan_for(found, Keep())
    halves = rewrite(found, plan)
    halves.backward = None
    done = traffic(halves, plan, flops_as_seconds)
    assert done.fetched_forward_bytes == 288 and done.forward_s > 0
    assert (done.backward_s, done.recompute_s, done.fetched_backward_bytes, done.gradient_bytes) == (0, 0, 0, 0)
    assert (done.state_read_bytes, done.state_write_bytes, done.adam_parameters) == (0, 0, 0)


def late(home: Tier, states: Tier, gradients: Tier, *, device: str = "cpu") -> Work:
    plan = plan_for(captured("two-layers"), Keep()).with_homes(home, states)
    after = OptimizerTiming.AFTER_BACKWARD
    parameters = tuple(replace(p, optimizer_runs=after, gradient_home=gradients) for p in plan.parameters)
    return work("two-layers", replace(plan, parameters=parameters, device=device))


def test_updates_after_the_backward_are_counted_there_with_the_gradients_that_wait() -> None:
    done = late(Tier.NVME, Tier.NVME, Tier.NVME)
    assert (done.state_read_bytes, done.state_write_bytes, done.adam_parameters) == (0, 0, 0)
    assert (done.late_state_read_bytes, done.late_state_write_bytes, done.late_adam_parameters) == (
        12 * 72,
        12 * 72,
        72,
    )
    assert (done.held_nvme_bytes, done.gradient_bytes) == (4 * 72, 288)
    assert done.nvme_write_bytes == (12 + 4) * 72
    in_ram = late(Tier.HOST, Tier.HOST, Tier.HOST)
    assert (in_ram.nvme_read_bytes, in_ram.nvme_write_bytes, in_ram.late_adam_parameters) == (0, 0, 72)


@pytest.mark.parametrize("gradients", [Tier.HOST, Tier.NVME])
def test_updates_beside_the_next_forward_are_counted_there(gradients: Tier) -> None:
    """Gradients wait as they are. The first weight is fetched first: the forward waits for its update as for a stage."""
    found = captured("two-layers")
    plan = plan_for(found, Keep())
    parameters = tuple(
        replace(p, optimizer_runs=OptimizerTiming.NEXT_FORWARD, gradient_home=gradients) for p in plan.parameters
    )
    done = work("two-layers", replace(plan, parameters=parameters))
    assert (done.state_read_bytes, done.adam_parameters) == (0, 0)
    assert (done.late_adam_parameters, done.next_adam_parameters) == (40, 32)
    assert done.next_state_read_bytes == done.next_state_write_bytes == 12 * 32
    assert done.next_held_nvme_bytes == (4 * 32 if gradients is Tier.NVME else 0)
    assert done.held_nvme_bytes == (4 * 40 if gradients is Tier.NVME else 0)
    assert done.nvme_write_bytes == 12 * 72 + (4 * 72 if gradients is Tier.NVME else 0)
    inside = work("two-layers", plan)
    assert done.forward_requests == inside.forward_requests + 4 + (gradients is Tier.NVME)


def test_updates_made_twice_write_copies_beside_the_forward_and_states_beside_the_backward() -> None:
    plan = plan_for(captured("two-layers"), Keep())
    parameters = tuple(
        replace(p, bytes=2 * p.numel, optimizer_runs=OptimizerTiming.NEXT_FORWARD, gradient_home=Tier.NVME)
        for p in plan.parameters
    )
    once = work("two-layers", replace(plan, parameters=parameters))
    twice = work("two-layers", replace(plan, parameters=tuple(replace(p, updated_twice=True) for p in parameters)))
    assert (once.late_state_write_bytes, once.next_state_write_bytes) == (14 * 40, 14 * 32)
    assert (twice.late_state_write_bytes, twice.next_state_write_bytes) == (2 * 40, 2 * 32)
    assert (twice.late_state_read_bytes, twice.next_state_read_bytes) == (12 * 40, 12 * 32)
    assert (twice.repeated_state_bytes, twice.repeated_held_nvme_bytes) == (12 * 72, 2 * 72)
    assert (twice.late_adam_parameters, twice.next_adam_parameters) == (40, 32)
    assert twice.nvme_write_bytes == once.nvme_write_bytes
    assert twice.nvme_read_bytes == once.nvme_read_bytes + 14 * 72
    assert twice.forward_requests == once.forward_requests - 2
    assert twice.backward_requests == once.backward_requests + 5 * len(parameters)


def test_updates_on_a_gpu_are_its_own_compute_and_their_gradients_stay() -> None:
    cpu, gpu = late(Tier.DEVICE, Tier.DEVICE, Tier.DEVICE), late(Tier.DEVICE, Tier.DEVICE, Tier.DEVICE, device="cuda")
    assert (cpu.gradient_bytes, gpu.gradient_bytes) == (0, 0)
    assert (cpu.late_adam_parameters, gpu.late_adam_parameters) == (72, 0)


def test_a_parameter_that_stays_on_a_gpu_comes_back_from_the_cpu_that_updates_it() -> None:
    for states in (Tier.HOST, Tier.NVME, Tier.DEVICE):
        plan = plan_for(captured("two-layers"), Keep()).with_homes(Tier.DEVICE, states)
        gpu = work("two-layers", replace(plan, device="cuda"))
        back = gpu.returned_bytes + gpu.late_returned_bytes
        assert back == (0 if states is Tier.DEVICE else gpu.gradient_bytes)
        cpu = work("two-layers", plan)
        assert cpu.returned_bytes == cpu.late_returned_bytes == 0
    away = work("two-layers", replace(plan.with_homes(Tier.HOST, Tier.HOST), device="cuda"))
    assert away.returned_bytes == away.late_returned_bytes == 0 < away.gradient_bytes


def test_one_buffer_for_the_optimizer_makes_it_serial() -> None:
    plan = plan_for(captured("two-layers"), Keep())
    assert not work("two-layers", plan).serial_optimizer
    one = replace(plan, windows=replace(plan.windows, optimizer_buffers=1))
    assert work("two-layers", one).serial_optimizer


@pytest.mark.parametrize(("decision", "home"), [("swap-nvme", Tier.NVME), ("keep", Tier.NVME), ("keep", Tier.DEVICE)])
def test_handing_a_transfer_over_takes_computes_time(decision: str, home: Tier) -> None:
    found = captured("transformer")
    plan = plan_for(found, DECISIONS[decision](found), home=home)
    halves = rewrite(found, plan)
    without, with_it = (traffic(halves, plan, flops_as_seconds, seconds) for seconds in (0.0, 3.0))
    forward, backward = (
        sum(n.target in (ops.FETCH, ops.SWAP_OUT, ops.SWAP_IN, ops.OFFLOAD_GRAD) for n in gm.graph.nodes)
        for gm in both(halves)
    )
    if home is Tier.DEVICE:  # nothing moves: all parameters and states are in the memory of the CPU that computes
        forward = backward = 0
    assert with_it.forward_s - without.forward_s == 3.0 * forward
    assert with_it.backward_s - without.backward_s == 3.0 * backward
    assert replace(with_it, forward_s=without.forward_s, backward_s=without.backward_s) == without


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.NVME])
def test_what_comes_back_too_late_is_counted_by_what_it_is_and_how_long_it_is_away(tier: Tier) -> None:
    found = captured("transformer")
    plan = plan_for(found, Swap(tier))
    halves = rewrite(found, plan)
    asked: list[tuple[int, Tier, float]] = []

    def coming_back_s(nbytes: int, to: Tier, away_s: float) -> float:
        asked.append((nbytes, to, away_s))
        return 2.0

    done = traffic(halves, plan, flops_as_seconds, 0.0, coming_back_s)
    swaps = halves.forward.graph.find_nodes(op="call_function", target=ops.SWAP_OUT)
    assert done.coming_back_s == 2.0 * len(swaps) > 0
    away_s = seconds_away(halves, flops_as_seconds)
    assert asked == [(meta.cost(n.args[0]).bytes, tier, away_s[meta.origin(n) or ""]) for n in swaps]
    assert traffic(halves, plan, flops_as_seconds) == replace(done, coming_back_s=0.0)
