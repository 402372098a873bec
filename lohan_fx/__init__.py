"""lohan_fx: fine-tune a model far too big for its GPU and its RAM, on one GPU and a few NVMe drives.

A ``torch.compile`` backend that rewrites the model's forward and backward graphs with explicit nodes for every
movement of parameters, activations and gradients, and a runtime that overlaps them with an optimizer whose states
live on NVMe.
"""

import logging

from lohan_fx import kernel_caches, lean_loss, trainer
from lohan_fx.checkpoints.checkpoint import Resumed, checkpoint, resume
from lohan_fx.clipping import clip_grad_norm_, grad
from lohan_fx.compile import compile, prepare, release, releasing, reset
from lohan_fx.errors import (
    CaptureError,
    InfeasiblePlan,
    LaneTimeout,
    LohanError,
    OffloadedParameterError,
    StepError,
    StoreError,
    VerifyError,
    WearBudgetExceeded,
)
from lohan_fx.grad_scaler import GradScaler
from lohan_fx.hardware import HardwareProfile
from lohan_fx.optim import Adam, AdamW
from lohan_fx.parameters.build_on_disk import build_on_disk
from lohan_fx.plan import Plan
from lohan_fx.reporting.dump import dump
from lohan_fx.reporting.live_view import LiveView
from lohan_fx.reporting.monitor import Monitor

# This shadows the subpackage of the same name, which ``from lohan_fx.policies import ...`` still finds.
from lohan_fx.reporting.policy_table import policies
from lohan_fx.simulation.simulator import Simulation, simulate

__version__ = "0.1.0"

__all__ = [
    "Adam",
    "AdamW",
    "CaptureError",
    "GradScaler",
    "HardwareProfile",
    "InfeasiblePlan",
    "LaneTimeout",
    "LiveView",
    "LohanError",
    "Monitor",
    "OffloadedParameterError",
    "Plan",
    "Resumed",
    "Simulation",
    "StepError",
    "StoreError",
    "VerifyError",
    "WearBudgetExceeded",
    "build_on_disk",
    "checkpoint",
    "clip_grad_norm_",
    "compile",
    "dump",
    "grad",
    "lean_loss",
    "policies",
    "prepare",
    "release",
    "releasing",
    "reset",
    "resume",
    "simulate",
    "trainer",
]

logging.getLogger(__name__).addHandler(logging.NullHandler())
kernel_caches.limit()
