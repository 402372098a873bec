"""plan_builder: from decisions and homes to a ``Plan``; what every policy ends with."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import networkx as nx

from lohan_fx.cost import STATE_BYTES
from lohan_fx.passes.activation_graph import ActivationGraph
from lohan_fx.passes.annotate import block_of
from lohan_fx.passes.search import read, useful
from lohan_fx.plan import (
    ActivationPlan,
    Decision,
    Keep,
    OptimizerTiming,
    ParameterPlan,
    Plan,
    Recompute,
    Swap,
    Tier,
    Windows,
)  # fmt: skip
from lohan_fx.planning import problem as problems
from lohan_fx.planning.problem import Budgets, ParameterFacts, Problem


def saving(problem: Problem, saved: Collection[str], decision: Decision) -> dict[str, Decision]:
    """``decision`` for those of ``saved`` that are read at all, if all of them are saved; the others are dropped."""
    kept = read(problem.activations, saved)
    return {name: decision if name in kept else Recompute() for name in useful(problem.activations)}


def default_homes(problem: Problem, tier: Tier) -> dict[str, Tier]:
    small = {p.name for p in problem.parameters if p.numel <= problems.SMALL_PARAMETER_ELEMENTS}
    return {p.name: Tier.DEVICE if p.name in small else tier for p in problem.parameters}


def build_plan(
    problem: Problem,
    decisions: dict[str, Decision],
    homes: dict[str, Tier],
    states_home: Tier,
    resident: Collection[str] = (),
    *,
    optimizer_runs: OptimizerTiming = OptimizerTiming.IN_BACKWARD,
    waiting: Mapping[str, Tier] | None = None,
    twice: Collection[str] = (),
) -> Plan:
    """The ``Plan`` of ``problem`` with these decisions; trained parameters are updated when ``optimizer_runs`` says.

    ``resident``: parameters whose states stay in host memory wherever the others' are. ``waiting``: those that are updated
    in the next forward instead, and where their gradients wait for it; ``twice``: those of them that are updated twice.
    """
    found = problem.activations
    waits = waiting or {}
    in_memory = set(resident)
    if states_home is Tier.NVME:
        here = (p for p in problem.parameters if homes[p.name] is Tier.DEVICE)
        in_memory.update(p.name for p in here if p.numel <= problems.SMALL_PARAMETER_ELEMENTS)
    return Plan(
        policy=problem.policy,
        device="cpu" if problem.budgets.shared else "cuda",
        compute_dtype=problem.compute_dtype,
        host_memory_bytes=problem.budgets.host_memory_bytes,
        device_memory_bytes=problem.budgets.device_memory_bytes,
        activations=tuple(_activation_plan(found, name, decision) for name, decision in _in_order(found, decisions)),
        parameters=tuple(
            ParameterPlan(
                name=p.name,
                layer=layer_of_parameter(p.name),
                numel=p.numel,
                bytes=p.bytes,
                trainable=p.trainable,
                home=homes[p.name],
                states_home=(Tier.HOST if p.name in in_memory else states_home) if p.trainable else None,
                optimizer_runs=_runs(p, waits, optimizer_runs),
                gradient_home=waits.get(p.name),
                updated_twice=p.name in twice,
            )
            for p in problem.parameters
        ),
        windows=problem.windows,
        forwards=problem.forwards,
        outputs_bytes=problem.outputs_bytes,
        loss_only=problem.loss_only,
    )


def _runs(p: ParameterFacts, waiting: Mapping[str, Tier], otherwise: OptimizerTiming) -> OptimizerTiming:
    if not p.trainable:
        return OptimizerTiming.NONE
    return OptimizerTiming.NEXT_FORWARD if p.name in waiting else otherwise


def _in_order(found: ActivationGraph, decisions: dict[str, Decision]) -> list[tuple[str, Decision]]:
    return [(name, decisions[name]) for name in found.activations if name in decisions]


def _activation_plan(found: ActivationGraph, name: str, decision: Decision) -> ActivationPlan:
    activation = found.activations[name]
    return ActivationPlan(
        node=name,
        op=activation.op,
        layer=activation.layer,
        layer_kind=activation.layer_kind,
        bytes=activation.bytes,
        flops=found.flops[activation.producer],
        decision=Keep() if activation.on_host and isinstance(decision, Swap) else decision,
        mandatory=name in found.mandatory,
    )


def layer_of_parameter(name: str) -> str:
    """``model.layers.3`` of ``model.layers.3.mlp.up_proj.weight``; the module's path where there is no block."""
    module = name.rpartition(".")[0]
    return block_of(module) or module


def homes_only(
    policy: str, compute_dtype: str, parameters: tuple[ParameterFacts, ...], budgets: Budgets, windows: Windows
) -> Plan:
    """A plan without activations, for inference: all in memory if half of each promise holds it, else on NVMe."""
    on_device = sum(p.bytes for p in parameters)
    in_host = sum(STATE_BYTES * p.numel for p in parameters if p.trainable)
    if budgets.shared:
        on_device = in_host = on_device + in_host
    fits_host = 2 * in_host + budgets.fixed_bytes < budgets.host_memory_bytes
    fits_device = 2 * on_device + (budgets.fixed_bytes if budgets.shared else 0) < budgets.device_memory_bytes
    fits = policy in ("lohan", "in-memory") and fits_host and fits_device
    home, states_home = (Tier.DEVICE, Tier.HOST) if fits else (Tier.NVME, Tier.NVME)
    nothing = ActivationGraph(nx.DiGraph(), {}, {}, {}, frozenset(), frozenset())
    problem = Problem(policy, compute_dtype, parameters, nothing, 0.0, 0.0, budgets, windows, lambda plan: 0)
    return build_plan(problem, {}, default_homes(problem, home), states_home)
