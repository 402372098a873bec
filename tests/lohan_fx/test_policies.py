"""policies: each system decides as its paper says, differs from the others where the papers do, and never overspends."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace

import networkx as nx
import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import strategies as st

import lohan_fx
from lohan_fx.errors import InfeasiblePlan
from lohan_fx.hardware import HardwareProfile
from lohan_fx.passes.activation_graph import Activation, ActivationGraph, closure
from lohan_fx.plan import Keep, OptimizerTiming, Plan, Recompute, Swap, Tier, Use, Windows
from lohan_fx.planning.budgets import staging_bytes
from lohan_fx.planning.planner import make_plan
from lohan_fx.planning.problem import Budgets, ParameterFacts, Problem
from lohan_fx.policies import ALL, FORCED, POLICIES, named, runnable
from lohan_fx.policies.policy import Policy
from tests.exhaustive import examples
from tests.passes.paper_transformer import BLOCKS, MATMULS, Transformer, machine

GIB, MIB = 1 << 30, 1 << 20
D, H, N = Tier.DEVICE, Tier.HOST, Tier.NVME
FIXED, PEAK = 50 * MIB, 20 * MIB
WINDOWS = Windows(
    fetch_bytes=0,
    swap_in_bytes=0,
    gradient_bytes=0,
    chunk_elements=4096,
    io_bytes=4096,
    io_buffers=1,
    optimizer_buffers=4,
    gradient_buffers=4,
    swap_out_bytes=1 << 20,
)
SYSTEMS = [policy.name for policy in ALL if policy not in FORCED]
IN_CORE = ("flashneuron", "capuchin", "checkmate", "str", "vdnn", "superneurons")
HOMES: dict[str, tuple[Tier, Tier, Tier | None]] = {
    **dict.fromkeys(
        ("lohan-cpuact", "lohan-ds", "lohan-cap", "lohan-g10", "lohan-cm", "fuyou", "angel-ptm"), (N, N, None)
    ),
    **dict.fromkeys(("fuyou-no-overlap", "zero-infinity", "g10"), (N, N, N)),
    **dict.fromkeys(("zero-offload", "l2l", "swapadvisor"), (H, H, H)),
    "gemini": (H, N, H),
    "stronghold": (H, H, None),
    **dict.fromkeys(IN_CORE, (D, D, D)),
}
BETWEEN_BLOCKS = {"lohan-ds": H, "zero-infinity": H, "zero-offload": H, "l2l": H, "gemini": D, "angel-ptm": D}


# --- problems -------------------------------------------------------------------------------------------------


def kept_bytes(plan: Plan) -> int:
    return sum(a.bytes for a in plan.activations if isinstance(a.decision, Keep))


def problem(
    activations: ActivationGraph,
    policy: str,
    *,
    host: int = 1 << 45,
    device: int = 1 << 45,
    shared: bool = False,
    forward_s: float = 1.0,
    parameters: tuple[ParameterFacts, ...] = (),
) -> Problem:
    return Problem(
        policy=policy,
        compute_dtype="bfloat16",
        parameters=parameters or facts(),
        activations=activations,
        forward_s=forward_s,
        backward_s=2 * forward_s,
        budgets=Budgets(host, device, FIXED, shared),
        windows=WINDOWS,
        device_peak=lambda plan: PEAK + kept_bytes(plan),
    )


def facts(count: int = 4) -> tuple[ParameterFacts, ...]:
    large = [ParameterFacts(f"layers.{i}.fc.weight", 4 * MIB, 8 * MIB, True) for i in range(count)]
    return (*large, ParameterFacts("embed.weight", MIB, 2 * MIB, False), ParameterFacts("norm.weight", 512, 1024, True))


PAPER = Transformer(32, machine(), as_captured=True)


def paper(policy: str, *, device: int = 1 << 45, host: int = 1 << 45, hw: HardwareProfile | None = None) -> Plan:
    asked = problem(PAPER.graph, policy, device=device, host=host, forward_s=PAPER.forward_s)
    return make_plan(asked, hw or PAPER.hw)


def resident(policy: str) -> int:
    """Device bytes beside activations and the graphs' own of ``facts()`` under ``policy``."""
    plan = make_plan(problem(chain(), policy), PAPER.hw)
    return device_bytes(plan) - kept_bytes(plan)


def chain(blocks: int = 3, *, seconds: float = 0.05, scale: int = 1) -> ActivationGraph:
    """Blocks of a dear matmul, a cheap op, a large matmul and their output; a dropout's mask must be saved as well."""
    kinds = {"dear": (2, 4.0, 9), "cheap": (2, 0.25, 0), "large": (8, 1.0, 3), "out": (2, 0.02, 0)}
    names = [f"{kind}{i}" for i in range(blocks) for kind in kinds]
    graph: nx.DiGraph = nx.DiGraph()
    nx.add_path(graph, names)
    kind_of = {name: name.rstrip("0123456789") for name in names}
    return ActivationGraph(
        graph=graph,
        flops={name: kinds[kind][2] for name, kind in kind_of.items()},
        seconds={name: kinds[kind][1] * seconds for name, kind in kind_of.items()},
        activations={
            name: Activation(name, kind, name, f"layers.{i}", "Block", kinds[kind][0] * scale * MIB)
            for i, (name, kind) in enumerate(kind_of.items())
        },
        needed=frozenset(names),
        mandatory=frozenset(name for name, kind in kind_of.items() if kind == "out"),
    )


def by_decision(plan: Plan, *decisions: object) -> list[str]:
    return [a.node for a in plan.activations if a.decision in decisions]


def device_bytes(plan: Plan) -> int:
    """What ``plan`` takes on the device, counted here."""
    total = kept_bytes(plan)
    for p in plan.parameters:
        total += p.bytes * (p.home is D) + 12 * p.numel * (p.states_home is D) + 4 * p.numel * (p.gradient_home is D)
    return total


def host_bytes(plan: Plan) -> int:
    total = sum(a.bytes for a in plan.activations if a.decision == Swap(H))
    for p in plan.parameters:
        # One that waits for the next forward is of one backward, and as it came; sums of several are fp32 (docs/0014).
        waiting = p.bytes if p.optimizer_runs is OptimizerTiming.NEXT_FORWARD else 4 * p.numel
        total += p.bytes * (p.home is H) + 12 * p.numel * (p.states_home is H) + waiting * (p.gradient_home is H)
    return total


# --- homes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", HOMES)
def test_parameters_states_and_gradients_live_where_the_system_puts_them(policy: str) -> None:
    plan = make_plan(problem(chain(), policy), PAPER.hw)
    trained = [p for p in plan.parameters if p.trainable]
    large = [p for p in trained if p.numel > 1 << 15]
    assert {(p.home, p.states_home, p.gradient_home) for p in large} == {HOMES[policy]}
    late = HOMES[policy][2] is not None
    timing = OptimizerTiming.AFTER_BACKWARD if late else OptimizerTiming.IN_BACKWARD
    assert {p.optimizer_runs for p in trained} == {timing}
    small, frozen = plan.parameter("norm.weight"), plan.parameter("embed.weight")
    assert small.home is D and small.states_home is not N and small.gradient_home is not N
    assert (frozen.home, frozen.states_home, frozen.gradient_home) == (HOMES[policy][0], None, None)


def test_the_three_that_go_by_lohans_search_differ_in_the_optimizer_alone() -> None:
    """Memory for a part of the states: some are on NVMe."""
    plans = {
        name: make_plan(problem(chain(), name, host=FIXED + 100 * MIB, device=PEAK + 30 * MIB), PAPER.hw)
        for name in ("lohan", "lohan-naive", "lohan-zero")
    }
    lohan = plans["lohan"]
    assert plans["lohan-naive"].activations == lohan.activations
    assert plans["lohan-naive"].parameters == lohan.parameters
    assert plans["lohan-naive"].windows == replace(lohan.windows, optimizer_buffers=1)
    late = [p for p in plans["lohan-zero"].parameters if p.trainable]
    assert {p.optimizer_runs for p in late} == {OptimizerTiming.AFTER_BACKWARD}
    assert {p.gradient_home for p in late if p.numel > 1 << 15} == {N}
    assert {p.states_home for p in late if p.numel > 1 << 15} >= {N}


def test_the_division_of_what_goes_by_lohans_search_is_of_its_own_plan() -> None:
    """Not of LoHan's, which is faster, has more buffers, and other gradients that wait."""
    host = FIXED + 100 * MIB
    slow = (replace(PAPER.hw.nvme[0], read_bytes_per_s=1e8, write_bytes_per_s=1e8, mixed_bytes_per_s=1e8),)
    hw = replace(PAPER.hw, nvme=slow, adam_parameters_per_s=1e7)
    steps_s: dict[str, float] = {}
    for name in ("lohan", "lohan-naive", "lohan-zero"):
        plan = make_plan(problem(chain(), name, host=host, device=PEAK + 30 * MIB), hw)
        division = plan.division
        assert division is not None
        assert sum(share.bytes for share in division.shares if share.tier is H) == host
        assert division.bytes_of(H, Use.STAGING) == staging_bytes(plan.windows)
        held = sum(p.held_bytes for p in plan.parameters if p.gradient_home is H)
        assert division.bytes_of(H, Use.GRADIENTS) == held > 0
        steps_s[name] = division.step_s
    assert steps_s["lohan"] < min(steps_s["lohan-naive"], steps_s["lohan-zero"])


def test_where_memory_holds_all_states_late_gradients_wait_there() -> None:
    plan = make_plan(problem(chain(), "lohan-zero"), PAPER.hw)
    assert {p.gradient_home for p in plan.parameters if p.trainable} == {H}


def test_without_drives_late_gradients_wait_in_memory_or_nothing_fits() -> None:
    hw = dataclasses.replace(PAPER.hw, nvme=())
    plan = make_plan(problem(chain(), "lohan-zero"), hw)
    assert {p.gradient_home for p in plan.parameters if p.trainable} == {H}
    with pytest.raises(InfeasiblePlan, match="promise more memory, or use a profile with a drive"):
        make_plan(problem(chain(), "lohan-zero", host=FIXED + 250 * MIB, device=PEAK + 60 * MIB), hw)


def test_memory_that_a_leaving_gradient_takes_is_left_to_it() -> None:
    """On a CPU one that is updated where it is takes none."""

    def leaving(plan: Plan) -> int:
        return PEAK + kept_bytes(plan) + 16 * MIB * any(p.gradient_home is N for p in plan.parameters)

    tight = PEAK + FIXED + 120 * MIB
    asked = problem(chain(), "lohan-zero", host=tight, device=tight, shared=True)
    plan = make_plan(replace(asked, device_peak=leaving), PAPER.hw)
    assert {p.gradient_home for p in plan.parameters if p.trainable and p.numel > 1 << 15} == {N}


# --- activations ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", BETWEEN_BLOCKS)
def test_what_is_between_blocks_is_saved_and_nothing_else(policy: str) -> None:
    plan, tier = paper(policy), BETWEEN_BLOCKS[policy]
    decision = Keep() if tier is D else Swap(tier)
    assert set(by_decision(plan, decision)) == PAPER.graph.mandatory
    assert set(by_decision(plan, Recompute())) == {a.node for a in plan.activations} - PAPER.graph.mandatory


@pytest.mark.parametrize("policy", ["zero-infinity", "l2l"])
def test_systems_without_overlap_fetch_nothing_ahead(policy: str) -> None:
    asked = problem(chain(), policy)
    ahead = dataclasses.replace(asked, windows=replace(WINDOWS, fetch_bytes=1 << 20, swap_in_bytes=1, gradient_bytes=1))
    assert make_plan(ahead, PAPER.hw).windows == replace(WINDOWS, swap_out_bytes=0)
    assert make_plan(replace(ahead, policy="zero-offload"), PAPER.hw).windows == replace(
        ahead.windows, swap_out_bytes=0
    )


def test_stronghold_swaps_everything_to_main_memory() -> None:
    plan = paper("stronghold")
    assert not by_decision(plan, Keep(), Swap(N))
    assert not closure(PAPER.graph, set(by_decision(plan, Swap(H))))


@pytest.mark.parametrize("policy", ["lohan-g10", "g10"])
def test_g10_moves_what_lies_idle_for_long_enough_and_recomputes_nothing(policy: str) -> None:
    plan = paper(policy)
    swapped = by_decision(plan, Swap(N), Swap(H))
    kept = by_decision(plan, Keep())
    assert swapped and kept
    assert not closure(PAPER.graph, {*swapped, *kept})
    # A block's tensor of one unit is idle the longer the earlier it is made.
    block = {name: int(name.partition(".")[2]) for name in (*swapped, *kept)}
    out_moved = [block[name] for name in swapped if name.startswith("out.")]
    out_kept = [block[name] for name in kept if name.startswith("out.")]
    assert max(out_moved) < min(out_kept)
    everything = kept_bytes(plan) // 2
    less = paper(policy, device=PEAK + 1024 + everything)
    assert set(by_decision(less, Swap(N), Swap(H))) > set(swapped)
    assert not closure(PAPER.graph, set(by_decision(less, Swap(N), Swap(H), Keep())))


@pytest.mark.parametrize("policy", ["flashneuron", "capuchin", "checkmate", "str", "swapadvisor", "lohan-cap"])
def test_nothing_moves_while_everything_fits(policy: str) -> None:
    plan = make_plan(problem(chain(), policy), PAPER.hw)
    assert set(by_decision(plan, Keep())) == set(chain().graph)


def test_flashneuron_sends_the_first_layers_to_the_drives() -> None:
    graph = chain()
    plan = make_plan(problem(graph, "flashneuron", device=PEAK + resident("flashneuron") + 20 * MIB), PAPER.hw)
    moved, names = by_decision(plan, Swap(N)), list(graph.graph)
    assert 0 < len(moved) < len(names) and moved == names[: len(moved)]
    assert set(by_decision(plan, Keep())) == set(names[len(moved) :])


def test_swapadvisor_sends_away_what_is_needed_last() -> None:
    graph = chain()
    plan = make_plan(problem(graph, "swapadvisor", device=PEAK + 20 * MIB), PAPER.hw)
    moved = by_decision(plan, Swap(H))
    assert 0 < len(moved) < len(graph.graph) and moved == list(graph.graph)[: len(moved)]


def test_capuchin_swaps_what_the_link_hides_and_recomputes_what_is_cheaper_than_an_exposed_transfer() -> None:
    graph, room = chain(), PEAK + resident("capuchin") + 6 * MIB
    fast = make_plan(problem(graph, "capuchin", device=room), PAPER.hw)
    assert by_decision(fast, Swap(H)) and not by_decision(fast, Recompute())
    rate = 8 * MIB / 0.11  # one large tensor there and back takes 0.22 s, a small one 0.055
    slow = replace(PAPER.hw, h2d_bytes_per_s=rate, d2h_bytes_per_s=rate)
    mixed = make_plan(problem(graph, "capuchin", device=room, forward_s=0.05), slow)
    again = by_decision(mixed, Recompute())
    assert again and not set(again) & graph.mandatory
    dear = {name for name in by_decision(mixed, Swap(H)) if name.startswith("dear")}
    assert dear, "a dear tensor moves rather than be made again"
    assert all(not name.startswith("dear") for name in again)


@pytest.mark.parametrize("policy", ["capuchin", "lohan-cap"])
def test_what_recomputation_begins_with_is_saved_once_something_is_recomputed(policy: str) -> None:
    """As a dropout's output, which the backward does not read: drawn again it would be another."""
    graph = chain()
    masked = replace(
        graph, needed=graph.needed - {"dear1"}, mandatory=graph.mandatory | {"dear1"},
        activations={n: replace(a, bytes=30 * MIB) if n == "cheap1" else a for n, a in graph.activations.items()},
    )  # fmt: skip
    rate = 8 * MIB / 10.0
    slow = replace(PAPER.hw, h2d_bytes_per_s=rate, d2h_bytes_per_s=rate)
    roomy = make_plan(problem(masked, policy), slow)
    assert by_decision(roomy, Recompute()) == ["dear1"], "nothing reads it"
    device = PEAK + device_bytes(roomy) - 10 * MIB
    plan = make_plan(problem(masked, policy, device=device, forward_s=0.05), slow)
    assert "cheap1" in by_decision(plan, Recompute())
    assert "dear1" in by_decision(plan, Keep())
    assert PEAK + device_bytes(plan) <= device


def test_vdnn_sends_the_inputs_of_matmuls_whether_or_not_memory_demands_it() -> None:
    graph = chain()
    plan = make_plan(problem(graph, "vdnn"), PAPER.hw)
    inputs = {source for name in graph.graph if graph.flops[name] for source in graph.graph.predecessors(name)}
    assert set(by_decision(plan, Swap(H))) == inputs
    assert set(by_decision(plan, Keep())) == set(graph.graph) - inputs
    least = make_plan(problem(graph, "vdnn", device=PEAK + resident("vdnn")), PAPER.hw)
    assert set(by_decision(least, Swap(H))) == set(graph.graph)


def test_superneurons_recomputes_the_cheap_and_evicts_the_least_recently_used() -> None:
    graph = chain()
    roomy = make_plan(problem(graph, "superneurons"), PAPER.hw)
    assert set(by_decision(roomy, Recompute())) == {name for name in graph.graph if name.startswith("cheap")}
    room = PEAK + resident("superneurons") + 15 * MIB
    plan = make_plan(problem(graph, "superneurons", device=room), PAPER.hw)
    cached = [name for name in graph.graph if not name.startswith("cheap")]
    moved = by_decision(plan, Swap(H))
    assert 0 < len(moved) < len(cached) and moved == cached[: len(moved)]


def test_checkmate_finds_the_least_recomputation_that_fits() -> None:
    graph = chain(2)
    free = [name for name in graph.graph if name not in graph.mandatory]
    for room in (4, 7, 9, 13, 17):
        device = PEAK + resident("checkmate") + room * MIB
        plan = make_plan(problem(graph, "checkmate", device=device), PAPER.hw)
        assert not by_decision(plan, Swap(H), Swap(N))
        best = min(
            _recompute_s(graph, {*graph.mandatory, *chosen})
            for count in range(len(free) + 1)
            for chosen in itertools.combinations(free, count)
            if sum(graph.activations[name].bytes for name in (*graph.mandatory, *chosen)) <= room * MIB
        )
        assert _recompute_s(graph, set(by_decision(plan, Keep()))) == pytest.approx(best)


def test_a_mix_is_no_slower_than_either_way_alone() -> None:
    graph, rate = chain(), 8 * MIB / 0.4
    slow = replace(PAPER.hw, h2d_bytes_per_s=rate, d2h_bytes_per_s=rate)
    device = PEAK + resident("str") + 10 * MIB
    mixed, kept = (make_plan(problem(graph, p, device=device, forward_s=0.5), slow) for p in ("str", "checkmate"))
    assert by_decision(mixed, Swap(H)) and by_decision(mixed, Recompute())

    def seconds(plan: Plan) -> float:
        moved_s = sum(graph.activations[name].bytes for name in by_decision(plan, Swap(H))) / rate
        saved = set(by_decision(plan, Keep(), Swap(H)))
        return max(0.5, moved_s) + max(1.0 + _recompute_s(graph, saved), moved_s)

    assert seconds(mixed) < seconds(kept)


def test_offloading_by_program_keeps_nothing_and_recomputes_what_main_memory_cannot_hold() -> None:
    graph = chain()
    roomy = make_plan(problem(graph, "lohan-cm"), PAPER.hw)
    least = make_plan(problem(graph, "lohan-cm", host=FIXED + host_bytes(roomy) - 20 * MIB), PAPER.hw)
    for plan in (roomy, least):
        assert not by_decision(plan, Keep(), Swap(N))
    assert set(by_decision(roomy, Swap(H))) == set(graph.graph)
    assert by_decision(least, Recompute())


def test_only_main_memory_takes_lohans_activations_without_the_drives() -> None:
    unit = PAPER.unit_bytes
    host = FIXED + 60 * unit + 20_000
    plan = paper("lohan-cpuact", device=PEAK + 10 * unit, host=host)
    assert not by_decision(plan, Swap(N))
    assert set(by_decision(plan, Keep(), Swap(H))) > PAPER.graph.mandatory
    assert host_bytes(plan) <= host - FIXED
    with pytest.raises(InfeasiblePlan, match="lohan-cpuact"):
        paper("lohan-cpuact", device=PEAK + 10 * unit, host=FIXED + BLOCKS * unit // 2)


def test_fuyou_grows_what_it_swaps_while_the_backward_is_bound_by_compute() -> None:
    drives = PAPER.hw.nvme[0]
    slow = machine(ssd=1e7)
    assert drives.read_bytes_per_s > 1e9
    bound_by_drives = paper("fuyou", hw=slow)
    assert set(by_decision(bound_by_drives, Swap(N))) == PAPER.graph.mandatory
    plan = paper("fuyou")
    joined = [name for name in by_decision(plan, Swap(N)) if name not in PAPER.graph.mandatory]
    assert joined and not by_decision(plan, Keep(), Swap(H))
    # By FLOP per byte: matmuls of the block's output first, then the others; nothing that costs no FLOPs.
    assert {name.partition(".")[0] for name in joined} <= {*MATMULS, "attention"}
    assert paper("fuyou-no-overlap").activations == plan.activations


def test_results_of_one_op_join_fuyous_swaps_together() -> None:
    """Half of an op's results would not spare it: ``pair`` has most FLOPs per byte of ``small``, and fewer than ``single`` per
    byte of both. There is room in the slack for ``single`` and ``small``, not for all three."""
    size = {"small": 10**10, "large": 8 * 10**10, "single": 10**10}
    graph: nx.DiGraph = nx.DiGraph([("pair", "small"), ("pair", "large"), ("large", "single")])
    seconds = {"pair": 1.0, "small": 0.0, "large": 0.0, "single": 0.5}
    found = ActivationGraph(
        graph,
        {"pair": 100, "small": 0, "large": 0, "single": 50},
        seconds,
        {name: Activation(name, name, name if name == "single" else "pair", "", "", n) for name, n in size.items()},
        frozenset(size),
        frozenset(),
    )
    plan = make_plan(problem(found, "fuyou"), PAPER.hw)
    assert by_decision(plan, Swap(N), Keep()) == ["single"]


@pytest.mark.parametrize("policy", ["fuyou", "fuyou-no-overlap"])
def test_fuyous_queue_has_what_the_peak_leaves_of_the_gpu(policy: str) -> None:
    device = PEAK + resident(policy) + 10 * MIB
    plan = make_plan(problem(chain(), policy, device=device), PAPER.hw)
    room = device - PEAK - device_bytes(plan)
    windows = plan.windows
    assert min(windows.fetch_bytes, windows.swap_in_bytes) > 0
    assert room - 2 <= windows.fetch_bytes + windows.swap_in_bytes <= room
    roomy = make_plan(problem(chain(), policy), PAPER.hw)
    fetched = sum(p.bytes for p in roomy.parameters if p.home is N)
    swapped = sum(a.bytes for a in roomy.activations if a.decision == Swap(N))
    assert (roomy.windows.fetch_bytes, roomy.windows.swap_in_bytes) == (fetched, swapped)
    cpu = make_plan(problem(chain(), policy, shared=True), replace(PAPER.hw, device="cpu"))
    assert (cpu.windows.fetch_bytes, cpu.windows.swap_in_bytes) == (0, 0)


def test_systems_differ_where_the_papers_do() -> None:
    """On the papers' 13B transformer on a 24 GiB device, no two of these save the same in the same places."""
    names = ["zero-infinity", "gemini", "stronghold", "fuyou", "lohan-g10", "lohan-cm", "lohan-cap", "lohan-cpuact"]
    plans = [paper(name, device=24 * GIB, host=300 * GIB) for name in names]
    decided = [tuple(str(a.decision) for a in plan.activations) for plan in plans]
    assert len(set(decided)) >= len(names) - 1


def _recompute_s(graph: ActivationGraph, saved: set[str]) -> float:
    return sum(graph.seconds[name] for name in closure(graph, saved))


# --- budgets --------------------------------------------------------------------------------------------------


@given(
    st.sampled_from(POLICIES),
    st.booleans(),
    st.sampled_from([1, 4]),
    st.sampled_from([0.001, 0.1]),
    st.integers(60, 700),
    st.integers(20, 700),
)
@example("lohan", False, 1, 0.001, 60, 59)  # a gradient waits in the memory that there is
@examples(120, suppress_health_check=[HealthCheck.too_slow])
def test_no_plan_is_over_its_budget(
    policy: str, shared: bool, scale: int, seconds: float, host: int, device: int
) -> None:
    asked = problem(chain(scale=scale, seconds=seconds), policy, host=host * MIB, device=device * MIB, shared=shared)
    hw = replace(PAPER.hw, device="cpu") if shared else PAPER.hw
    try:
        plan = make_plan(asked, hw)
    except InfeasiblePlan as refused:
        assert policy in str(refused)
        return
    used = PEAK + device_bytes(plan)
    assert used <= device * MIB
    assert FIXED + host_bytes(plan) + (used if shared else 0) <= host * MIB
    assert asked.activations.mandatory <= set(by_decision(plan, Keep(), Swap(H), Swap(N)))
    assert Plan.from_json(plan.to_json()) == plan


# --- names ----------------------------------------------------------------------------------------------------


def test_the_table_lists_every_policy_and_why_some_do_not_run() -> None:
    lines = lohan_fx.policies().splitlines()
    assert [line.split()[0] for line in lines[1 : 1 + len(ALL)]] == list(POLICIES)
    assert lines[0].split() == [
        "policy",
        "source",
        "parameters",
        "states",
        "gradients",
        "optimizer",
        "activations",
        "runs",
    ]
    for policy in ALL:
        reasons = [line for line in lines if line.startswith(f"{policy.name} is planned and simulated only: ")]
        assert len(reasons) == (0 if policy.runs else 1)
        assert bool(policy.why_not) is not policy.runs


def test_the_issues_policies_are_all_there() -> None:
    asked = [
        "lohan",
        "lohan-naive",
        "lohan-zero",
        "lohan-cpuact",
        "lohan-ds",
        "lohan-cap",
        "lohan-g10",
        "lohan-cm",
        "fuyou",
        "fuyou-no-overlap",
        "zero-infinity",
        "zero-offload",
        "gemini",
        "g10",
        "flashneuron",
        "capuchin",
        "checkmate",
        "stronghold",
        "l2l",
        "swapadvisor",
        "vdnn",
        "superneurons",
        "str",
        "angel-ptm",
        "in-memory",
    ]
    assert set(asked) <= set(POLICIES)
    assert {name for name in POLICIES if not named(name).runs} == {"angel-ptm", "g10", "swapadvisor"}
    assert len(set(POLICIES)) == len(POLICIES)


def test_a_name_that_is_close_is_named() -> None:
    with pytest.raises(ValueError, match=r"unknown policy 'zero-infinty' \(did you mean 'zero-infinity'"):
        named("zero-infinty")
    with pytest.raises(ValueError, match="policy 'g10' is planned and simulated only: its optimizer runs on the GPU"):
        runnable("g10")
    assert isinstance(runnable("lohan"), Policy)


IMPORTS: Iterable[str] = (
    "from lohan_fx.policies import named; import lohan_fx; assert callable(lohan_fx.policies); named('lohan')",
    "import lohan_fx.policies; from lohan_fx.policies.fuyou import FUYOU; assert FUYOU.name in lohan_fx.policies()",
    "import lohan_fx; from lohan_fx import policies; policies(); from lohan_fx.policies import ALL; ALL[0].name",
)


@pytest.mark.parametrize("program", IMPORTS)
def test_the_function_shadows_the_package_and_imports_still_work(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_decide_is_what_make_plan_calls() -> None:
    asked = problem(chain(), "gemini")
    decide: Callable[[Problem, HardwareProfile], Plan] = named("gemini").decide
    assert make_plan(asked, PAPER.hw) == decide(asked, PAPER.hw)
