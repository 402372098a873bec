"""turns: in which order the drives serve what a forward waits for while updates run beside it.

Where gradients are held, each parameter is updated beside the next forward, ahead of its fetch. By kind
(``machine.FETCH_PRIORITY`` and so on) the drives would first bring whatever needs no update, and be it used last, while compute
waits for an update that is read behind it. So what compute will wait for takes turns then, by the place at which the last forward
waited for that parameter. The simulator has the same turns (docs/0027).

Assumes: one thread, that which runs the graphs.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Kind = TypeVar("Kind", int, None)
FIRST = -(2**30)
"""Of the first turn: a lane serves the lowest priority number first, and all turns go before what takes none."""


class Turns(Generic[Key]):
    """Of the parameters of one model, each known by its ``Key``."""

    def __init__(self) -> None:
        self._wanted: dict[Key, None] = {}
        self._places: dict[Key, int] = {}
        self._here = 0
        self._begun = False

    def forward_begins(self) -> None:
        """What is ``wanted`` from now on counts."""
        self._wanted.clear()
        self._here = 0

    def wanted(self, key: Key) -> None:
        """Compute goes on with this parameter. Fetches have another order, since those that the drives bring start early."""
        self._wanted.setdefault(key)
        self._here = max(self._here, self._places.get(key, 0))

    def places(self) -> Mapping[Key, int]:
        """Where the last forward first waited for each parameter, from 0 on."""
        return {key: place for place, key in enumerate(self._wanted)}

    def begin(self) -> None:
        """Updates begin that the next forward will wait for, as the last one waited."""
        self._places = dict(self.places())
        self._here = 0
        self._begun = True

    def end(self) -> None:
        """The forward is over."""
        self._begun = False

    def of(self, key: Key, otherwise: Kind) -> int | Kind:
        """The priority of what is moved for this parameter, ``otherwise`` where nothing takes turns. What the last forward has
        not waited for comes last."""
        return FIRST + self._places.get(key, len(self._places)) if self._begun else otherwise

    def here(self, otherwise: Kind) -> int | Kind:
        """As ``of``, of what comes of the computation at hand."""
        return FIRST + self._here if self._begun else otherwise
