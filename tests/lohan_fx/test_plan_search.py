"""plan_search: windows for activations on their way are as wide as they pay, and graphs are scheduled anew for them."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from lohan_fx import plan_search
from lohan_fx.forecast import Asked, make_request
from lohan_fx.hardware import HardwareProfile
from lohan_fx.meta_capture import MetaCapture, meta_capture
from lohan_fx.model_families import Family, ModelDims, build
from lohan_fx.passes.halves import Halves
from lohan_fx.pipeline import plan_training, rewrites_of
from lohan_fx.plan import Plan, Swap
from lohan_fx.simulator import simulate

GIB = 1 << 30
GPU = HardwareProfile.preset("rtx4090-12xP5510")
DIMS = ModelDims("wide", Family.GPT2, 8, 4096, 32, "test", vocab=512, positions=1024, tied=True)
ASKED = Asked(GPU, host_memory_bytes=16 * GIB, device_memory_bytes=7 * GIB)


@pytest.fixture(scope="module")
def found() -> MetaCapture:
    tokens = {name: torch.zeros(16, 1024, dtype=torch.long) for name in ("input_ids", "labels")}
    return meta_capture(build(DIMS, None), tokens, compute_dtype=torch.bfloat16)


def planned(found: MetaCapture) -> tuple[Plan, float]:
    """The plan, and the seconds of a simulated step by it."""
    request = make_request(found, ASKED)
    halves, plan = plan_training(found.joint, request, num_outputs=found.num_outputs, parameters=found.parameters)
    return plan, simulate(halves, plan, request.hw).step_s


@pytest.fixture(scope="module")
def wide(found: MetaCapture) -> tuple[Plan, float]:
    return planned(found)


def test_what_comes_back_has_room_where_compute_would_wait_for_it(
    found: MetaCapture, wide: tuple[Plan, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, step_s = wide
    largest = max(a.bytes for a in plan.activations if isinstance(a.decision, Swap))
    monkeypatch.setattr(plan_search, "TIMES_LARGEST", ())
    narrow, narrow_s = planned(found)
    assert plan.windows.swap_in_bytes >= largest > narrow.windows.swap_in_bytes
    assert step_s < 0.95 * narrow_s


def names(halves: Halves) -> list[list[str]]:
    return [[node.name for node in gm.graph.nodes] for _, gm in halves.graphs()]


def test_graphs_scheduled_anew_are_those_of_their_plan(found: MetaCapture, wide: tuple[Plan, float]) -> None:
    plan, _ = wide
    narrow, wider = (
        dataclasses.replace(plan, windows=dataclasses.replace(plan.windows, fetch_bytes=room, swap_in_bytes=room))
        for room in (0, 4 * GIB)
    )
    given = found.joint, found.num_outputs, found.parameters
    rewrites = rewrites_of(*given)
    for asked in (narrow, wider, plan, narrow):
        assert names(rewrites.halves(asked)) == names(rewrites_of(*given).halves(asked))
    assert names(rewrites.halves(narrow)) != names(rewrites.halves(wider))
