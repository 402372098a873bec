"""lane_jobs: how many jobs a parameter and an activation make, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lohan_fx import ops
from lohan_fx.passes.lane_jobs import jobs_of_parameter, jobs_of_transfer
from lohan_fx.passes.traffic import fetch_counts, traffic
from lohan_fx.plan import OptimizerTiming, ParameterPlan, Swap, Tier
from tests.passes.graphs import WINDOWS, captured, flops_as_seconds, plan_for, rewrite

ROOM = replace(WINDOWS, io_bytes=8192, chunk_elements=4096)
NOW, AFTER, NEXT = OptimizerTiming.IN_BACKWARD, OptimizerTiming.AFTER_BACKWARD, OptimizerTiming.NEXT_FORWARD
ON_NVME = ParameterPlan("weight", "", 10_000, 20_000, True, Tier.NVME, Tier.NVME, NOW)
"""Three transfers of 8 KiB, three chunks of 4096 elements."""


@pytest.mark.parametrize(
    ("changes", "fetches", "runs", "expected"),
    [
        ({}, (1, 0), NOW, (6, 3 * (2 + 5))),  # reads and copies; off the device, updates, two reads and three writes
        ({}, (2, 1), AFTER, (12, 6)),  # the last gradient: nothing is launched beside it
        ({"home": Tier.HOST, "states_home": Tier.HOST}, (1, 1), NOW, (1, 1 + 3 * 2)),
        ({"home": Tier.DEVICE, "states_home": Tier.HOST}, (1, 1), NOW, (0, 3 * 2)),
        ({"home": Tier.DEVICE, "states_home": Tier.DEVICE}, (1, 1), NOW, (0, 0)),
        ({"trainable": False}, (1, 1), NOW, (6, 6)),
        ({"optimizer_runs": NEXT, "gradient_home": Tier.HOST}, (1, 1), NEXT, (6 + 3 * 6, 6 + 3 * 2)),
        ({"optimizer_runs": NEXT, "gradient_home": Tier.NVME}, (1, 1), NEXT, (6 + 3 * 7, 6 + 3 * 3)),
        ({"optimizer_runs": AFTER, "gradient_home": Tier.HOST}, (1, 1), AFTER, (6, 6 + 3 * 2)),
        (
            {"optimizer_runs": NEXT, "gradient_home": Tier.NVME, "updated_twice": True},
            (1, 1),
            NEXT,
            (6 + 3 * 5, 6 + 3 * 3 + 3 * 6),
        ),
    ],
)  # fmt: skip
def test_jobs_of_a_parameter(
    changes: dict[str, object], fetches: tuple[int, int], runs: OptimizerTiming, expected: tuple[int, int]
) -> None:
    assert jobs_of_parameter(replace(ON_NVME, **changes), fetches, runs, ROOM) == expected


def test_an_activation_is_one_copy_to_host_memory_and_two_jobs_a_piece_to_nvme() -> None:
    assert [jobs_of_transfer(20_000, tier, ROOM) for tier in (Tier.DEVICE, Tier.HOST, Tier.NVME)] == [0, 1, 6]


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.NVME])
def test_a_step_has_those_of_its_parameters_and_activations(tier: Tier) -> None:
    found = captured("two-layers")
    plan = replace(plan_for(found, Swap(tier)), device="cuda")
    halves = rewrite(found, plan)
    done = traffic(halves, plan, flops_as_seconds)
    swaps = len(halves.forward.graph.find_nodes(op="call_function", target=ops.SWAP_OUT))
    fetched = [sum(times) for times in zip(*fetch_counts(halves).values(), strict=True)]
    each = 1 if tier is Tier.HOST else 2
    # Of three parameters, each of one chunk, two have gradients that come last.
    assert done.forward_jobs == 2 * fetched[0] + each * swaps
    assert done.backward_jobs == 2 * fetched[1] + each * swaps + 2 + 4
    assert (done.forward_launches, done.backward_launches) == (5, 9)
    on_cpu = traffic(halves, replace(plan, device="cpu"), flops_as_seconds)
    assert (on_cpu.forward_jobs, on_cpu.backward_jobs, on_cpu.forward_launches) == (0, 0, 0)
