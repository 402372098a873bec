"""literal_search: LoHan's Algorithm 1 exactly as printed, for tests and comparisons.

What mechanisms c3.3 holds against it: it leaves the loop before it appends the layer that reaches A_interBlock, so that
it can return less than its own minimum; ``>=`` stops on a plateau; T_min has taken part in states below the minimum;
nothing makes it choose the tensors between the blocks; and it subtracts a layer's own FLOPs, whatever its closure.
``search`` is the corrected one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from lohan_fx.passes.activation_graph import ActivationGraph


@dataclass(frozen=True)
class LiteralChoice:
    """``swap_list`` in the order of the walk, A_G2M as the algorithm counts it, and T_min."""

    swap_list: tuple[str, ...]
    swapped_bytes: int
    recompute_flops: int
    least_s: float


def literal_search(
    found: ActivationGraph, step_s: Callable[[int, int], float], *, forward_flops: int | None = None
) -> LiteralChoice:
    """Algorithm 1 (LoHan IV-D), line by line.

    ``step_s(swapped_bytes, recompute_flops)`` is T_iter. FLOP_r starts at ``forward_flops`` (FLOP_f; by default that of
    the whole graph), layers are every activation by descending OB_i = FLOP_i / A_i, and A_interBlock is the bytes of
    the mandatory ones.
    """
    layers = sorted(
        found.activations.values(), key=lambda a: found.flops[a.producer] / a.bytes if a.bytes else 0.0, reverse=True
    )
    inter_block_bytes = sum(found.activations[name].bytes for name in found.mandatory)
    recompute_flops = sum(found.flops.values()) if forward_flops is None else forward_flops
    swapped_bytes, least_s = 0, math.inf
    swap_list: list[str] = []
    for layer in layers:
        remaining_flops = recompute_flops - found.flops[layer.producer]
        time = step_s(swapped_bytes + layer.bytes, remaining_flops)
        if swapped_bytes + layer.bytes >= inter_block_bytes and time >= least_s:
            break
        swap_list.append(layer.name)
        swapped_bytes, recompute_flops, least_s = swapped_bytes + layer.bytes, remaining_flops, min(least_s, time)
    return LiteralChoice(tuple(swap_list), swapped_bytes, recompute_flops, least_s)
