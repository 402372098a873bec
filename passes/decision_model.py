"""decision_model: a plan's decisions as counts, what they add up to, and the seconds of a step that has these sums.

Activations come as equal blocks, everything else that shares memory with them (parameters, optimizer states) as things
with options, and the step as lanes whose seconds are affine in summed quantities. ``optimum`` solves it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lohan_fx.passes.independent_parts import Parts

PUT_OFF_S = 1e-10
"""Per parameter: what it is worth that an update is not put off, where neither is faster: about a tenth of the update."""


class Quantity(enum.StrEnum):
    """What decisions add to: seconds of recomputation, of handing transfers over and of waiting for what is needed back at once,
    jobs of the lanes beside a GPU, bytes moved per step, parameters updated, bytes held.

    ``FIRST_FETCHED_NVME``: of what the forward waits for before it computes; ``BLOCKING_*``: of parameters for whose updates
    compute waits; ``LATE_*``: of those that are updated when the backward has ended; ``NEXT_*``: beside the next forward;
    ``*BY_LANE``: parameters that a lane's thread updates, and not the compute device in its memory;
    ``*_STATES_READ``: of those among them that are updated twice, and ``REPEATED_*`` the second time; ``LATE_SUMS_NVME``: of
    gradients that wait for what is left after the backward as fp32 sums, and not as the backward made them.
    """

    RECOMPUTE_S = "recompute_s"
    SWAPPED = "swapped_bytes"
    SWAPPED_NVME = "swapped_nvme_bytes"
    HANDED_OVER_FORWARD_S = "handed_over_forward_s"
    HANDED_OVER_BACKWARD_S = "handed_over_backward_s"
    COMING_BACK_S = "coming_back_s"
    FORWARD_JOBS = "forward_jobs"
    BACKWARD_JOBS = "backward_jobs"
    FETCHED_FORWARD = "fetched_forward_bytes"
    FETCHED_FORWARD_NVME = "fetched_forward_nvme_bytes"
    FIRST_FETCHED_NVME = "first_fetched_nvme_bytes"
    FETCHED_BACKWARD = "fetched_backward_bytes"
    FETCHED_BACKWARD_NVME = "fetched_backward_nvme_bytes"
    STATES = "states_bytes"
    BY_LANE = "by_lane_parameters"
    COPIED = "copied_bytes"
    BLOCKING_READ = "blocking_read_bytes"
    BLOCKING_WRITTEN = "blocking_written_bytes"
    BLOCKING_HIDDEN_S = "blocking_hidden_s"
    BLOCKING_BY_LANE = "blocking_by_lane_parameters"
    LATE_STATES = "late_states_bytes"
    LATE_COPIED = "late_copied_bytes"
    RETURNED = "returned_bytes"
    LATE_UPDATED = "late_updated_parameters"
    LATE_BY_LANE = "late_by_lane_parameters"
    LATE_RETURNED = "late_returned_bytes"
    LATE_HELD_NVME = "late_held_nvme_bytes"
    LATE_SUMS_NVME = "late_sums_nvme_bytes"
    NEXT_STATES = "next_states_bytes"
    NEXT_COPIED = "next_copied_bytes"
    NEXT_UPDATED = "next_updated_parameters"
    NEXT_RETURNED = "next_returned_bytes"
    NEXT_HELD_NVME = "next_held_nvme_bytes"
    LATE_STATES_READ = "late_states_read_bytes"
    NEXT_STATES_READ = "next_states_read_bytes"
    REPEATED_STATES = "repeated_states_bytes"
    REPEATED_HELD_NVME = "repeated_held_nvme_bytes"
    DEVICE = "device_bytes"
    HOST = "host_bytes"


Adds = Mapping[Quantity, float]


@dataclass(frozen=True)
class Line:
    """Seconds as an affine function of quantities."""

    seconds: float
    per: Adds

    def at(self, quantities: Adds) -> float:
        return self.seconds + sum(rate * quantities.get(quantity, 0.0) for quantity, rate in self.per.items())


@dataclass(frozen=True)
class LaneTime:
    """Seconds of a lane: the least of ``lines``. One line, except where the drives' mixed rate bends the wrong way.
    ``is_work``: whether the lane is at work for so long; otherwise it is a bound on the stage that several lanes make."""

    lines: tuple[Line, ...]
    is_work: bool = True

    def at(self, quantities: Adds) -> float:
        return min(line.at(quantities) for line in self.lines)


@dataclass(frozen=True)
class Thing:
    """``count`` equal things; each is treated in one of ``options``, which add to the quantities."""

    count: int
    options: tuple[Adds, ...]


@dataclass(frozen=True)
class Size:
    """All values of ``bytes``: ``mandatory`` of them are saved anyway; each saved one takes one of ``options``."""

    bytes: int
    mandatory: int
    options: tuple[Adds, ...]


@dataclass(frozen=True)
class Model:
    """A plan's decisions as numbers. ``sizes``: one entry for each size of a savable or mandatory value."""

    blocks: tuple[Parts, ...]
    sizes: tuple[Size, ...]
    things: tuple[Thing, ...]
    stages: tuple[tuple[LaneTime, ...], ...]
    limits: Adds

    @property
    def integers(self) -> int:
        """How many whole numbers must be found."""
        saved = sum(1 for block in self.blocks for nbytes in block.bytes if nbytes is not None)
        return saved + sum(len(s.options) for s in self.sizes) + sum(len(t.options) for t in self.things)

    def seconds(self, quantities: Adds) -> float:
        return sum(max(lane.at(quantities) for lane in stage) for stage in self.stages)

    def work_s(self, quantities: Adds) -> float:
        """Seconds that all lanes together work: of equally fast decisions, those with less of it are better."""
        return self.seconds_of_all.at(quantities)

    @property
    def seconds_of_all(self) -> Line:
        """The first line of every lane, in one."""
        lines = [lane.lines[0] for stage in self.stages for lane in stage if lane.is_work]
        per = {quantity: sum(line.per.get(quantity, 0.0) for line in lines) for quantity in Quantity}
        per[Quantity.NEXT_UPDATED] += PUT_OFF_S
        return Line(sum(line.seconds for line in lines), per)


@dataclass(frozen=True)
class Solution:
    """``saved[block][value]``, ``placed[size][option]`` and ``treated[thing][option]`` are counts.

    ``bound_s``: no decisions are faster. ``exact``: the solution is as fast as that, within ``GAP``. ``per_byte_s``: only
    of a relaxed solution: seconds that one more byte of a limit would save.
    """

    saved: tuple[tuple[float, ...], ...]
    placed: tuple[tuple[float, ...], ...]
    treated: tuple[tuple[float, ...], ...]
    quantities: Adds
    seconds: float
    bound_s: float
    exact: bool
    per_byte_s: Adds = field(default_factory=dict)


def quantities_of(
    model: Model,
    saved: Sequence[Sequence[float]],
    placed: Sequence[Sequence[float]],
    treated: Sequence[Sequence[float]],
) -> dict[Quantity, float]:
    """What these counts add up to."""
    total: dict[Quantity, float] = dict.fromkeys(Quantity, 0.0)
    for block, counts in zip(model.blocks, saved, strict=True):
        total[Quantity.RECOMPUTE_S] += _recompute_s(block, counts)
    options = [*(size.options for size in model.sizes), *(thing.options for thing in model.things)]
    for of_group, counts in zip(options, [*placed, *treated], strict=True):
        for option, count in zip(of_group, counts, strict=True):
            for quantity, added in option.items():
                total[quantity] += added * count
    return total


def most(model: Model) -> dict[Quantity, float]:
    """The largest value that each quantity can take."""
    total: dict[Quantity, float] = dict.fromkeys(Quantity, 0.0)
    for block in model.blocks:
        total[Quantity.RECOMPUTE_S] += block.count * sum(block.seconds)
    counted = [(size.options, savable(model, size)) for size in model.sizes]
    for options, count in [*counted, *((thing.options, thing.count) for thing in model.things)]:
        for quantity in Quantity:
            total[quantity] += count * max(option.get(quantity, 0.0) for option in options)
    return total


def savable(model: Model, size: Size) -> int:
    """How many values of ``size`` there are."""
    return size.mandatory + sum(block.count * block.bytes.count(size.bytes) for block in model.blocks)


def _recompute_s(block: Parts, counts: Sequence[float]) -> float:
    again = [0.0] * len(counts)
    for place in reversed(range(len(counts))):
        wanted = block.count if block.needed[place] else max((again[r] for r in block.readers[place]), default=0.0)
        again[place] = max(wanted - counts[place], 0.0)
    return sum(seconds * count for seconds, count in zip(block.seconds, again, strict=True))
