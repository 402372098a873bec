"""request: what a captured graph is to be compiled for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from lohan_fx import cost, inductor
from lohan_fx.hardware import HardwareProfile
from lohan_fx.meta import Cost
from lohan_fx.plan import ParameterPlan, Plan, Windows
from lohan_fx.planning import staging
from lohan_fx.planning.budgets import mean_request_bytes, staging_bytes
from lohan_fx.planning.plan_builder import homes_only
from lohan_fx.planning.problem import Budgets, ParameterFacts


@dataclass(frozen=True)
class Request:
    """What ``compile`` was asked for, as far as the pipeline needs it."""

    hw: HardwareProfile
    policy: str
    compute_dtype: str
    matmul_rate: float
    parameters: tuple[ParameterFacts, ...]
    budgets: Budgets
    windows: Windows
    plan: Plan | None
    """The one to obey; None: search."""
    homes: tuple[ParameterPlan, ...] = ()
    """Where an earlier plan of this model has put the parameters; empty before the first."""
    least_homes: tuple[ParameterPlan, ...] = ()
    """Those of the training plan whose graphs may run again that keeps least in memory; empty without any."""
    most_at_home_bytes: int | None = None
    """What those plans leave of host memory for what stays there (``CapturedGraphs``); None where there is none."""
    compute_scale: float = 1.0
    """How many times longer than measured op by op the graphs turned out to take (``self_check``)."""
    revise: bool = True
    """Whether that may replace the plan."""
    segments: str = inductor.BOXED
    """What of the graphs to compile (``inductor.MODES``)."""
    chooses_staging: bool = True
    """Whether the plan may change the buffers of ``windows`` (``staging``): not once the runtime has them."""
    chooses_sizes: bool = False
    """And how large they are: not once states are on disk in such pieces."""
    holds: bool = False
    """All gradients wait for ``step()`` (docs/0014)."""
    windows_of: Callable[[int], Windows] | None = None
    """The windows that another promise would get, for messages that name one; None: these."""
    forwards: int = 1
    """How many wait for their backwards at once."""
    loss_only: bool = False
    """Whether the loop holds nothing of what a call returns but the loss (docs/0056)."""
    dynamic: bool | None = None
    """As ``torch.compile`` takes it, for what trains."""


def settled(request: Request, windows: Windows) -> Request:
    """``request`` with the staging of ``windows`` from now on: its bytes count as spent, drives have their rates for requests
    of its sizes, and nobody changes it again."""
    shared = request.budgets.shared
    more = staging_bytes(windows, shared=shared) - staging_bytes(request.windows, shared=shared)
    return dataclasses.replace(
        request,
        hw=request.hw.at_requests(mean_request_bytes(request.parameters, windows)),
        windows=staging.with_buffers_of(request.windows, windows),
        budgets=dataclasses.replace(request.budgets, fixed_bytes=request.budgets.fixed_bytes + more),
        chooses_staging=False,
        chooses_sizes=False,
    )


def node_seconds(request: Request) -> Callable[[Cost], float]:
    """How long a node takes, as far as ``request`` knows."""

    def seconds(found: Cost) -> float:
        scale = request.compute_scale if found.measured_s is not None else 1.0
        return scale * cost.node_seconds(found, request.hw, request.matmul_rate)

    return seconds


def plan_of_homes(request: Request) -> Plan:
    """The plan that decides only where parameters are."""
    plan = homes_only(request.policy, request.compute_dtype, request.parameters, request.budgets, request.windows)
    return dataclasses.replace(plan, loss_only=request.loss_only)
