"""simulator: one training step by events, from the scheduled nodes of the rewritten graphs.

The second, independent judge of a plan (mechanisms c3.10): where the formula of ``cost.py`` takes the busiest lane of
each stage, this executes the nodes in their order on lanes that behave like the runtime's, with its priorities, its
buffers and its windows, with filling and draining, and with what lanes take from each other where they share memory or
cores (``contention.py``).

    step_program          the graphs -> what compute does, instruction by instruction
    event_clock           threads, signals, jobs, and the clock
    simulated_machine     lanes, buffers, rates, memory
    simulated_transfers, simulated_optimizer          what ``runtime/`` does for each op
    simulated_step        the step, and what is known of it
"""

from __future__ import annotations

from torch import nn

from lohan_fx import cost, request
from lohan_fx.compile import compiled
from lohan_fx.compiled_model import CompiledModel
from lohan_fx.hardware import HardwareProfile
from lohan_fx.passes.halves import Halves
from lohan_fx.plan import Plan
from lohan_fx.simulation.simulated_step import LANES, Simulation, by_rates, simulate_program
from lohan_fx.simulation.step_program import NodeSeconds, step_program

__all__ = ["LANES", "Simulation", "by_rates", "simulate", "simulate_program"]


def simulate(
    model: nn.Module | Halves,
    plan: Plan | None = None,
    hw: HardwareProfile | None = None,
    *,
    node_seconds: NodeSeconds | None = None,
    fused_adam: bool | None = None,
    steps: int = 1,
) -> Simulation:
    """Simulate a training step of a compiled ``model`` by the graphs that ``dump`` shows, their plan and the profile; or of
    ``Halves`` by ``plan`` on ``hw``. Of inference graphs, which have no backward, the forward.

    ``node_seconds``: seconds of a node from its ``Cost``; None: as the planner takes them, by the rates of ``hw``, or else by
    those that the first steps of a compiled model have corrected.
    ``fused_adam``: whether the optimizer is torch's fused one, as the profile's rate is; None: as the model's optimizer
    is, or fused. ``steps``: simulate so many in a row, and show the last; one more where updates run beside the next
    forward, so that what is shown has its predecessor's.
    Raises ``ValueError`` where there is nothing to simulate yet, or where ``plan`` or ``hw`` is missing.
    """
    if isinstance(model, Halves):
        if plan is None or hw is None:
            raise ValueError("simulate(halves) needs the plan and the hardware profile too: simulate(halves, plan, hw)")
        halves, fused = model, True
    else:
        found = compiled(model)
        main = found.main_graph()
        if main is None:
            raise ValueError("this model has no graphs yet: call it once, or lohan_fx.prepare(model, ...) first")
        halves = found.halves[main]
        plan = found.plans[main] if plan is None else plan
        if hw is None:
            known = found.request()
            hw, node_seconds = known.hw, node_seconds or request.node_seconds(known)
        fused = _is_fused(found)
    program = step_program(halves, plan, node_seconds or by_rates(plan, hw), cost.handover_s(hw))
    return simulate_program(program, plan, hw, fused_adam=fused if fused_adam is None else fused_adam, steps=steps)


def _is_fused(found: CompiledModel) -> bool:
    """Whether the model's optimizer is fused; without one it counts as such."""
    options = found.engine.updates.options
    trained = [slot for slot, parameter in found.engine.slots.items() if parameter.trainable]
    used = [options(slot) for slot in trained] if options is not None else []
    return all(one.fused for one in used if one is not None)
