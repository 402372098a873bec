"""prefetch: how far transfers may run ahead, once it is known what memory a plan leaves (Fuyou sec. 4.4; mechanisms B5).

Fuyou's FIFO on the GPU takes what the profiled peak leaves of its memory, and is refilled in the order of use. Here two
queues share that room, by the bytes that a step brings in through each. A queue never gets less than it had, and not
more than one stage brings: more would never be in it. Where the device is the CPU there is no link to run ahead on, and
the room stays free.

Decided before the graphs are known, and fixed by the layout of the store: chunk sizes and staging buffers
(``budgets.choose_windows``).
"""

from __future__ import annotations

import dataclasses

from lohan_fx.plan import Plan, Swap, Tier
from lohan_fx.planning.memory_model import resident_bytes
from lohan_fx.planning.problem import Problem


def with_prefetch(problem: Problem, plan: Plan, device_peak: int) -> Plan:
    """``plan`` with windows that use the device memory it leaves, where its graphs need ``device_peak`` bytes."""
    if problem.budgets.shared:
        return plan
    free = problem.budgets.device_memory_bytes - device_peak - resident_bytes(plan)[0]
    fetched = sum(p.bytes for p in plan.parameters if p.home is not Tier.DEVICE)
    swapped = sum(a.bytes for a in plan.activations if isinstance(a.decision, Swap))
    if not fetched + swapped:
        return plan
    windows = plan.windows
    # At worst all of a window is in flight where the graph had its peak with nothing in flight, so what fits into the
    # free room as a whole cannot exceed the budget.
    room = {"fetch": free * fetched // (fetched + swapped), "swap_in": free * swapped // (fetched + swapped)}
    return dataclasses.replace(
        plan,
        windows=dataclasses.replace(
            windows,
            fetch_bytes=max(windows.fetch_bytes, min(room["fetch"], fetched)),
            swap_in_bytes=max(windows.swap_in_bytes, min(room["swap_in"], swapped)),
        ),
    )
