"""staging: how many buffers of host memory pay, and how large ones: what of the joint decision no formula of lanes can see.

The formula takes every lane as always at work. On a machine a layer's gradients come in a burst, and layers with states
on NVMe between others without; what staging holds of them, with the states that are read ahead, is what the drives work
on until the next one. What it holds of parameters lets them read ahead too (Fuyou's CPU queue, mechanisms B5). So a few
sizes are simulated on the plan's own graphs. More bytes must save more seconds than anything else would with them
(``Division.per_byte_s``), as far as the plan leaves none free.

Sizes come first: larger requests are fewer, each of which costs a processor time, and drives may move more by them; smaller
ones leave memory to others, and overlap more finely (docs/0031).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction

from lohan_fx.plan import WHOLE, Division, Plan, Share, Tier, Use, Windows
from lohan_fx.planning.budgets import LEAST_BUFFERS, staging_bytes
from lohan_fx.units import format_bytes, format_seconds

SHARES = (0.125, 0.25, 0.5, 1.0)
"""Of the chunks of a layer, for which there are buffers: tried one purpose after the other while that pays."""
WORTH_IT = 0.005
"""Share of a step that more staging must save, net: less is the grain of the simulation."""
TRANSFERS = 8_000
"""Of a step that are simulated one by one to judge a candidate."""
PURPOSES = ("optimizer_buffers", "gradient_buffers", "io_buffers")
FACTORS = (Fraction(1, 2), Fraction(2))
"""Of the sizes that the planner begins with: what else is tried."""
SIZES = ("chunk_elements", "io_bytes")

StepSeconds = Callable[[Windows], float]
"""Simulated seconds of a step with these windows."""


@dataclass(frozen=True)
class Staging:
    """What was chosen. ``step_s`` with it, ``least_s`` with ``LEAST_BUFFERS`` of everything, both simulated; ``began_s``
    with what the planner began with; ``per_byte_s``: what a byte saves elsewhere. ``sized``: as many buffers as the planner
    began with, of the sizes chosen; ``sized_s`` with those."""

    windows: Windows
    step_s: float
    sized: Windows
    sized_s: float
    began_s: float
    least_s: float
    per_byte_s: float

    def with_fewer(self) -> Staging:
        """The sizes alone."""
        return dataclasses.replace(self, windows=self.sized, step_s=self.sized_s)


def choose(
    windows: Windows,
    step_s: StepSeconds,
    *,
    layer_elements: int,
    shared: bool,
    per_byte_s: float,
    free_bytes: int,
    sizes: bool = False,
    finer_s: StepSeconds | None = None,
) -> Staging:
    """The staging with the least ``step_s`` and price, beginning with ``windows``, of which all bytes are paid.
    ``layer_elements``: how many elements of the largest layer are trained; ``sizes``: whether sizes may change too.

    ``free_bytes`` of host memory cost nothing; beyond them each costs ``per_byte_s``, and where there are none each one
    less earns as much. ``finer_s``: simulated with more transfers, of what was chosen and more buffers for updates: where those
    are few, ``step_s`` is some per cent off.
    """
    seconds = functools.cache(step_s)
    began_bytes = staging_bytes(windows, shared=shared)

    def price_s(asked: Windows) -> float:
        more = staging_bytes(asked, shared=shared) - began_bytes
        return per_byte_s * (max(0, more - free_bytes) if more > 0 or free_bytes else more)

    def better(best: Windows, others: Iterable[Windows]) -> Windows:
        for asked in others:
            if seconds(asked) + price_s(asked) < seconds(best) + price_s(best) - WORTH_IT * seconds(best):
                best = asked
        return best

    best = sized = better(windows, (_resized(windows, factor) for factor in FACTORS)) if sizes else windows
    layer_chunks = -(-layer_elements // best.chunk_elements)
    for purpose in PURPOSES:
        if not (shared and purpose == "gradient_buffers"):  # gradients are updated where they are
            # What several drives are given (docs/0032) no simulation misses, in which a job has all of them.
            least = LEAST_BUFFERS if purpose == "gradient_buffers" else max(LEAST_BUFFERS, getattr(windows, purpose))
            best = better(best, _others(best, purpose, layer_chunks, least))
    best = _doubled(best, functools.cache(finer_s), price_s, layer_chunks) if finer_s is not None else best
    few = dataclasses.replace(best, **{purpose: min(getattr(best, purpose), LEAST_BUFFERS) for purpose in PURPOSES})
    return Staging(best, seconds(best), sized, seconds(sized), seconds(windows), seconds(few), per_byte_s)


def _doubled(best: Windows, step_s: StepSeconds, price_s: StepSeconds, most: int) -> Windows:
    """``best``, or with twice as many buffers for updates, as often as that pays, unless updates are serial."""
    while not best.serial_optimizer and best.optimizer_buffers < most:
        asked = dataclasses.replace(best, optimizer_buffers=min(most, 2 * best.optimizer_buffers))
        if step_s(asked) + price_s(asked) >= step_s(best) * (1 - WORTH_IT) + price_s(best):
            break
        best = asked
    return best


def smallest(windows: Windows, *, cut: bool = False) -> Windows:
    """With the smallest sizes that ``choose`` tries, and no more buffers than one drive takes. ``cut``: chunks stay as large,
    since states are in such pieces on disk."""
    counts = {purpose: min(getattr(windows, purpose), LEAST_BUFFERS) for purpose in PURPOSES}
    return dataclasses.replace(_resized(windows, min(FACTORS), ("io_bytes",) if cut else SIZES), **counts)


def least_chunk_elements(windows: Windows) -> int:
    """By so many the store is laid out, so that each size that ``choose`` tries is a whole number of them."""
    return smallest(windows).chunk_elements


def _resized(windows: Windows, factor: Fraction, sizes: Iterable[str] = SIZES) -> Windows:
    return dataclasses.replace(
        windows, **{size: WHOLE * math.ceil(getattr(windows, size) * factor / WHOLE) for size in sizes}
    )


def _others(best: Windows, purpose: str, layer_chunks: int, least: int) -> list[Windows]:
    """``best`` with other numbers of buffers of one purpose, ``least`` at least."""
    count = getattr(best, purpose)
    if count <= 1:
        return []  # one optimizer buffer is LoHan's naive handler
    most = 4 * LEAST_BUFFERS if purpose == "io_buffers" else layer_chunks
    tried = {least, *(max(least, round(most * share)) for share in SHARES)} - {count}
    return [dataclasses.replace(best, **{purpose: number}) for number in sorted(tried)]


def with_staging(plan: Plan, found: Staging, extra_bytes: int) -> Plan:
    """``plan`` with the staging that was chosen, told in its notes and shown in its division; ``extra_bytes`` more than it
    had are taken from what was free."""
    windows = with_buffers_of(plan.windows, found.windows)
    division = plan.division
    if division is not None:
        division = dataclasses.replace(division, shares=tuple(_shares(division, found, extra_bytes)))
    return dataclasses.replace(
        plan, windows=windows, division=division, notes=(*plan.notes, note(found, shared=plan.device == "cpu"))
    )


def with_buffers_of(windows: Windows, other: Windows) -> Windows:
    """``windows`` with as many buffers as ``other`` has, and of its sizes."""
    return dataclasses.replace(windows, **{name: getattr(other, name) for name in (*PURPOSES, *SIZES)})


def same_sizes(windows: Windows, other: Windows) -> bool:
    """Whether the requests of both are equally large."""
    return all(getattr(windows, size) == getattr(other, size) for size in SIZES)


def _shares(division: Division, found: Staging, extra_bytes: int) -> Iterator[Share]:
    for share in division.shares:
        if share.tier is Tier.HOST and share.use is Use.STAGING:
            yield dataclasses.replace(
                share, bytes=share.bytes + extra_bytes, saves_s=max(0.0, found.least_s - found.step_s)
            )
        elif share.tier is Tier.HOST and share.use is Use.FREE:
            yield dataclasses.replace(share, bytes=share.bytes - extra_bytes)
        else:
            yield share


def note(found: Staging, *, shared: bool) -> str:
    """Which staging was chosen, and why."""
    windows = found.windows
    size = format_bytes(staging_bytes(windows, shared=shared))
    counts = [
        f"{windows.io_buffers} buffers of {format_bytes(windows.io_bytes)} per lane",
        f"{windows.optimizer_buffers} of {windows.chunk_elements:,} elements for updates",
    ]
    counts += [] if shared else [f"{windows.gradient_buffers} for gradients"]
    why = [f"simulated {format_seconds(found.step_s)} a step"]
    if found.least_s > found.step_s * (1 + WORTH_IT):
        why.append(f"{format_seconds(found.least_s)} with {LEAST_BUFFERS} of each")
    why.append("more would not pay")
    elsewhere = f"a GiB elsewhere saves {format_seconds(found.per_byte_s * 2**30)}" if found.per_byte_s else ""
    return f"staging of {size}: {', '.join(counts)}: " + ", ".join(why) + (f"; {elsewhere}" if elsewhere else "")
