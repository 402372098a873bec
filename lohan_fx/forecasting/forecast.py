"""forecast: what training a model on a machine will be like, before there is either."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from lohan_fx import meta
from lohan_fx.cost import Work
from lohan_fx.errors import InfeasiblePlan, NoDrive
from lohan_fx.forecasting.meta_capture import MetaCapture
from lohan_fx.hardware import HardwareProfile
from lohan_fx.pipeline import plan_training
from lohan_fx.plan import Plan, Prediction, Stage, Tier
from lohan_fx.planning.budgets import (
    UNLIMITED_SHARE,
    choose_windows,
    default_host_memory_bytes,
    make_budgets,
    mean_request_bytes,
    threads_bytes,
)
from lohan_fx.planning.disk_space import capacity_bytes, disk_bytes, endurance_bytes, stored_bytes
from lohan_fx.planning.memory_model import in_memory_bytes, lowest_tier
from lohan_fx.planning.predict import work_of
from lohan_fx.policies import named
from lohan_fx.request import Request
from lohan_fx.simulation.simulator import Simulation, simulate
from lohan_fx.units import format_bytes

YEAR_S = 365 * 86400
ENDURANCE_WRITES = 5 * 365
"""Times that a drive can be written in full: once a day for five years, what data-centre drives such as the P5510 are
rated for. Consumer drives are rated for about a third of it."""
PRICE_YEARS = 3
"""Years of uninterrupted use that a machine's price is spread over; power is left out."""


@dataclass(frozen=True)
class Asked:
    """What a forecast is for, the model aside. ``*_memory_bytes``: None for most of what the machine has. ``clipping``: by
    the global norm, for which all gradients wait, as they do for the loss scale of fp16. ``checkpoints``: how many are kept.
    ``forwards``: how many wait for their backwards at once. ``loss_only``: as of ``compile``.
    ``notes``: what the user should know of ``hw``."""

    hw: HardwareProfile
    policy: str = "lohan"
    host_memory_bytes: int | None = None
    device_memory_bytes: int | None = None
    compute_dtype: torch.dtype = torch.bfloat16
    simulated: bool = True
    clipping: bool = False
    checkpoints: int = 0
    forwards: int = 1
    loss_only: bool = False
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Subject:
    """A captured model with what a step of it counts. ``could_be_lean``: it takes a loss that ``with_lean_loss`` would take in
    pieces. ``notes``: what the user should know of the model."""

    name: str
    capture: MetaCapture
    samples: int
    tokens: int
    unit: str
    could_be_lean: bool = False
    notes: tuple[str, ...] = ()

    @property
    def parameters(self) -> int:
        return sum(fact.numel for fact in self.capture.facts)


@dataclass(frozen=True)
class Forecast:
    """A plan that fits, and what follows from it. ``work``: what a step does; ``forward_flops``: of its forward."""

    subject: Subject
    asked: Asked
    plan: Plan
    simulation: Simulation | None
    work: Work
    forward_flops: int

    @property
    def prediction(self) -> Prediction:
        assert self.plan.prediction is not None, "a forecast's plan has its prediction"
        return self.plan.prediction

    @property
    def step_s(self) -> float:
        """By formula."""
        return self.prediction.step_s

    @property
    def expected_s(self) -> float:
        """What a step is expected to take, which throughput, wear and costs are by: as simulated, where it was."""
        return self.step_s if self.simulation is None else self.simulation.step_s

    @property
    def tokens_per_s(self) -> float:
        return self.subject.tokens / self.expected_s

    @property
    def samples_per_s(self) -> float:
        return self.subject.samples / self.expected_s

    @property
    def units_per_s(self) -> float:
        """Tokens where the model has them, else samples."""
        return self.tokens_per_s if self.subject.unit == "tokens" else self.samples_per_s

    @property
    def flops_per_s(self) -> float:
        """Of the model's own work: what is recomputed does not count."""
        return self.prediction.flops / self.expected_s

    @property
    def stages(self) -> dict[str, Stage]:
        found = {"forward": self.prediction.forward, "backward": self.prediction.backward}
        return found | ({"optimizer": self.prediction.optimizer} if self.prediction.optimizer.lanes_s else {})

    @property
    def disk_bytes(self) -> int:
        """What the store allocates: masters, moments and copies of all parameters, once more for each checkpoint that is kept,
        and the activations and gradients that wait there."""
        return disk_bytes(self.plan, self.asked.checkpoints)

    @property
    def wear_years(self) -> float | None:
        """Years of uninterrupted training until the first drive has been written as often as it is rated for."""
        if not self.prediction.nvme_write_bytes or not self.asked.hw.nvme:
            return None
        written_bytes_per_s = self.prediction.nvme_write_bytes / self.expected_s
        return endurance_bytes(self.asked.hw, ENDURANCE_WRITES) / written_bytes_per_s / YEAR_S

    @property
    def machine_usd(self) -> float | None:
        prices = self.asked.hw.prices
        return None if prices is None else prices.server_usd + prices.gpu_usd + prices.ssd_usd * len(self.asked.hw.nvme)

    @property
    def usd_per_million(self) -> float | None:
        """Per million tokens, or samples where the model has no tokens."""
        if self.machine_usd is None:
            return None
        return self.machine_usd / (PRICE_YEARS * YEAR_S) / self.units_per_s * 1e6

    @property
    def notes(self) -> tuple[str, ...]:
        """What the numbers do not say by themselves."""
        return (*self.subject.notes, *self.subject.capture.notes, *self.plan.notes, *notes_on(self.asked))

    @property
    def lowest_tier(self) -> Tier:
        """The slowest tier that the plan needs."""
        return lowest_tier(self.plan)


def notes_on(asked: Asked) -> list[str]:
    """Of a question: its own, that it asks for more than there is, and what a step is."""
    hw, notes = asked.hw, list(asked.notes)
    for tier, promised, there_is in (
        ("host", asked.host_memory_bytes, hw.host_memory_bytes),
        ("device", asked.device_memory_bytes, hw.device_memory_bytes),
    ):
        if promised is not None and promised > there_is:
            notes.append(
                f"{tier}_memory={format_bytes(promised)} is more than {hw.name!r} has, which is {format_bytes(there_is)}"
            )
    if asked.forwards > 1:
        notes.append(
            f"memory is for {asked.forwards} forwards whose backwards wait; seconds and traffic are those of a step with one "
            "forward and its backward"
        )
    return notes


def forecast(subject: Subject, asked: Asked) -> Forecast:
    """Plan ``subject`` and say what follows.

    Raises ``InfeasiblePlan`` where no plan fits the memory, and ``ValueError`` for an unknown policy, where the plan
    needs a drive and the profile has none, and where the drives are too small.
    """
    named(asked.policy)
    request = make_request(subject.capture, asked)
    try:
        with libraries_silenced():
            halves, plan = plan_training(
                subject.capture.joint,
                request,
                num_outputs=subject.capture.num_outputs,
                parameters=subject.capture.parameters,
            )
    except InfeasiblePlan as error:
        needs = "" if asked.hw.nvme or isinstance(error, NoDrive) else _beside_states(request)
        error.args = (_with_what_there_is(str(error), asked.hw) + needs,)
        raise
    _check_drives(plan, asked)
    if why_not := named(asked.policy).why_not:
        plan = dataclasses.replace(
            plan, notes=(*plan.notes, f"{asked.policy} is planned and simulated only: {why_not}")
        )
    simulation = simulate(halves, plan, asked.hw) if asked.simulated else None
    forward_flops = sum(meta.cost(node).flops for node in halves.forward.graph.nodes)
    return Forecast(subject, asked, plan, simulation, work_of(halves, plan, request), forward_flops)


def _with_what_there_is(why: str, hw: HardwareProfile) -> str:
    """``why``, with what the machine has beside each promise that it cannot keep."""
    there_is = {"host": hw.host_memory_bytes, "device": hw.device_memory_bytes}

    def said(found: re.Match[str]) -> str:
        most = there_is[found[1]]
        beyond = int(found[2].replace(",", "")) > most
        return found[0] + (f", and {hw.name!r} has {format_bytes(most)}" if beyond else "")

    return re.sub(r"(host|device)_memory=([\d,]+) would fit", said, why)


def _beside_states(request: Request) -> str:
    """What promises that hold a plan hold only with a drive, where there is none."""
    nbytes = in_memory_bytes(request.parameters, shared=request.budgets.shared)
    return f"; {request.hw.name!r} has no drive: parameters and states, {nbytes:,} bytes, have to fit beside that"


@contextlib.contextmanager
def libraries_silenced() -> Iterator[None]:
    """Within, what C code and a user's model print goes to stderr: HiGHS at times prints a line that would end up in
    ``--json``."""
    sys.stdout.flush()
    libc = ctypes.CDLL(None)
    before = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        sys.stdout.flush()
        libc.fflush(None)  # C has a buffer of its own, which would be written after the descriptor is back
        os.dup2(before, 1)
        os.close(before)


def make_request(capture: MetaCapture, asked: Asked) -> Request:
    """What ``compile`` would ask the pipeline for on the machine of ``asked``, wherever this runs."""
    hw = asked.hw
    here = hw.is_this_machine()
    most = default_host_memory_bytes(hw) if here else int(hw.host_memory_bytes * UNLIMITED_SHARE)
    host = asked.host_memory_bytes or most
    windows_of = functools.partial(
        choose_windows, parameters=capture.facts, shared=hw.device == "cpu", drives=max(1, len(hw.nvme))
    )
    windows = windows_of(host)
    kernels_bytes = threads_bytes(hw, torch.get_num_threads() if here else hw.cpu_cores)
    return Request(
        hw=hw.at_requests(mean_request_bytes(capture.facts, windows)),
        policy=asked.policy,
        compute_dtype=str(asked.compute_dtype).removeprefix("torch."),
        matmul_rate=hw.matmul_rate(asked.compute_dtype),
        parameters=capture.facts,
        budgets=make_budgets(
            hw, host, asked.device_memory_bytes, windows, len(capture.facts), kernels_bytes, windows_of
        ),
        windows=windows,
        plan=None,
        chooses_sizes=True,
        holds=asked.clipping or asked.compute_dtype is torch.float16,
        windows_of=windows_of,
        forwards=asked.forwards,
        loss_only=asked.loss_only,
    )


def _check_drives(plan: Plan, asked: Asked) -> None:
    hw = asked.hw
    needed = disk_bytes(plan, asked.checkpoints)
    if not hw.nvme:
        if asked.checkpoints:
            raise ValueError(
                f"checkpoints are kept on NVMe, {needed:,} bytes with the states, and the hardware profile {hw.name!r} has no "
                "drive: choose a profile with drives, or no checkpoints"
            )
        if lowest_tier(plan) is not Tier.NVME:
            return
        raise ValueError(
            f"policy {plan.policy!r} puts {needed:,} bytes on NVMe, and the hardware profile {hw.name!r} has no drive: "
            "choose a profile with drives, or a policy that stays in memory, or a smaller model"
        )
    if needed > capacity_bytes(hw)[0]:
        raise ValueError(
            f"the model needs {needed:,} bytes of disk{_for_checkpoints(plan, asked)}, and the {len(hw.nvme)} drives of "
            f"{hw.name!r} have {_too_little(hw, needed)}, or choose a smaller model"
        )


def _too_little(hw: HardwareProfile, needed: int) -> str:
    """What the drives have, what is missing, and which drives would hold it."""
    (capacity, first), there_are = capacity_bytes(hw), sum(drive.capacity_bytes for drive in hw.nvme)
    short, missing = hw.nvme[first], needed - capacity
    more = -(-missing // short.capacity_bytes)
    if capacity == there_are:
        return f"{capacity:,}: {missing:,} bytes are missing; {more} more drives like these would hold it"
    name = short.directory or f"nvme {first + 1}"
    others = dataclasses.replace(hw, nvme=(*hw.nvme[:first], *hw.nvme[first + 1 :]))
    alone = ", and so would the others without it" if capacity_bytes(others)[0] >= needed else ""
    return (
        f"{there_are:,}, of which a store striped by their bandwidths fills {capacity:,} until {name} is full: {missing:,} bytes "
        f"are missing; {more} more drives like {name} would hold it{alone}"
    )


def _for_checkpoints(plan: Plan, asked: Asked) -> str:
    """How much of the disk is for checkpoints, which a smaller ``checkpoints`` would not take."""
    if not asked.checkpoints:
        return ""
    return f" ({asked.checkpoints * stored_bytes(plan):,} of them for checkpoints={asked.checkpoints})"
