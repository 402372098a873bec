"""Every policy that runs gives plain PyTorch's numbers, decides on real graphs as its paper does, and moves what it says."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import lohan_fx
from lohan_fx.compile import compiled
from lohan_fx.forecasting.forecast import Asked, make_request
from lohan_fx.forecasting.meta_capture import MetaCapture, meta_capture
from lohan_fx.hardware import HardwareProfile
from lohan_fx.pipeline import plan_training
from lohan_fx.plan import OptimizerTiming, Plan, Recompute, Swap, Tier
from lohan_fx.policies import ALL, FORCED
from tests.end_to_end.models import GPT2, GPT2_SHALLOW, LLAMA, Case
from tests.end_to_end.recipes import LR, Run, assert_same, plain, train, weights_of
from tests.exhaustive import some_of

pytestmark = pytest.mark.usefixtures("leak_check", "little_is_small")

STEPS = 3
PAGE_BYTES = 4096
LANES = ("h2d", "d2h", "ssd", "cpu")
RUNNABLE = [policy.name for policy in ALL if policy.runs and policy not in FORCED]

DEVICE_SHARE = {
    "lohan": 0.85,
    "lohan-naive": 0.85,
    "lohan-zero": 0.85,
    "lohan-cpuact": 0.85,
    "lohan-cap": 0.6,
    "flashneuron": 0.8,
    "capuchin": 0.8,
    "checkmate": 0.85,
    "str": 0.93,
    "superneurons": 0.965,
}
"""Of what the policy takes where there is plenty, on GPT-2: without less it would do nothing else than keep."""

D, H, N = Tier.DEVICE, Tier.HOST, Tier.NVME
KEEPS, TO_HOST, TO_NVME, AGAIN = "keep", "swap:host", "swap:nvme", "recompute"
DOES: dict[str, tuple[tuple[Tier, Tier, Tier | None], set[str]]] = {
    "lohan-cpuact": ((N, N, None), {KEEPS, TO_HOST, AGAIN}),
    "lohan-ds": ((N, N, None), {TO_HOST, AGAIN}),
    "lohan-cap": ((N, N, None), {KEEPS, TO_HOST}),
    "lohan-g10": ((N, N, None), {KEEPS, TO_NVME}),
    "lohan-cm": ((N, N, None), {TO_HOST}),
    "fuyou": ((N, N, None), {TO_NVME, AGAIN}),
    "fuyou-no-overlap": ((N, N, N), {TO_NVME, AGAIN}),
    "zero-infinity": ((N, N, N), {TO_HOST, AGAIN}),
    "zero-offload": ((H, H, H), {TO_HOST, AGAIN}),
    "gemini": ((H, N, H), {KEEPS, AGAIN}),
    "l2l": ((H, H, H), {TO_HOST, AGAIN}),
    "stronghold": ((H, H, None), {TO_HOST}),
    "flashneuron": ((D, D, D), {KEEPS, TO_NVME}),
    "capuchin": ((D, D, D), {KEEPS, TO_HOST}),
    "checkmate": ((D, D, D), {KEEPS, AGAIN}),
    "str": ((D, D, D), {KEEPS, TO_HOST, AGAIN}),
    "vdnn": ((D, D, D), {KEEPS, TO_HOST}),
    "superneurons": ((D, D, D), {KEEPS, TO_HOST, AGAIN}),
}
"""Homes of large parameters, their states and waiting gradients; what may happen to large activations that are read, of
which swaps do happen on GPT-2. LoHan's own search is free to do anything."""

OFTEN = {"gpt2": RUNNABLE, "llama": ["zero-infinity", "gemini", "flashneuron", "str"]}
"""What is usually tried."""

plain_once = functools.cache(plain)


@dataclass(frozen=True)
class Moved:
    """A run, what its last step read from and wrote to NVMe in whole pages, and what each lane moved, as the runtime counts
    and as simulated."""

    run: Run
    read_bytes: int
    written_bytes: int
    lanes_bytes: dict[str, int]
    simulated_bytes: dict[str, int]


def streamed(case: Case, hw: HardwareProfile, nvme: Path, policy: str, device_memory: int | None = None) -> Moved:
    model = case.build()
    options: dict[str, Any] = {"host_memory": "2GiB", "device_memory": device_memory, "policy": policy}
    with lohan_fx.releasing(lohan_fx.compile(model, hw, nvme=nvme, compute_dtype=torch.float32, **options)):
        optimizer = lohan_fx.AdamW(model.parameters(), lr=LR)
        losses = train(model, optimizer, case, STEPS - 1)
        store, timeline = compiled(model).engine.store, compiled(model).engine.timeline
        before, totals = (store.bytes_read, store.bytes_written), timeline.snapshot()
        losses += train(model, optimizer, case, 1, seed=None)
        read, written = store.bytes_read - before[0], store.bytes_written - before[1]
        moved, simulated = timeline.snapshot().since(totals).bytes, lohan_fx.simulate(model).bytes
        plan = compiled(model).plans[-1]
    lanes = {lane: moved.get(lane, 0) for lane in LANES}
    return Moved(Run(losses, weights_of(model), plan), read, written, lanes, {lane: simulated[lane] for lane in LANES})


@pytest.mark.parametrize(
    ("case", "policy"),
    [
        pytest.param(case, policy, id=f"{case}-{policy}")
        for case in (GPT2, LLAMA)
        for policy in some_of(RUNNABLE, OFTEN[case.name])
    ],
)
def test_policies_are_bit_equal_to_eager_and_move_what_they_predict(
    case: Case, policy: str, hw: HardwareProfile, tmp_path: Path
) -> None:
    device_memory = _less(hw, policy) if case is GPT2 and policy in DEVICE_SHARE else None
    found = streamed(case, hw, tmp_path, policy, device_memory)
    assert_same(found.run, plain_once(case, STEPS))
    plan = found.run.plan
    assert plan is not None and plan.prediction is not None
    assert found.read_bytes == plan.prediction.nvme_read_bytes
    assert found.written_bytes == plan.prediction.nvme_write_bytes
    assert found.lanes_bytes == found.simulated_bytes
    assert plan.policy == policy
    if policy in DOES:
        homes, ways = DOES[policy]
        assert _homes(plan) == {homes}
        done = _large_decisions(plan)
        assert done <= ways
        assert done >= ways & {TO_HOST, TO_NVME} or case is not GPT2


def _less(hw: HardwareProfile, policy: str) -> int:
    """Device memory at which ``policy`` has to do something on GPT-2."""
    found = _captured_once()
    asked = Asked(hw, policy=policy, compute_dtype=torch.float32, host_memory_bytes=2 << 30)
    request = make_request(found, asked)
    _, plan = plan_training(found.joint, request, num_outputs=found.num_outputs, parameters=found.parameters)
    assert plan.prediction is not None
    return int(plan.prediction.peak_bytes["device"] * DEVICE_SHARE[policy])


@functools.cache
def _captured_once() -> MetaCapture:
    return meta_capture(GPT2.build(), GPT2.batch(), compute_dtype=torch.float32)


def _homes(plan: Plan) -> set[tuple[Tier, Tier | None, Tier | None]]:
    return {(p.home, p.states_home, p.gradient_home) for p in plan.parameters if p.numel > 256}


def _large_decisions(plan: Plan) -> set[str]:
    """What happens to activations worth a transfer. Where nothing is computed again, the dropped ones are not read."""
    assert plan.prediction is not None
    large = {str(a.decision) for a in plan.activations if a.bytes >= PAGE_BYTES}
    return large if plan.prediction.recompute_flops else large - {str(Recompute())}


def test_the_naive_handler_has_one_buffer_and_the_optimizer_stage_is_in_the_prediction(
    hw: HardwareProfile, tmp_path: Path
) -> None:
    naive = streamed(GPT2_SHALLOW, hw, tmp_path, "lohan-naive", 250_000).run.plan
    assert naive is not None and naive.windows.optimizer_buffers == 1
    torch._dynamo.reset()
    late = streamed(GPT2_SHALLOW, hw, tmp_path, "lohan-zero", 250_000).run.plan
    assert naive.prediction is not None and late is not None and late.prediction is not None
    assert {lane for lane, seconds in late.prediction.optimizer.lanes_s.items() if seconds} == {"ssd", "cpu"}
    # Of the naive one only the last gradient's updates come after the backward.
    assert 0 < naive.prediction.optimizer.lanes_s["ssd"] < late.prediction.optimizer.lanes_s["ssd"] / 2
    assert {p.optimizer_runs for p in late.parameters} == {OptimizerTiming.AFTER_BACKWARD}
    assert not any(isinstance(a.decision, Swap) and a.decision.tier is Tier.DEVICE for a in late.activations)


@pytest.mark.parametrize("policy", ["zero-infinity", "zero-offload", "vdnn", "lohan-naive"])
def test_accumulated_gradients_are_those_of_eager(policy: str, hw: HardwareProfile, tmp_path: Path) -> None:
    """Two, three, two micro-batches: a policy that updates after the backward need not know how many."""
    counts = (2, 3, 2) if policy != "lohan-naive" else (2, 2, 2)
    expected_model = GPT2_SHALLOW.build()
    adam = torch.optim.AdamW(expected_model.parameters(), lr=LR)
    expected = Run(_accumulate(expected_model, adam, counts), weights_of(expected_model))
    model = GPT2_SHALLOW.build()
    options: dict[str, Any] = {"host_memory": "2GiB", "compute_dtype": torch.float32, "policy": policy}
    with lohan_fx.releasing(lohan_fx.compile(model, hw, nvme=tmp_path, **options)):
        losses = _accumulate(model, lohan_fx.AdamW(model.parameters(), lr=LR), counts)
    assert_same(Run(losses, weights_of(model)), expected)


def _accumulate(model: Any, optimizer: Any, counts: Iterable[int]) -> list[float]:
    torch.manual_seed(1)
    losses = []
    for count in counts:
        for _ in range(count):
            loss = model(**GPT2_SHALLOW.batch()).loss
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("policy", ["zero-infinity", "zero-offload", "vdnn"])
def test_after_the_backward_nothing_is_decided_yet(policy: str, hw: HardwareProfile, tmp_path: Path) -> None:
    """Gradients may be dropped, and the learning rate changed, between backward and step; both as in eager."""
    expected_model = GPT2_SHALLOW.build()
    adam = torch.optim.AdamW(expected_model.parameters(), lr=LR)
    expected = Run(_hesitate(expected_model, adam), weights_of(expected_model))
    model = GPT2_SHALLOW.build()
    options: dict[str, Any] = {"host_memory": "2GiB", "compute_dtype": torch.float32, "policy": policy}
    with lohan_fx.releasing(lohan_fx.compile(model, hw, nvme=tmp_path, **options)):
        losses = _hesitate(model, lohan_fx.AdamW(model.parameters(), lr=LR))
    assert_same(Run(losses, weights_of(model)), expected)


def _hesitate(model: Any, optimizer: Any) -> list[float]:
    torch.manual_seed(1)
    losses = []
    for step in range(4):
        loss = model(**GPT2_SHALLOW.batch()).loss
        loss.backward()
        losses.append(loss.item())
        if step == 2:
            optimizer.zero_grad()
            continue
        optimizer.param_groups[0]["lr"] = LR / (step + 1)
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("policy", [policy.name for policy in ALL if not policy.runs])
def test_what_cannot_run_is_refused_with_its_reason(policy: str, hw: HardwareProfile, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"policy '{policy}' is planned and simulated only: it(s optimizer| is asyn)"):
        lohan_fx.compile(GPT2_SHALLOW.build(), hw, nvme=tmp_path, policy=policy)
