"""Any mix of decisions, homes and windows trains to the same bits: nothing depends on the choice of a policy."""

from __future__ import annotations

import dataclasses
import functools
import random
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, given
from hypothesis import strategies as st

import lohan_fx
from lohan_fx.plan import Decision, Keep, OptimizerTiming, ParameterPlan, Plan, Recompute, Swap, Tier, Windows
from tests.end_to_end.models import GPT2, LLAMA, Case
from tests.end_to_end.recipes import assert_same, cpu_profile, plain, streamed
from tests.exhaustive import examples

DECISIONS: tuple[Decision, ...] = (Keep(), Swap(Tier.HOST), Swap(Tier.NVME), Recompute())
TIMINGS = (OptimizerTiming.IN_BACKWARD, OptimizerTiming.AFTER_BACKWARD, OptimizerTiming.NEXT_FORWARD)
WINDOW_BYTES = (0, 4096, 1 << 30)
STEPS = 3

plain_once = functools.cache(plain)


@pytest.mark.parametrize("case", [GPT2, LLAMA], ids=str)
@examples(6, phases=[Phase.explicit, Phase.generate])
@given(seed=st.integers(0, 2**32))
def test_a_random_mix_is_bit_equal_to_eager(case: Case, seed: int) -> None:
    torch._dynamo.reset()
    plan = _mixed(_base(case), random.Random(seed))
    with tempfile.TemporaryDirectory() as nvme:
        assert_same(streamed(case, cpu_profile(), Path(nvme), STEPS, plan=plan), plain_once(case, STEPS))


@functools.cache
def _base(case: Case) -> Plan:
    model = case.build()
    with tempfile.TemporaryDirectory() as nvme:
        lohan_fx.compile(model, cpu_profile(), nvme=nvme, compute_dtype=torch.float32, host_memory="2GiB")
        with lohan_fx.releasing(model):
            return lohan_fx.prepare(model, **case.batch())


def _mixed(base: Plan, draw: random.Random) -> Plan:
    decisions = {a.node: draw.choice(DECISIONS[: 3 if a.mandatory else 4]) for a in base.activations}
    assert len(set(decisions.values())) == 4
    plan = base.with_decisions(decisions)
    parameters = tuple(_moved(p, draw) for p in plan.parameters)
    return dataclasses.replace(plan, parameters=parameters, windows=_other(plan.windows, draw))


def _moved(parameter: ParameterPlan, draw: random.Random) -> ParameterPlan:
    """Updated on arrival, after the backward or beside the next forward."""
    moved = dataclasses.replace(
        parameter, home=draw.choice(list(Tier)), states_home=draw.choice([Tier.HOST, Tier.NVME])
    )
    if not parameter.trainable or (runs := draw.choice(TIMINGS)) is OptimizerTiming.IN_BACKWARD:
        return moved
    return dataclasses.replace(moved, optimizer_runs=runs, gradient_home=draw.choice([Tier.HOST, Tier.NVME]))


def _other(windows: Windows, draw: random.Random) -> Windows:
    return dataclasses.replace(
        windows,
        fetch_bytes=draw.choice(WINDOW_BYTES),
        swap_in_bytes=draw.choice(WINDOW_BYTES),
        gradient_bytes=draw.choice(WINDOW_BYTES[:2]),
        chunk_elements=draw.choice([4096, 8192, 1 << 20]),
        io_bytes=draw.choice([4096, 1 << 20]),
        io_buffers=draw.choice([1, 4]),
        optimizer_buffers=draw.choice([2, 4]),
        gradient_buffers=draw.choice([1, 4]),
        swap_out_bytes=draw.choice(WINDOW_BYTES),
    )
