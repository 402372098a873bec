"""planner: plans that fit, that get no slower with more memory, and refusals that say what would fit."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lohan_fx import cost
from lohan_fx.errors import InfeasiblePlan
from lohan_fx.hardware import HardwareProfile
from lohan_fx.passes.activation_graph import Activation, ActivationGraph, closure
from lohan_fx.plan import Ends, Keep, OptimizerTiming, Plan, Recompute, Swap, Tier, Windows
from lohan_fx.planning.plan_builder import homes_only, layer_of_parameter
from lohan_fx.planning.planner import make_plan
from lohan_fx.planning.problem import Budgets, ParameterFacts, Problem
from lohan_fx.planning.step_time import step_seconds
from lohan_fx.policies import FORCED, POLICIES
from tests.exhaustive import examples

MIB = 1 << 20
GPU = replace(HardwareProfile.preset("rtx4090-12xP5510"), interpreter_s_per_job=1e-12)
"""On which jobs take no time from the thread that launches: they are judged by themselves."""
CPU = replace(
    GPU,
    device="cpu",
    memory_bytes_per_s=2e10,
    host_memory_bytes_per_s=2e10,
    h2d_bytes_per_s=1e10,
    d2h_bytes_per_s=1e10,
    adam_parameters_per_s=5e8,
    nvme=(replace(GPU.nvme[0], read_bytes_per_s=2e9, write_bytes_per_s=1e9, mixed_bytes_per_s=1.3e9),),
)
WINDOWS = Windows(
    fetch_bytes=0,
    swap_in_bytes=0,
    gradient_bytes=0,
    chunk_elements=4096,
    io_bytes=4096,
    io_buffers=1,
    optimizer_buffers=2,
    gradient_buffers=2,
    swap_out_bytes=1 << 20,
)
FIXED, PEAK = 50 * MIB, 20 * MIB


# --- problems -------------------------------------------------------------------------------------------------


def blocks(count: int = 4, *, scale: int = 1, seconds: float = 0.05) -> ActivationGraph:
    """Blocks of a dear, a cheap and a large value, and their output, which is mandatory."""
    graph: nx.DiGraph = nx.DiGraph()
    sizes = {"dear": 2, "cheap": 2, "large": 8, "out": 2}
    times = {"dear": 4 * seconds, "cheap": seconds / 4, "large": seconds, "out": seconds / 50}
    names = [f"{kind}{i}" for i in range(count) for kind in sizes]
    nx.add_path(graph, names)
    kinds = {name: name.rstrip("0123456789") for name in names}
    return ActivationGraph(
        graph=graph,
        flops={name: int(1e9 * times[kind]) for name, kind in kinds.items()},
        seconds={name: times[kind] for name, kind in kinds.items()},
        activations={
            name: Activation(name, kind, name, f"layers.{name.removeprefix(kind)}", "Block", sizes[kind] * scale * MIB)
            for name, kind in kinds.items()
        },
        needed=frozenset(names),
        mandatory=frozenset(name for name, kind in kinds.items() if kind == "out"),
    )


def facts(count: int = 4, megabytes: int = 8) -> tuple[ParameterFacts, ...]:
    """bf16 weights, and small norms beside them; the last weight is frozen."""
    large = [
        ParameterFacts(f"layers.{i}.fc.weight", megabytes * MIB // 2, megabytes * MIB, i < count - 1)
        for i in range(count)
    ]
    return (*large, *(ParameterFacts(f"layers.{i}.norm.weight", 512, 1024, True) for i in range(count)))


def problem(
    host: int,
    device: int,
    *,
    shared: bool = True,
    policy: str = "lohan",
    activations: ActivationGraph | None = None,
    parameters: tuple[ParameterFacts, ...] = facts(),
    forward_s: float = 0.5,
    first: frozenset[str] = frozenset(),
    last: frozenset[str] = frozenset(),
    holds: bool = False,
) -> Problem:
    found = activations or blocks()
    return Problem(
        policy=policy,
        compute_dtype="bfloat16",
        parameters=parameters,
        activations=found,
        forward_s=forward_s,
        backward_s=2 * forward_s,
        budgets=Budgets(host, device, FIXED, shared),
        windows=WINDOWS,
        device_peak=lambda plan: PEAK + kept_bytes(plan) + plan.waiting_bytes,
        ends=Ends(first, last, last_fetch_s=forward_s / 10),
        holds=holds,
    )


def kept_bytes(plan: Plan) -> int:
    return sum(a.bytes for a in plan.activations if isinstance(a.decision, Keep))


def swapped_bytes(plan: Plan, *tiers: Tier) -> int:
    return sum(a.bytes for a in plan.activations if isinstance(a.decision, Swap) and a.decision.tier in tiers)


def saved(plan: Plan) -> set[str]:
    return {a.node for a in plan.activations if not isinstance(a.decision, Recompute)}


def used(asked: Problem, plan: Plan) -> tuple[int, int]:
    """(device, host) bytes that ``plan`` takes."""
    each, swapped = kept_bytes(plan), swapped_bytes(plan, Tier.HOST)
    device = PEAK + asked.forwards * each + sum(p.bytes for p in plan.parameters if p.home is Tier.DEVICE)
    host = FIXED + asked.forwards * swapped + sum(p.bytes for p in plan.parameters if p.home is Tier.HOST)
    host += sum(12 * p.numel for p in plan.parameters if p.states_home is Tier.HOST)
    host += sum(p.bytes for p in plan.parameters if p.gradient_home is Tier.HOST)
    return device, host + (device if asked.budgets.shared else 0)


def fits(asked: Problem, plan: Plan) -> bool:
    device, host = used(asked, plan)
    return device <= asked.budgets.device_memory_bytes and host <= asked.budgets.host_memory_bytes


def step_s(asked: Problem, plan: Plan, hw: HardwareProfile) -> float:
    """Predicted seconds of the plan as it stands."""
    found = asked.activations
    on_cpu = asked.budgets.shared
    moves = [
        p
        for p in plan.parameters
        if p.trainable
        and (Tier.NVME in (p.home, p.states_home) or not (on_cpu or p.home is p.states_home is Tier.DEVICE))
    ]
    later = [p for p in moves if p.optimizer_runs is OptimizerTiming.NEXT_FORWARD]
    late = [p for p in moves if p.name in (asked.ends.first_fetches if p in later else asked.ends.last_gradients)]
    later = [p for p in later if p not in late]
    trained = [p for p in plan.parameters if p.trainable and p not in late and p not in later]
    fetched = sum(p.bytes for p in plan.parameters if p.home is not Tier.DEVICE)
    from_nvme = sum(p.bytes for p in plan.parameters if p.home is Tier.NVME)
    states = 12 * sum(p.numel for p in trained if p.states_home is Tier.NVME)
    late_states = 12 * sum(p.numel for p in late if p.states_home is Tier.NVME)
    next_states = 12 * sum(p.numel for p in later if p.states_home is Tier.NVME)
    next_copies = sum(p.bytes for p in later if p.home is Tier.NVME)
    held = sum(p.bytes for p in later if p.gradient_home is Tier.NVME)
    chunk = plan.windows.chunk_elements
    requests = (from_nvme + swapped_bytes(plan, Tier.NVME)) / plan.windows.io_bytes
    handed_over = sum(isinstance(a.decision, Swap) for a in plan.activations)
    handed_over += sum(p.home is not Tier.DEVICE for p in plan.parameters)
    near = (Tier.DEVICE, Tier.HOST) if on_cpu else (Tier.DEVICE,)
    sent = len(moves) + sum(p not in moves and p.gradient_home not in (None, *near) for p in plan.parameters)
    work = cost.Work(
        forward_s=asked.forward_s + asked.handover_s * handed_over,
        backward_s=asked.backward_s + asked.handover_s * (handed_over + sent),
        recompute_s=sum(found.seconds[name] for name in closure(found, saved(plan))),
        fetched_forward_bytes=fetched,
        fetched_forward_nvme_bytes=from_nvme,
        fetched_backward_bytes=fetched,
        fetched_backward_nvme_bytes=from_nvme,
        swapped_bytes=swapped_bytes(plan, Tier.HOST, Tier.NVME),
        swapped_nvme_bytes=swapped_bytes(plan, Tier.NVME),
        gradient_bytes=sum(p.bytes for p in plan.parameters if p.trainable),
        first_fetched_nvme_bytes=sum(
            p.bytes for p in plan.parameters if p.home is Tier.NVME and p.name in asked.ends.first_fetches
        ),
        fetches_read_bytes=from_nvme + next_states + held,
        fetches_written_bytes=next_states + next_copies,
        behind_fetches_s=asked.ends.last_fetch_s,
        updates_read_bytes=states,
        updates_written_bytes=states + sum(p.bytes for p in trained if p.home is Tier.NVME) + held,
        by_lane=sum(p.numel for p in trained if p in moves),
        late_by_lane=sum(p.numel for p in late),
        state_read_bytes=states,
        state_write_bytes=states + sum(p.bytes for p in trained if p.home is Tier.NVME),
        adam_parameters=sum(p.numel for p in trained),
        late_state_read_bytes=late_states,
        late_state_write_bytes=late_states + sum(p.bytes for p in late if p.home is Tier.NVME),
        late_adam_parameters=sum(p.numel for p in late),
        next_held_nvme_bytes=held,
        next_state_read_bytes=next_states,
        next_state_write_bytes=next_states + next_copies,
        next_adam_parameters=sum(p.numel for p in later),
        **{
            f"{when}returned_bytes": sum(
                p.bytes for p in among if not on_cpu and p.home is Tier.DEVICE and p.states_home is not Tier.DEVICE
            )
            for when, among in (("", trained), ("late_", late), ("next_", later))
        },
        forward_requests=requests + next_states / 3 / chunk + (next_copies + held) / 2 / chunk,
        backward_requests=requests
        + states / 3 / chunk
        + sum(p.numel for p in trained if p.home is Tier.NVME) / chunk
        + held / 2 / chunk,
    )
    stages = cost.forward_stage(work, hw), cost.backward_stage(work, hw), cost.optimizer_stage(work, hw)
    return sum(stage.seconds for stage in stages)


def hardware(shared: bool) -> HardwareProfile:
    return CPU if shared else GPU


# --- forced policies ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "decision", "home", "states_home"),
    [
        ("in-memory", Keep(), Tier.DEVICE, Tier.HOST),
        ("keep", Keep(), Tier.NVME, Tier.NVME),
        ("swap-host", Swap(Tier.HOST), Tier.NVME, Tier.NVME),
        ("swap-nvme", Swap(Tier.NVME), Tier.NVME, Tier.NVME),
        ("recompute", Recompute(), Tier.NVME, Tier.NVME),
    ],
)
@pytest.mark.parametrize("shared", [True, False])
def test_a_forced_policy_is_obeyed(policy: str, decision: object, home: Tier, states_home: Tier, shared: bool) -> None:
    plan = make_plan(problem(10_000 * MIB, 10_000 * MIB, shared=shared, policy=policy), hardware(shared))
    assert {a.decision for a in plan.activations if not a.mandatory} == {decision}
    assert {a.decision for a in plan.activations if a.mandatory} == {Keep() if policy == "recompute" else decision}
    assert {p.home for p in plan.parameters} == {home}
    assert {p.states_home for p in plan.parameters if p.trainable} == {states_home}
    assert (plan.policy, plan.device) == (policy, "cpu" if shared else "cuda")


def test_what_nothing_would_read_is_not_saved_by_a_forced_policy_either() -> None:
    found = blocks(1)
    only_large = replace(found, needed=found.needed - {"dear0", "cheap0"}, mandatory=frozenset())
    plan = make_plan(problem(10_000 * MIB, 10_000 * MIB, policy="swap-host", activations=only_large), CPU)
    assert {a.node: str(a.decision) for a in plan.activations} == {
        "dear0": "recompute",
        "cheap0": "recompute",
        "large0": "swap:host",
        "out0": "swap:host",
    }


def test_all_policies_are_known_and_no_other() -> None:
    for policy in POLICIES:
        assert make_plan(problem(10_000 * MIB, 10_000 * MIB, policy=policy), CPU).policy == policy
    with pytest.raises(ValueError, match="unknown policy 'zzz': expected one of lohan, lohan-naive, lohan-zero"):
        make_plan(problem(10_000 * MIB, 10_000 * MIB, policy="zzz"), CPU)


def test_a_plan_says_what_it_knows_of_each_parameter_and_activation() -> None:
    plan = make_plan(problem(10_000 * MIB, 10_000 * MIB, policy="keep"), CPU)
    assert [p.name for p in plan.parameters] == [p.name for p in facts()]
    frozen = plan.parameter("layers.3.fc.weight")
    assert (frozen.states_home, frozen.optimizer_runs, frozen.layer) == (None, OptimizerTiming.NONE, "layers.3")
    dear = next(a for a in plan.activations if a.node == "dear1")
    assert (dear.op, dear.layer, dear.layer_kind, dear.bytes, dear.mandatory) == (
        "dear",
        "layers.1",
        "Block",
        2 * MIB,
        False,
    )
    assert dear.flops == blocks().flops["dear1"]
    assert [a.node for a in plan.activations] == list(blocks().activations)


# --- the search -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [True, False])
def test_where_memory_is_plentiful_everything_stays(shared: bool) -> None:
    plan = make_plan(problem(10_000 * MIB, 10_000 * MIB, shared=shared), hardware(shared))
    assert {a.decision for a in plan.activations} == {Keep()}
    assert {p.home for p in plan.parameters} == {Tier.DEVICE}
    assert {p.states_home for p in plan.parameters if p.trainable} == {Tier.HOST}


PROBLEMS = st.builds(
    lambda shared, scale, seconds, megabytes, forward_s, end: (
        lambda host, device: problem(
            host,
            host if shared else device,
            shared=shared,
            activations=blocks(scale=scale, seconds=seconds),
            parameters=facts(megabytes=megabytes),
            forward_s=forward_s,
            first=end,
            last=end,
        )
    ),
    st.booleans(),  # shared
    st.sampled_from([1, 4, 16]),
    st.sampled_from([0.0005, 0.01, 0.2]),
    st.sampled_from([1, 8, 64]),
    st.sampled_from([0.001, 0.1, 2.0]),
    st.sampled_from([frozenset[str](), frozenset({"layers.0.fc.weight", "layers.0.norm.weight"})]),
)
MEMORY = st.integers(90, 2500).map(lambda megabytes: megabytes * MIB)


def planned(asked: Problem) -> Plan | None:
    try:
        return make_plan(asked, hardware(asked.budgets.shared))
    except InfeasiblePlan:
        return None


@given(PROBLEMS, MEMORY, MEMORY)
def test_every_plan_fits(make: Callable[[int, int], Problem], host: int, device: int) -> None:
    asked = make(host, device)
    plan = planned(asked)
    assert plan is None or fits(asked, plan)


@given(PROBLEMS, MEMORY, MEMORY)
def test_what_must_be_saved_is_saved(make: Callable[[int, int], Problem], host: int, device: int) -> None:
    asked = make(host, device)
    plan = planned(asked)
    assert plan is None or asked.activations.mandatory <= saved(plan)


@given(PROBLEMS, MEMORY, MEMORY, MEMORY, MEMORY)
@examples(60)
def test_more_memory_never_predicts_a_slower_step(
    make: Callable[[int, int], Problem], host: int, device: int, more_host: int, more_device: int
) -> None:
    asked, larger = make(host, device), make(host + more_host, device + more_device)
    plan, better = planned(asked), planned(larger)
    if plan is not None:
        assert better is not None
        hw = hardware(asked.budgets.shared)
        assert step_s(larger, better, hw) <= step_s(asked, plan, hw) * 1.000001


@given(PROBLEMS, MEMORY, MEMORY)
@examples(40)
def test_no_forced_policy_is_faster(make: Callable[[int, int], Problem], host: int, device: int) -> None:
    """In a little less memory: forced policies do not hold the small parameters there."""
    asked, less = make(host, device), make(host - MIB, device - MIB)
    plan, hw = planned(asked), hardware(asked.budgets.shared)
    for policy in FORCED:
        forced = planned(replace(less, policy=policy.name))
        if forced is not None:
            assert plan is not None
            assert step_s(asked, plan, hw) <= step_s(asked, forced, hw) * 1.01


def test_of_what_is_saved_the_last_stays_then_comes_host_memory_and_the_first_goes_to_nvme() -> None:
    """A device for the outputs and a little more, host memory for a little, and a GPU that everything waits for."""
    asked = problem(FIXED + 30 * MIB, PEAK + 24 * MIB, shared=False, activations=blocks(seconds=50.0), forward_s=100.0)
    plan = make_plan(asked, GPU)
    order = [str(a.decision) for a in plan.activations if not isinstance(a.decision, Recompute)]
    ranks = {"swap:nvme": 0, "swap:host": 1, "keep": 2}
    tiers = [ranks[decision] for decision in order]
    assert set(tiers) == {0, 1, 2}
    assert tiers.count(2) * 2 <= 24
    inversions = sum(a > b for i, a in enumerate(tiers) for b in tiers[i + 1 :])
    assert inversions <= 8  # a large value that no longer fits lets smaller, earlier ones pass


def test_small_parameters_and_their_states_stay_in_memory() -> None:
    asked = problem(FIXED + PEAK + 40 * MIB, 10_000 * MIB)
    plan = make_plan(asked, CPU)
    for parameter in plan.parameters:
        small = parameter.numel < 1 << 15
        assert (parameter.home is Tier.DEVICE) or not small
        assert (parameter.states_home is Tier.HOST) or not small


def test_small_activations_are_not_worth_a_transfer() -> None:
    found = blocks(scale=1)
    tiny = {n: replace(a, bytes=512) if a.op == "cheap" else a for n, a in found.activations.items()}
    asked = problem(
        FIXED + 200 * MIB, PEAK + 9 * MIB, shared=False, activations=replace(found, activations=tiny), forward_s=2.0
    )
    plan = make_plan(asked, GPU)
    assert {str(a.decision) for a in plan.activations if a.op == "cheap"} <= {"keep", "recompute"}
    assert any(isinstance(a.decision, Swap) for a in plan.activations)


def test_swaps_that_fill_host_memory_leave_room_for_the_states_of_small_parameters() -> None:
    """Else no division would ever fit, and the least plan would be all that is left."""
    norms = tuple(ParameterFacts(f"layers.{i}.norm.weight", 30_000, 60_000, True) for i in range(40))
    asked = problem(
        FIXED + 40 * MIB,
        PEAK + 9 * MIB + 40 * 60_000,
        shared=False,
        activations=blocks(seconds=5.0),
        parameters=facts() + norms,
        forward_s=10.0,
    )
    plan = make_plan(asked, GPU)
    assert fits(asked, plan)
    small = 40 * 12 * 30_000
    assert used(asked, plan)[1] > FIXED + small + 10 * MIB


def test_where_the_outputs_of_blocks_do_not_fit_they_are_swapped() -> None:
    asked = problem(FIXED + PEAK + 5 * MIB, 10_000 * MIB)
    plan = make_plan(asked, CPU)
    assert Swap(Tier.NVME) in {a.decision for a in plan.activations if a.mandatory}
    assert fits(asked, plan)


# --- what does not fit ----------------------------------------------------------------------------------------

LINE = re.compile(r"(host|device)_memory=([\d,]+) bytes is ([\d,]+) short; \1_memory=([\d,]+) would fit")


def refusal(asked: Problem) -> list[tuple[str, int, int, int]]:
    """(tier, budget, missing, enough) of each line of the message."""
    with pytest.raises(InfeasiblePlan, match=rf"^policy '{asked.policy}' does not fit: ") as caught:
        make_plan(asked, hardware(asked.budgets.shared))
    lines = [(tier, *(int(n.replace(",", "")) for n in numbers)) for tier, *numbers in LINE.findall(str(caught.value))]
    assert lines
    return lines


def with_memory(asked: Problem, **nbytes: int) -> Problem:
    memory = {"host": asked.budgets.host_memory_bytes, "device": asked.budgets.device_memory_bytes, **nbytes}
    budgets = Budgets(memory["host"], memory["device"], FIXED, asked.budgets.shared)
    return replace(asked, budgets=budgets)


TOO_LITTLE = [
    (policy, shared, host, device)
    for policy in POLICIES
    for shared in (True, False)
    for host, device in ((51, 10), (51, 10_000), (10_000, 10), (60, 19))
    # On a GPU the last megabyte of host memory is enough for what keeps nothing large there.
    if shared or device < 20 or policy in ("in-memory", "swap-host")
]


@pytest.mark.parametrize(("policy", "shared", "host", "device"), TOO_LITTLE)
def test_the_refusal_names_tier_and_missing_bytes_and_what_fits(
    policy: str, shared: bool, host: int, device: int
) -> None:
    asked = problem(host * MIB, device * MIB, shared=shared, policy=policy)
    lines = refusal(asked)
    budgets = {"host": asked.budgets.host_memory_bytes, "device": asked.budgets.device_memory_bytes}
    assert all(budgets[tier] == budget for tier, budget, _, _ in lines)
    enough = {tier: enough for tier, _, _, enough in lines}
    just = {tier: budget + missing for tier, budget, missing, _ in lines}
    for memory in (enough, just):
        larger = with_memory(asked, **memory)
        assert fits(larger, make_plan(larger, hardware(shared)))
    for tier in just:
        with pytest.raises(InfeasiblePlan):
            make_plan(with_memory(asked, **{**just, tier: just[tier] - 1}), hardware(shared))


# --- inference ------------------------------------------------------------------------------------------------


def budgets(nbytes: int, *, shared: bool = True) -> Budgets:
    return Budgets(nbytes, nbytes, FIXED, shared)


def test_inference_stays_in_memory_where_half_of_the_promise_holds_the_model() -> None:
    total = sum(p.bytes + (12 * p.numel if p.trainable else 0) for p in facts())
    plan = homes_only("lohan", "bfloat16", facts(), budgets(2 * total + FIXED + 1), WINDOWS)
    assert {p.home for p in plan.parameters} == {Tier.DEVICE}
    assert {p.states_home for p in plan.parameters if p.trainable} == {Tier.HOST}
    plan = homes_only("lohan", "bfloat16", facts(), budgets(2 * total + FIXED), WINDOWS)
    assert {p.home for p in plan.parameters if p.numel > 1 << 15} == {Tier.NVME}
    assert plan.activations == ()


def test_inference_beside_a_gpu_stays_in_its_memory_where_half_of_it_holds_the_parameters() -> None:
    on_device = sum(p.bytes for p in facts())
    for device_bytes, home in ((2 * on_device + 1, Tier.DEVICE), (2 * on_device, Tier.NVME)):
        ample = Budgets(10_000 * MIB, device_bytes, FIXED, shared=False)
        plan = homes_only("lohan", "bfloat16", facts(), ample, WINDOWS)
        assert {p.home for p in plan.parameters if p.numel > 1 << 15} == {home}


def test_inference_of_a_policy_that_streams_streams() -> None:
    plan = homes_only("swap-nvme", "bfloat16", facts(), budgets(10_000 * MIB), WINDOWS)
    assert {p.home for p in plan.parameters if p.numel > 1 << 15} == {Tier.NVME}


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.3.mlp.up_proj.weight", "model.layers.3"),
        ("model2.layers.3.mlp.weight", "model2.layers.3"),
        ("layer1.0.conv1.weight", "layer1.0"),
        ("0.weight", "0"),
        ("conv1.weight", "conv1"),
        ("lm_head.weight", "lm_head"),
        ("bias", ""),
    ],
)
def test_layer_of_a_parameter(name: str, layer: str) -> None:
    assert layer_of_parameter(name) == layer


# --- which of them ------------------------------------------------------------------------------------------------


def crowded(**changes: Any) -> Problem:
    """A GPU with room for half of what is saved, and a host with room for the rest."""
    asked = problem(1 << 40, PEAK + 12 * 14 * MIB // 2, shared=False, activations=blocks(12, seconds=1.0))
    return replace(asked, **changes)


def decisions(plan: Plan, kind: str) -> list[bool]:
    """Whether each of a kind is swapped, in the order of the model."""
    return [isinstance(a.decision, Swap) for a in plan.activations if a.node.rstrip("0123456789") == kind]


@pytest.mark.parametrize("host", [1 << 40, FIXED + 700 * MIB])
def test_what_stays_and_what_goes_take_turns(host: int) -> None:
    """As many bytes of each, in a row or evenly: of each kind in any stretch of the model about as many as in all of it."""
    asked = crowded(budgets=replace(crowded().budgets, host_memory_bytes=host))
    row, turns = (make_plan(replace(asked, in_turns=in_turns), GPU) for in_turns in (False, True))
    assert fits(asked, row) and fits(asked, turns)
    assert swapped_bytes(turns, Tier.HOST, Tier.NVME) == pytest.approx(
        swapped_bytes(row, Tier.HOST, Tier.NVME), rel=0.1
    )
    first = {a.node for a in row.activations[: len(row.activations) // 3]}
    share = swapped_bytes(turns, Tier.HOST, Tier.NVME) / sum(a.bytes for a in turns.activations)
    assert 0.2 < share < 0.8
    for begin in range(0, len(turns.activations) - 16, 4):
        stretch = turns.activations[begin : begin + 16]
        away = sum(a.bytes for a in stretch if isinstance(a.decision, Swap)) / sum(a.bytes for a in stretch)
        assert abs(away - share) < 0.25
    in_first = sum(a.bytes for a in row.activations if a.node in first and isinstance(a.decision, Swap))
    assert in_first == sum(a.bytes for a in row.activations if a.node in first)


@pytest.mark.parametrize("in_turns", [False, True])
def test_what_compute_would_wait_for_stays(in_turns: bool) -> None:
    """Of four equal values, the one that is needed back at once; any other choice is slower by what is waited for."""
    asked = crowded(in_turns=in_turns)
    last = "large11"
    plan = make_plan(asked, GPU)
    waits = replace(asked, coming_back_s={(last, tier): 0.5 for tier in (Tier.HOST, Tier.NVME)})
    found = make_plan(waits, GPU)
    assert not isinstance(found.decision(last), Swap)
    assert step_seconds(waits, GPU, found) == pytest.approx(step_seconds(asked, GPU, plan), rel=0.05)
    swapped = replace(
        found,
        activations=tuple(replace(a, decision=Swap(Tier.HOST)) if a.node == last else a for a in found.activations),
    )
    assert step_seconds(waits, GPU, swapped) >= step_seconds(asked, GPU, swapped) + 0.4


def test_small_values_are_kept() -> None:
    """Statistics of a norm beside activations a thousand times as large."""
    found = blocks(12, seconds=1.0)
    statistics = {
        name: replace(a, bytes=2000 * a.bytes // MIB) for name, a in found.activations.items() if "cheap" in name
    }
    asked = crowded(
        activations=replace(found, activations=found.activations | statistics, needed=frozenset(found.graph))
    )
    assert asked.small_activation_bytes == int(0.001 * 8 * MIB)
    plan = make_plan(asked, GPU)
    assert decisions(plan, "cheap") == [False] * 12 and any(decisions(plan, "large"))
