"""Simulated against measured, where all rates are known: the real runtime with lanes that sleep.

    python benchmarks/paced_lanes.py [--rounds 3] [--save]

Reads, writes, copies, Adam and the model's layers do their work and then sleep until it has taken as long as a given
rate says, so that cores and drives of this machine do not matter, nor, much, who else uses them. What is left is who
waits for whom: the order of a step, which the simulator claims to know. Bar: each case within 15 % of the fastest of
the measured steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from report import arguments, at_least_one, finish, own_folder
from torch import nn
from torch.utils.flop_counter import register_flop_formula

import lohan_fx
from lohan_fx.hardware import HardwareProfile, NvmeProfile
from lohan_fx.meta import Cost
from lohan_fx.plan import Plan
from lohan_fx.planning import holding
from lohan_fx.runtime import adam
from lohan_fx.runtime.device_link import CpuLink
from lohan_fx.runtime.nvme_store import NvmeStore

READ, WRITE, LINK, ADAM = 60e6, 40e6, 100e6, 20e6
"""Bytes/s of the drive and the links, parameters/s of Adam's one thread: slow enough for sleeping to be exact."""
CORES = 1000
"""So many that none is short; a profile's rate of Adam is that of all of them."""
TURN_S = 0.002
LAYERS, WIDTH = 6, 512
MOST_ERROR = 0.15
MAX_NORM = 1e-3


class Pace:
    """Sleeps for work done; on the drive in turns, so that those who use it at the same time share it."""

    def __init__(self) -> None:
        self.on = False
        self._turns: deque[object] = deque()
        self._changed = threading.Condition()
        self._overslept = threading.local()

    def nap(self, seconds: float) -> None:
        """Sleep; what a nap takes too long is taken off the thread's next one."""
        wanted = seconds - getattr(self._overslept, "s", 0.0)
        begin_s = time.perf_counter()
        time.sleep(max(wanted, 0.0))
        self._overslept.s = min(0.02, time.perf_counter() - begin_s - wanted)

    def after(self, work: Callable[..., Any], seconds: Callable[..., float], *, turns: bool = False) -> Any:
        @functools.wraps(work)
        def paced(*args: Any) -> Any:
            result = work(*args)
            if self.on:
                (self._in_turns if turns else self.nap)(seconds(*args))
            return result

        return paced

    def _in_turns(self, seconds: float) -> None:
        while seconds > 0:
            turn = object()
            with self._changed:
                self._turns.append(turn)
                self._changed.wait_for(lambda turn=turn: self._turns[0] is turn)  # type: ignore[misc]
            self.nap(min(seconds, TURN_S))
            seconds -= TURN_S
            with self._changed:
                self._turns.popleft()
                self._changed.notify_all()


PACE = Pace()


@torch.library.custom_op("paced::pause", mutates_args=())
def pause(x: torch.Tensor, microseconds: int) -> torch.Tensor:
    if PACE.on:
        PACE.nap(microseconds * 1e-6)
    return x.clone()


@pause.register_fake
def _(x: torch.Tensor, microseconds: int) -> torch.Tensor:
    return torch.empty_like(x)


def _note(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.microseconds = inputs[1]


def _pause_backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
    return pause(gradient, 2 * ctx.microseconds), None


pause.register_autograd(_pause_backward, setup_context=_note)


@register_flop_formula(torch.ops.paced.pause)
def _pause_flops(x: Any, microseconds: int, *_: Any, **__: Any) -> int:
    """A FLOP per microsecond, by which ``pause_seconds`` knows the node again: real matmuls have more."""
    return microseconds


def pause_seconds(found: Cost) -> float:
    return found.flops * 1e-6 if found.flops < 1_000_000 else 0.0


class Layers(nn.Module):
    """Linear layers that take ``microseconds`` each."""

    def __init__(self, microseconds: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.microseconds = microseconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = pause(torch.tanh(layer(x)), self.microseconds)
        return x.square().mean()


@contextlib.contextmanager
def paced() -> Iterator[None]:
    """The runtime's work takes as long as the rates say, while ``PACE.on``."""

    def of_bytes(rate: float) -> Callable[..., float]:
        return lambda store, pieces, start, view, what: len(view) / rate

    def copied(link: object, destination: torch.Tensor, source: torch.Tensor, after: object = None) -> float:
        return source.numel() * source.element_size() / LINK

    with (
        mock.patch.object(NvmeStore, "read_pieces", PACE.after(NvmeStore.read_pieces, of_bytes(READ), turns=True)),
        mock.patch.object(NvmeStore, "write_pieces", PACE.after(NvmeStore.write_pieces, of_bytes(WRITE), turns=True)),
        mock.patch.object(CpuLink, "copy_in", PACE.after(CpuLink.copy_in, copied)),
        mock.patch.object(CpuLink, "copy_out", PACE.after(CpuLink.copy_out, copied)),
        mock.patch.object(adam, "update", PACE.after(adam.update, lambda o, n, master, *_: master.numel() / ADAM)),
    ):
        yield


def machine(directory: str) -> HardwareProfile:
    """The machine that ``paced`` makes of this one: nothing is short but what sleeps."""
    drive = NvmeProfile(directory, READ, WRITE, 2 / (1 / READ + 1 / WRITE), 1 << 40)
    return dataclasses.replace(
        HardwareProfile.preset("rtx4090-12xP5510"), name="paced", device="cpu", cpu_cores=CORES,
        memory_bytes_per_s=1e14, host_memory_bytes_per_s=1e14, h2d_bytes_per_s=LINK, d2h_bytes_per_s=LINK,
        adam_parameters_per_s=CORES * ADAM, host_memory_bytes=16 << 30, nvme=(drive,), machine=HardwareProfile.fingerprint(),
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    policy: str = "keep"
    microseconds: int = 60_000
    rows: int = 64
    windows: dict[str, int] = dataclasses.field(default_factory=dict)
    twice: float | None = None
    """Clipped, and this share of the updates made twice (docs/0036)."""

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.twice is None else torch.bfloat16


CASES = (
    Case("bound by compute", microseconds=150_000),
    Case("bound by the drive", microseconds=10_000),
    Case("balanced"),
    Case("swapped to NVMe", "swap-nvme", rows=512),
    Case("swapped to host", "swap-host", rows=512),
    Case("recomputed", "recompute"),
    Case("small chunks", windows={"chunk_elements": 32768}),
    Case("one staging buffer", windows={"io_bytes": 65536, "io_buffers": 1}),
    Case("no prefetch", windows={"fetch_bytes": 0, "gradient_bytes": 0}),
    *(Case(f"clipped, {share:.0%} updated twice", microseconds=70_000, twice=share) for share in (0.0, 0.5, 1.0)),
)


def planned(case: Case, hw: HardwareProfile, x: torch.Tensor) -> Plan:
    torch._dynamo.reset()
    with lohan_fx.releasing(lohan_fx.compile(Layers(case.microseconds), hw, **options(case))) as model:
        plan = lohan_fx.prepare(model, x)
    plan = plan if case.twice is None else holding.updated_twice(plan, case.twice)
    return dataclasses.replace(plan, windows=dataclasses.replace(plan.windows, **case.windows), prediction=None)


def options(case: Case) -> dict[str, Any]:
    holds = {} if case.twice is None else {"hold_gradients": True}
    return {"host_memory": "2GiB", "policy": case.policy, "compute_dtype": case.dtype, **holds}


def measured(case: Case, hw: HardwareProfile, rounds: int) -> tuple[float, lohan_fx.Simulation]:
    """Seconds of the fastest step, and the simulated one."""
    x = torch.randn(case.rows, WIDTH, dtype=case.dtype)
    plan = planned(case, hw, x)
    torch._dynamo.reset()
    with lohan_fx.releasing(lohan_fx.compile(Layers(case.microseconds), hw, plan=plan, **options(case))) as model:
        optimizer = lohan_fx.AdamW(model.parameters(), lr=1e-4, fused=True, accumulation_steps=1)

        def step() -> float:
            begin_s = time.perf_counter()
            model(x).backward()
            if case.twice is not None:
                lohan_fx.clip_grad_norm_(model, MAX_NORM)
            optimizer.step()
            taken_s = time.perf_counter() - begin_s
            optimizer.zero_grad()
            return taken_s

        step()
        PACE.on = True
        try:
            step()  # beside the next forward are updates at their pace
            seconds = min(step() for _ in range(rounds))
        finally:
            PACE.on = False
        return seconds, lohan_fx.simulate(model, hw=hw, node_seconds=pause_seconds)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--rounds", type=at_least_one, default=3)
    args = parser.parse_args()
    rows, figures, missed = [], [], []
    with own_folder(args), paced():
        hw = machine(str(args.nvme))
        for case in CASES:
            seconds, found = measured(case, hw, args.rounds)
            error = found.step_s / seconds - 1
            rows.append((case.name, f"measured {seconds:.3f} s, simulated {found.step_s:.3f} s, {error:+.1%}"))
            figures.append({"case": case.name, "measured_s": seconds, "simulated_s": found.step_s})
            if abs(error) > MOST_ERROR:
                missed.append(f"{case.name}: simulated {error:+.1%}, at most {MOST_ERROR:.0%}")
    finish("paced_lanes", rows, {"cases": figures}, missed, save=args.save)


if __name__ == "__main__":
    main()
