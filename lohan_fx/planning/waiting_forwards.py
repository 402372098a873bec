"""waiting_forwards: how many forwards wait for their backwards at once, each with what its plan keeps.

A contrastive loss is made of two or three forwards, and so is one of a backbone and a head that are called by themselves. How
many there will be, nobody tells: they are counted, and plans made after that have room for so many (docs/0047).
"""

from __future__ import annotations

import itertools
import math
import weakref

import torch

from lohan_fx import ops
from lohan_fx.passes.halves import Halves, outputs_of
from lohan_fx.plan import Keep, Plan, Swap, Tier

NEGLIGIBLE = 1 / 64
"""Share of the largest forward's activations that others may keep without counting as one more: an embedding called by itself
keeps tokens."""


def kept_bytes(plan: Plan) -> dict[str, int]:
    """What a forward by ``plan`` leaves in memory for its backward and whoever called it, of the budgets "device" and "host"; a
    CPU's promise of host memory covers its device memory."""
    kept, swapped = plan.kept_bytes + plan.outputs_bytes, plan.bytes_of(Swap(Tier.HOST))
    return {"device": kept, "host": swapped + (kept if plan.device == "cpu" else 0)}


def kept_output(halves: Halves, plan: Plan) -> int | None:
    """Which output of the forward is the largest activation that it keeps, or else stands for one that it has swapped; None
    where there is neither."""
    sizes = {a.node: a.bytes for a in plan.activations if a.decision == Keep()}
    places = []
    for index, node in list(enumerate(outputs_of(halves.forward)))[halves.num_outputs :]:
        if isinstance(node, torch.fx.Node) and (node.name in sizes or node.target is ops.SWAP_OUT):
            places.append((sizes.get(node.name, 0), index))
    return max(places)[1] if places else None


class WaitingForwards:
    """What waits now. ``wanted``: how many forwards plans should have room for, by what has been seen. ``step``: the number of
    the step that is being made; what an earlier one has left can have no backward any more."""

    def __init__(self) -> None:
        self.wanted = 1
        self._waiting: dict[int, tuple[int, dict[str, int]]] = {}
        self._numbers = itertools.count()

    def of(self, step: int) -> list[dict[str, int]]:
        """What each forward of ``step`` keeps that waits for its backward."""
        return [kept for of_step, kept in list(self._waiting.values()) if of_step == step]

    def backward_begins(self, plan: Plan, step: int) -> int:
        """The backward of a forward by ``plan`` is about to run, while others wait for theirs: by how many bytes they may pass a
        budget; 0 where they do not, or by next to nothing. Then plans should have room for as many as there are, or for one more
        than this one has: of several shapes the others may keep more than it does."""
        assert plan.prediction is not None
        own, others = kept_bytes(plan), self.of(step)
        if own in others:
            others.remove(own)
        budgets = {"device": plan.device_memory_bytes, "host": plan.host_memory_bytes}
        alone = {tier: plan.prediction.peak_bytes[tier] - (plan.forwards - 1) * own[tier] for tier in budgets}
        over = {tier: alone[tier] + sum(kept[tier] for kept in others) - budgets[tier] for tier in budgets}
        worst = max(over, key=lambda tier: over[tier])
        all_kept = [own[worst], *(kept[worst] for kept in others)]
        if over[worst] <= NEGLIGIBLE * max(all_kept) or not others:
            return 0
        count = math.ceil(sum(all_kept) / max(all_kept) - NEGLIGIBLE)
        self.wanted = max(self.wanted, count, plan.forwards + 1)
        return over[worst]

    def waits(self, plan: Plan, kept: torch.Tensor, step: int) -> None:
        """A forward by ``plan`` has run. What it keeps is there until ``kept``, which is part of it, is gone."""
        number = next(self._numbers)
        self._waiting[number] = step, kept_bytes(plan)
        weakref.finalize(kept, self._waiting.pop, number, None).atexit = False
