"""What a plan keeps in memory for good, and how less of it is kept."""

from __future__ import annotations

import dataclasses

import pytest

from lohan_fx.errors import InfeasiblePlan
from lohan_fx.plan import OptimizerTiming, ParameterPlan, Plan, Tier
from lohan_fx.planning.memory_model import at_home_bytes, in_memory_bytes, states_bytes, with_less_at_home
from lohan_fx.planning.problem import ParameterFacts
from tests.lohan_fx.planning.test_planner import WINDOWS

ELEMENTS = {"small": 10, "large": 1000, "frozen": 100, "held": 5}
AT_HOME = 14 * (10 + 1000 + 5) + 2 * 100 + 4 * 5
"""A bf16 parameter and three float32 states of each, the frozen one without; and one waiting gradient."""


def plan(device: str, home: Tier, states_home: Tier) -> Plan:
    parameters = tuple(
        ParameterPlan(
            name=name,
            layer="layer",
            numel=numel,
            bytes=2 * numel,
            trainable=name != "frozen",
            home=home,
            states_home=None if name == "frozen" else states_home,
            optimizer_runs=OptimizerTiming.AFTER_BACKWARD if name == "held" else OptimizerTiming.IN_BACKWARD,
            gradient_home=states_home if name == "held" else None,
        )
        for name, numel in ELEMENTS.items()
    )
    return Plan("lohan", device, "bfloat16", 1 << 20, 1 << 20, (), parameters, WINDOWS)


def on_nvme(found: Plan, what: str) -> set[str]:
    return {p.name for p in found.parameters if getattr(p, what) is Tier.NVME}


@pytest.mark.parametrize("home", [Tier.DEVICE, Tier.HOST])
def test_states_leave_before_parameters_and_the_largest_first(home: Tier) -> None:
    all_at_home = plan("cpu", home, home)
    assert at_home_bytes(all_at_home) == (AT_HOME,)
    assert with_less_at_home(all_at_home, AT_HOME) == all_at_home

    without_one = with_less_at_home(all_at_home, AT_HOME - 1)
    assert on_nvme(without_one, "states_home") == {"large"} and not on_nvme(without_one, "home")
    assert at_home_bytes(without_one) == (AT_HOME - 12 * 1000,)

    without_states = with_less_at_home(all_at_home, AT_HOME - 12 * 1015)
    assert on_nvme(without_states, "states_home") == {"small", "large", "held"} and not on_nvme(without_states, "home")


@pytest.mark.parametrize("home", [Tier.DEVICE, Tier.HOST])
def test_there_is_room_for_the_largest_parameter_that_left(home: Tier) -> None:
    """Graphs that counted on it at home fetch it now."""
    largest, parameters = 2 * 1000, AT_HOME - 12 * 1015
    found = with_less_at_home(plan("cpu", home, home), parameters - 2 * 100)
    assert on_nvme(found, "home") == {"large", "frozen"} and at_home_bytes(found) == (parameters - 2 * 1100,)
    assert at_home_bytes(with_less_at_home(plan("cpu", home, home), largest + 20)) == (20,)
    with pytest.raises(InfeasiblePlan, match=r"1 short.*earlier shapes"):
        with_less_at_home(plan("cpu", home, home), largest + 19)
    assert {p.name for p in found.parameters if p.states_home is None} == {"frozen"}


def test_what_a_gpu_keeps_is_not_host_memory() -> None:
    found = plan("cuda", Tier.DEVICE, Tier.HOST)
    assert at_home_bytes(found) == (2 * sum(ELEMENTS.values()), 12 * 1015 + 20)
    less = with_less_at_home(found, 20)
    assert at_home_bytes(less) == (2 * sum(ELEMENTS.values()), 20)
    assert dataclasses.replace(less, parameters=()) == dataclasses.replace(found, parameters=())


D, H, N = Tier.DEVICE, Tier.HOST, Tier.NVME


@pytest.mark.parametrize(
    ("device", "home", "states_home", "each"),
    [
        *(("cpu", home, states, 8) for home in (D, H) for states in (D, H)),
        ("cpu", N, N, 8), ("cpu", D, N, 12), ("cpu", N, H, 12),
        ("cuda", D, D, 8), ("cuda", H, H, 8), ("cuda", N, N, 8),
        ("cuda", D, H, 12), ("cuda", H, N, 12), ("cuda", N, H, 12),
    ],
)  # fmt: skip
def test_a_master_that_the_graph_computes_with_is_counted_once(
    device: str, home: Tier, states_home: Tier, each: int
) -> None:
    half = plan(device, home, states_home).parameters
    single = [dataclasses.replace(p, bytes=4 * p.numel) for p in half]
    trained = sum(numel for name, numel in ELEMENTS.items() if name != "frozen")
    assert sum(states_bytes(p, device) for p in single) == each * trained
    assert sum(states_bytes(p, device) for p in half) == 12 * trained


def test_what_a_machine_without_drives_has_to_hold() -> None:
    fp32, bf16, frozen = (
        ParameterFacts("p", 10, nbytes, trains) for nbytes, trains in ((40, True), (20, True), (40, False))
    )
    assert in_memory_bytes((fp32, bf16, frozen), shared=True) == 120 + (20 + 120) + 40
    assert in_memory_bytes((fp32, bf16, frozen), shared=False) == (40 + 120) + (20 + 120) + 40
