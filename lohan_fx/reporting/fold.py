"""fold: find layers whose listing is equal, to show them once.

The lines are cut wherever the layer changes; hoisted transfers belong to the layer in whose region they start.
Stretches of such segments that repeat, with the layer's number going up or down by the same step, make one
``Group``. Two segments are equal if their lines are, where

- a read line of the same segment has the same place in it;
- a parameter's name is counted from the segment's layer: ``model.layers.5.x`` in layer 4 is ``model.layers.{+1}.x``;
- a read line outside of the segment is one and the same for all repeats (the mask that all layers read), or it has
  the same role in a layer at the same distance (what the layer before returns; what this layer's forward saved).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lohan_fx import meta
from lohan_fx.reporting.listing import Block, Line, Name, Read, block_of


@dataclass(frozen=True)
class Segment:
    """Lines ``start`` to ``stop`` (left out) that belong to one numbered layer, or to none."""

    start: int
    stop: int
    block: Block | None
    is_input: bool


@dataclass(frozen=True)
class Group:
    """``segments`` and what repeats them; ``numbers``: per repeat the layer number of the first numbered segment."""

    segments: tuple[Segment, ...]
    numbers: tuple[int, ...]

    @property
    def repeats(self) -> int:
        return max(len(self.numbers), 1)

    @property
    def block(self) -> Block | None:
        """The layer that is shown, where there is one."""
        return next((s.block for s in self.segments if s.block is not None), None)


def fold(lines: Sequence[Line], *, unfold: bool = False) -> list[Group]:
    """Groups that cover ``lines`` in order. With ``unfold`` each segment is a group of its own."""
    segments = _segments(lines)
    if unfold:
        return [_group(segments, place, 1, 1) for place in range(len(segments))]
    compared = _Compared(lines, segments)
    groups, place = [], 0
    while place < len(segments):
        period, repeats = _best(compared, segments, place)
        groups.append(_group(segments, place, period, repeats))
        place += period * repeats
    return groups


def relative_name(name: str, block: Block | None) -> tuple[str, int, str] | str:
    """``name`` with its layer number counted from ``block``; as it is where it lies in no such layer."""
    found = block_of(name)
    if block is None or found is None or found[0].prefix != block.prefix:
        return name
    return block.prefix, found[0].number - block.number, found[1]


def _segments(lines: Sequence[Line]) -> list[Segment]:
    """Cut where the layer changes, and after the inputs."""
    found: list[Segment] = []
    for place, line in enumerate(lines):
        last = found[-1] if found else None
        if last is not None and last.is_input == line.is_input and (line.is_start or last.block == line.block):
            found[-1] = Segment(last.start, place + 1, last.block, last.is_input)
        else:
            found.append(Segment(place, place + 1, None if line.is_start else line.block, line.is_input))
    return found


def _group(segments: Sequence[Segment], place: int, period: int, repeats: int) -> Group:
    shown = tuple(segments[place : place + period])
    numbered = next((i for i, segment in enumerate(shown) if segment.block is not None), None)
    if numbered is None:
        return Group(shown, ())
    blocks = [segments[place + repeat * period + numbered].block for repeat in range(repeats)]
    return Group(shown, tuple(block.number for block in blocks if block is not None))


def _best(compared: _Compared, segments: Sequence[Segment], place: int) -> tuple[int, int]:
    """(period in segments, repeats) from ``place`` on that hides the most lines; (1, 1) where nothing repeats."""
    best, most = (1, 1), 0
    for period in range(1, (len(segments) - place) // 2 + 1):
        repeats = compared.repeats(place, period)
        hidden = segments[place + period * repeats - 1].stop - segments[place + period - 1].stop
        if hidden > most:
            best, most = (period, repeats), hidden
    return best


class _Compared:
    """Compares segments; what is costly is done once for each."""

    def __init__(self, lines: Sequence[Line], segments: Sequence[Segment]) -> None:
        self._segments = segments
        self._roles = _roles(lines)
        seen: dict[object, int] = {}
        self._own = [seen.setdefault(_own_lines(lines, s), len(seen)) for s in segments]
        self._outside = [_outside(lines, s) for s in segments]

    def repeats(self, place: int, period: int) -> int:
        """How often the ``period`` segments from ``place`` on stand there one after the other."""
        step = self._step(place, period)
        if not step:
            return 1
        modes: list[list[tuple[bool, bool]]] = [[(True, True)] * len(self._outside[place + i]) for i in range(period)]
        repeats = 1
        while place + (repeats + 1) * period <= len(self._segments):
            there = place + repeats * period
            agreed = [self._agree(place + i, there + i, repeats * step, modes[i]) for i in range(period)]
            found = [mode for mode in agreed if mode is not None]
            if len(found) < period:
                break
            modes = found
            repeats += 1
        return repeats

    def _step(self, place: int, period: int) -> int:
        """By how much the first layer number of the period changes to the next; 0 where it does not repeat."""
        for i in range(place, place + period):
            here, there = self._segments[i].block, self._segments[i + period].block
            if here is not None:
                return 0 if there is None else there.number - here.number
        return 0

    def _agree(
        self, first: int, other: int, shift: int, modes: Sequence[tuple[bool, bool]]
    ) -> list[tuple[bool, bool]] | None:
        """For each read line outside whether it is (the same, in the same role) in all repeats so far.

        None where the segments differ.
        """
        here, there = self._segments[first].block, self._segments[other].block
        moved = None if here is None else Block(here.prefix, here.number + shift)
        if self._own[first] != self._own[other] or moved != there:
            return None
        agreed = []
        for mode, a, b in zip(modes, self._outside[first], self._outside[other], strict=True):
            same, alike = mode[0] and a == b, mode[1] and self._alike(first, a, other, b)
            if not (same or alike):
                return None
            agreed.append((same, alike))
        return agreed

    def _alike(self, first: int, a: int, other: int, b: int) -> bool:
        role = self._role(first, a)
        return role is not None and role == self._role(other, b)

    def _role(self, segment: int, place: int) -> tuple[object, ...] | None:
        """The role of line ``place``, its layer counted from that of ``segment``; None where it has none to it."""
        block, role = self._segments[segment].block, self._roles[place]
        if block is None or role is None or role.block.prefix != block.prefix:
            return None
        return role.block.number - block.number, role.looks, role.alike_after


@dataclass(frozen=True)
class _Role:
    """What a line is in its layer: how it looks, and how many lines of the layer that look the same come after it.

    Counted from the end, because the first layer often has more lines at its start (the mask is prepared there).
    """

    block: Block
    looks: object
    alike_after: int


def _roles(lines: Sequence[Line]) -> list[_Role | None]:
    counts: dict[object, int] = {}
    roles: list[_Role | None] = []
    for line in reversed(lines):
        if line.block is None:
            roles.append(None)
            continue
        looks = _looks(line, line.block)
        role = _Role(line.block, looks, counts.get((line.block, looks), 0))
        counts[line.block, looks] = role.alike_after + 1
        roles.append(role)
    return roles[::-1]


def _looks(line: Line, block: Block | None) -> tuple[object, ...]:
    """``line`` without its name and without what it reads, with layer numbers counted from ``block``."""
    names = (relative_name(part.name, block) if isinstance(part, Name) else part for part in line.parts)
    again = line.name.startswith(meta.RECOMPUTED)
    return line.type, again, line.is_start, line.is_input, tuple(None if isinstance(p, Read) else p for p in names)


def _own_lines(lines: Sequence[Line], segment: Segment) -> tuple[object, ...]:
    """The lines of ``segment`` as they look, with the places that they read in it."""
    found = []
    for line in lines[segment.start : segment.stop]:
        reads = (part.place - segment.start for part in line.parts if isinstance(part, Read))
        found.append((_looks(line, segment.block), tuple(read if read >= 0 else None for read in reads)))
    return tuple(found)


def _outside(lines: Sequence[Line], segment: Segment) -> tuple[int, ...]:
    """The lines before ``segment`` that its lines read, in order."""
    reads = (
        part.place for line in lines[segment.start : segment.stop] for part in line.parts if isinstance(part, Read)
    )
    return tuple(read for read in reads if read < segment.start)
