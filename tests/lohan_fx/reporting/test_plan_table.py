"""The tables of a plan, against a golden text."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from lohan_fx.plan import (
    ActivationPlan,
    Decision,
    Division,
    Keep,
    OptimizerTiming,
    ParameterPlan,
    Plan,
    Prediction,
    Recompute,
    Share,
    Stage,
    Swap,
    Tier,
    Use,
    Windows,
)
from lohan_fx.planning.disk_space import disk_bytes
from lohan_fx.reporting.plan_table import plan_summary, plan_table, ranges, table


def activation(node: str, op: str, layer: int, nbytes: int, flops: int, decision: Decision) -> ActivationPlan:
    return ActivationPlan(node, op, f"h.{layer}", "Block", nbytes, flops, decision, mandatory=op == "aten.add")


def parameter(name: str, numel: int, home: Tier, states_home: Tier | None) -> ParameterPlan:
    runs = OptimizerTiming.NONE if states_home is None else OptimizerTiming.IN_BACKWARD
    return ParameterPlan(name, "", numel, 2 * numel, states_home is not None, home, states_home, runs)


def example() -> Plan:
    return Plan(
        policy="lohan",
        device="cuda",
        compute_dtype="bfloat16",
        host_memory_bytes=6 << 30,
        device_memory_bytes=22 << 30,
        activations=(
            *(activation(f"mm_{n}", "aten.mm", n, 64 << 20, 10**12, Swap(Tier.NVME)) for n in range(3)),
            activation("mm_3", "aten.mm", 3, 64 << 20, 10**12, Swap(Tier.HOST)),
            *(activation(f"gelu_{n}", "aten.gelu", n, 64 << 20, 0, Recompute()) for n in range(4)),
            *(activation(f"add_{n}", "aten.add", n, 16 << 20, 0, Keep()) for n in range(4)),
            ActivationPlan("loss", "aten.mean", "", "Loss", 0, 0, Keep()),
        ),
        parameters=(
            parameter("wte.weight", 10**6, Tier.NVME, None),
            *(parameter(f"h.{n}.fc.weight", 10**7, Tier.HOST if n == 2 else Tier.NVME, Tier.NVME) for n in range(4)),
            *(parameter(f"h.{n}.fc.bias", 10**3, Tier.DEVICE, Tier.HOST) for n in range(4)),
        ),
        windows=Windows(
            fetch_bytes=40_000_000,
            swap_in_bytes=64 << 20,
            gradient_bytes=20_000_000,
            chunk_elements=1 << 20,
            io_bytes=4 << 20,
            io_buffers=4,
            optimizer_buffers=3,
            gradient_buffers=3,
            swap_out_bytes=64 << 20,
        ),
        prediction=Prediction(
            forward=Stage({"compute": 0.5, "ssd": 0.25}),
            backward=Stage({"compute": 1.5, "ssd": float("inf")}),
            peak_bytes={"device": 20 << 30, "host": 5 << 30},
            nvme_read_bytes=10**9,
            nvme_write_bytes=2 * 10**9,
            flops=12 * 10**12,
            recompute_flops=0,
        ),
        notes=("made by hand",),
        division=Division(
            shares=(
                Share(Tier.DEVICE, Use.GRAPHS, 4 << 30, 0.0),
                Share(Tier.DEVICE, Use.ACTIVATIONS, 64 << 20, 0.125),
                Share(Tier.DEVICE, Use.FREE, 18 << 30, 0.0),
                Share(Tier.HOST, Use.STAGING, 200 << 20, 0.0),
                Share(Tier.HOST, Use.STATES, 5 << 30, float("inf")),
            ),
            per_byte_s={"device": 0.0, "host": 2**-32},
            step_s=1.5,
            walk_s=1.75,
            bound_s=1.4925,
        ),
    )


def test_the_tables_of_a_plan(check_golden: Callable[[str, str], None]) -> None:
    check_golden("plan_table", plan_table(example()) + "\n")


def test_a_cpu_shares_its_memory_with_the_device() -> None:
    assert "host 6.00 GiB (the device's memory is part of it)" in plan_table(
        dataclasses.replace(example(), device="cpu")
    )


def test_a_plan_without_anything_is_printed_too() -> None:
    text = plan_table(
        dataclasses.replace(example(), activations=(), parameters=(), prediction=None, notes=(), division=None)
    )
    assert "activations" not in text
    assert "predicted" not in text
    assert text.splitlines()[-1].split() == ["all", "0", "0", "0", "B"]


@pytest.mark.parametrize(
    ("checkpoints", "said"),
    [
        (0, "; each checkpoint that is kept takes 536 MiB more"),
        (1, ", 536 MiB more for the last checkpoint"),
        (3, ", 1.57 GiB more for the last 3 checkpoints"),
    ],
)
def test_what_is_on_disk_is_said_before_it_is_taken(checkpoints: int, said: str) -> None:
    """Of 40,004,000 trained parameters 14 bytes each, of a frozen million 2; three activations of 64 MiB are swapped."""
    line = f"disk: 536 MiB for parameters and states, 192 MiB for activations and gradients{said}"
    assert line in plan_table(example(), checkpoints).splitlines()
    assert line in plan_summary(example(), checkpoints).splitlines()
    states_bytes = 14 * 40_004_000 + 2 * 10**6
    assert disk_bytes(example(), checkpoints) == (1 + checkpoints) * states_bytes + 3 * (64 << 20)


def test_activations_are_on_disk_once_for_each_forward_that_waits() -> None:
    plan = dataclasses.replace(example(), forwards=3)
    assert disk_bytes(plan) == disk_bytes(example()) + 2 * 3 * (64 << 20)
    assert "536 MiB for parameters and states, 576 MiB for activations and gradients" in plan_summary(plan)


def test_a_float32_master_that_the_graph_computes_with_is_summed_once() -> None:
    """All states are on NVMe: of three parameters that are there, too, 8 bytes an element, of one in host memory 12."""
    single = (dataclasses.replace(p, bytes=4 * p.numel) for p in example().parameters if p.numel == 10**7)
    rows = plan_summary(dataclasses.replace(example(), parameters=tuple(single))).splitlines()
    sums = {row.split()[0]: " ".join(row.split()[1:]) for row in rows[-2:]}
    assert sums == {
        "parameters": "153 MiB 38.1 MiB on host, 114 MiB on nvme",
        "states": "343 MiB 343 MiB on nvme",
    }


def test_counts_and_bytes_add_up() -> None:
    rows = plan_table(example()).splitlines()
    total = next(row for row in rows if row.startswith("  all") and "(" in row)
    assert total.split()[:2] == ["all", "13"]
    assert "5 (64.0 MiB)" in total  # kept
    assert "1 (64.0 MiB)" in total  # swapped to host
    assert "3 (192 MiB)" in total  # swapped to NVMe
    assert "4 (256 MiB)" in total  # recomputed


@pytest.mark.parametrize(
    ("numbers", "text"), [([], ""), ([3], "3"), ([0, 1, 2], "0-2"), ([0, 1, 4, 6, 7], "0-1,4,6-7")]
)
def test_ranges(numbers: list[int], text: str) -> None:
    assert ranges(numbers) == text


def test_columns_are_aligned() -> None:
    assert table(["name", "n"], [["a", "100"], ["longer", "1"]], left=(0,)) == [
        "name      n",
        "a       100",
        "longer    1",
    ]
