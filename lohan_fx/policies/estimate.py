"""estimate: the work of a step by a plan, and the room that a layout leaves, before there are rewritten graphs."""

from __future__ import annotations

from dataclasses import dataclass

from lohan_fx import cost
from lohan_fx.passes.activation_graph import closure
from lohan_fx.passes.traffic import (
    blocking_written_bytes,
    held_nvme_bytes,
    returned_bytes,
    states_read_bytes,
    states_written_bytes,
)
from lohan_fx.plan import OptimizerTiming, Plan, Recompute, Swap, Tier
from lohan_fx.planning.memory_model import host_bytes, resident_bytes
from lohan_fx.planning.problem import Problem
from lohan_fx.planning.step_time import coming_back_seconds, handover_seconds
from lohan_fx.policies.layout import Layout, between_blocks


@dataclass(frozen=True)
class Room:
    """Most bytes of activations that may be kept on the device, swapped to host RAM, and both together."""

    kept: int
    swapped: int
    together: int
    forwards: int = 1

    def less(self, over: dict[str, int]) -> Room:
        """After a plan that was ``over`` by so many bytes per tier, those of all ``forwards``."""
        device, host = (-(-over.get(tier, 0) // self.forwards) for tier in ("device", "host"))
        together = max(self.together - host, 0)
        return Room(max(self.kept - device, 0), max(self.swapped - host, 0), together, self.forwards)


def room(problem: Problem, layout: Layout) -> Room:
    """What ``layout`` leaves for activations, where the peak of a graph that recomputes all it can is needed anyway."""
    budgets = problem.budgets
    least = layout.plan(problem, between_blocks(problem, Tier.DEVICE))
    graphs = problem.device_peak(least) - least.forwards * least.kept_bytes
    device = budgets.device_memory_bytes - graphs - resident_bytes(least)[0]
    host = budgets.host_memory_bytes - host_bytes(budgets.fixed_bytes, least)
    together = host - graphs - resident_bytes(least)[0] if budgets.shared else device + host
    kept, swapped, both = (max(nbytes, 0) // problem.forwards for nbytes in (device, host, together))
    return Room(kept, swapped, both, problem.forwards)


def work(problem: Problem, plan: Plan) -> cost.Work:
    """The step's work: each parameter is fetched once per stage, and gradients arrive once."""
    found = problem.activations
    trained = [p for p in plan.parameters if p.trainable]
    early, late, next_ = (
        [p for p in trained if p.runs_beside(problem.ends, plan.device) is timing]
        for timing in (OptimizerTiming.IN_BACKWARD, OptimizerTiming.AFTER_BACKWARD, OptimizerTiming.NEXT_FORWARD)
    )
    fetched = sum(p.bytes for p in plan.parameters if p.home is not Tier.DEVICE)
    from_nvme = sum(p.bytes for p in plan.parameters if p.home is Tier.NVME)
    saved = {a.node for a in plan.activations if not isinstance(a.decision, Recompute)}
    to_nvme = plan.bytes_of(Swap(Tier.NVME))
    blocking = [p for p in early if p.name in problem.ends.blocking and not p.in_memory_of(plan.device)]
    handed_over_s, handed_back_s = handover_seconds(problem, plan)
    return cost.Work(
        forward_s=problem.forward_s + handed_over_s,
        backward_s=problem.backward_s + handed_back_s,
        recompute_s=sum(found.seconds[name] for name in closure(found, saved)),
        coming_back_s=coming_back_seconds(problem, plan),
        fetched_forward_bytes=fetched,
        fetched_forward_nvme_bytes=from_nvme,
        fetched_backward_bytes=fetched,
        fetched_backward_nvme_bytes=from_nvme,
        swapped_bytes=to_nvme + plan.bytes_of(Swap(Tier.HOST)),
        swapped_nvme_bytes=to_nvme,
        gradient_bytes=sum(p.bytes for p in trained if p.gradient_home is not Tier.DEVICE),
        state_read_bytes=states_read_bytes(early),
        state_write_bytes=states_written_bytes(early),
        adam_parameters=sum(p.numel for p in early),
        by_lane=sum(p.numel for p in early if not p.stays_in_memory_of(plan.device)),
        first_fetched_nvme_bytes=sum(p.first_fetched_nvme_bytes(problem.ends) for p in plan.parameters),
        fetches_read_bytes=from_nvme + states_read_bytes(next_) + held_nvme_bytes(next_),
        fetches_written_bytes=states_written_bytes(next_),
        behind_fetches_s=problem.ends.last_fetch_s,
        held_nvme_bytes=held_nvme_bytes(late),
        late_state_read_bytes=states_read_bytes(late),
        late_state_write_bytes=states_written_bytes(late),
        late_adam_parameters=sum(p.numel for p in late),
        late_by_lane=sum(p.numel for p in late if not p.stays_in_memory_of(plan.device)),
        updates_read_bytes=states_read_bytes(early),
        updates_written_bytes=states_written_bytes(early) + held_nvme_bytes(late) + held_nvme_bytes(next_),
        before_updates_s=problem.ends.first_gradient_s,
        blocking_read_bytes=states_read_bytes(blocking),
        blocking_write_bytes=blocking_written_bytes(blocking, problem.ends, plan.windows),
        blocking_by_lane=sum(p.numel for p in blocking),
        blocking_hidden_s=sum(problem.ends.blocking[p.name].hidden_s for p in blocking),
        next_held_nvme_bytes=held_nvme_bytes(next_),
        next_state_read_bytes=states_read_bytes(next_),
        next_state_write_bytes=states_written_bytes(next_),
        next_adam_parameters=sum(p.numel for p in next_),
        returned_bytes=returned_bytes(early, plan),
        late_returned_bytes=returned_bytes(late, plan),
        next_returned_bytes=returned_bytes(next_, plan),
        serial_optimizer=plan.windows.serial_optimizer,
    )
