"""forced_holding: gradients wait on NVMe, however much memory there is, and updates are made twice, whatever the formula says:
for what has to meet that with small models.
"""

from __future__ import annotations

import torch
from torch import nn

from lohan_fx.compile import compiled
from lohan_fx.plan import Plan


def leave_no_memory_to_hold(model: nn.Module) -> None:
    """As if the promise left none, whatever is planned for the compiled ``model`` from now on."""
    gradients = compiled(model).engine.gradients
    apply_plan = gradients.apply_plan

    def without(plan: Plan, device: torch.device) -> None:
        apply_plan(plan, device)
        gradients.hold_bytes = 0

    gradients.apply_plan = without  # type: ignore[method-assign]


def update_twice(model: nn.Module) -> None:
    """All that can be, whatever is planned for the compiled ``model``."""
    compiled(model).engine.gradients.updated_twice = lambda slot: True  # type: ignore[method-assign]
