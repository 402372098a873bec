"""placement: which of the activations that are saved stay on the device, and where the others go.

The formula knows how many bytes do; which they are is this file's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from lohan_fx.passes.search import useful
from lohan_fx.plan import Decision, Keep, Recompute, Swap, Tier
from lohan_fx.planning.problem import Problem


def placed(problem: Problem, saved: Collection[str], keep_bytes: int, host_bytes: int) -> dict[str, Decision]:
    """Where each saved activation goes: the last produced stay, which are needed back first; the first go to NVMe, which are
    away longest (mechanisms B4 leaves this open). Or those that stay and those that go take turns (``Problem.in_turns``)."""
    order = useful(problem.activations)[::-1]
    decisions: dict[str, Decision] = dict.fromkeys(order, Recompute())
    if problem.in_turns:
        return decisions | _in_turns(problem, [name for name in order if name in saved], keep_bytes, host_bytes)
    kept = swapped = 0
    for name in order:
        nbytes = problem.activations.activations[name].bytes
        if name not in saved:
            continue
        if kept + nbytes <= keep_bytes or nbytes < problem.small_activation_bytes:
            decisions[name] = Keep()
            kept += nbytes
        elif swapped + nbytes <= host_bytes:
            decisions[name] = Swap(Tier.HOST)
            swapped += nbytes
        else:
            decisions[name] = Swap(Tier.NVME)
    return decisions


def _in_turns(problem: Problem, names: Sequence[str], keep_bytes: int, host_bytes: int) -> dict[str, Decision]:
    """Where ``names`` go, the last produced first, if those that stay and those that go take turns. What is soon needed back
    stays, as far as there is room."""
    found = problem.activations.activations
    sizes = {name: found[name].bytes for name in names}
    decisions: dict[str, Decision] = {}
    for name in names:
        stays = name in problem.soon_back and sizes[name] <= keep_bytes
        if stays or sizes[name] < problem.small_activation_bytes:
            decisions[name] = Keep()
            keep_bytes = max(0, keep_bytes - sizes[name])
    others = [name for name in names if name not in decisions]
    kept = _share(others, sizes, keep_bytes)
    away = [name for name in others if name not in kept]
    in_host = _share(away, sizes, host_bytes)
    decisions |= dict.fromkeys(kept, Keep()) | dict.fromkeys(in_host, Swap(Tier.HOST))
    return dict.fromkeys(names, Swap(Tier.NVME)) | decisions


def _share(names: Sequence[str], sizes: Mapping[str, int], room_bytes: int) -> set[str]:
    """Of ``names`` in their order as many as have room, evenly."""
    found: set[str] = set()
    used = passed = 0
    total = sum(sizes[name] for name in names)
    for name in names:
        nbytes = sizes[name]
        passed += nbytes
        if used + nbytes <= min(room_bytes, room_bytes * passed / total + nbytes / 2):
            found.add(name)
            used += nbytes
    return found
