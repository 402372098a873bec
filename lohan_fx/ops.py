"""The ops of the ``lohan`` library: the nodes that the passes insert and the runtime executes.

Starting and waiting are two nodes, so that ``schedule`` can move them apart. The ops know slots, not files or
threads: each slot is bound to a handler (the runtime of one compiled model), and the op calls it.

    fetch(shell, slot) -> Tensor          start bringing parameter ``slot`` to the device; not ready yet
    swap_out(x, slot, tier) -> handle     start moving ``x`` to host or NVMe; the handle is a 0-byte tensor
    swap_in(handle, slot) -> Tensor       start bringing it back
    wait(t) -> Tensor                     ``t`` is usable on the compute stream from here
    offload_grad(g, slot)                 hand the gradient over; its arrival runs the optimizer's handler
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch

from lohan_fx.errors import LohanError

Look = tuple[torch._ops.OpOverload, int] | None
"""Where memory is looked at: as a ``fetch`` or an ``offload_grad`` moves the parameter, or the gradient, of a slot; None: as a
graph begins."""


class Handler(Protocol):
    """What the runtime of a compiled model does for each op."""

    def fetch(self, shell: torch.Tensor, slot: int) -> torch.Tensor: ...
    def swap_out(self, x: torch.Tensor, slot: int, tier: str) -> torch.Tensor: ...
    def swap_in(self, handle: torch.Tensor, slot: int) -> torch.Tensor: ...
    def offload_grad(self, g: torch.Tensor, slot: int) -> None: ...


class _Expected(threading.local):
    """What is under way to this thread: a graph waits on the thread that it started things on."""

    def __init__(self) -> None:
        self.arrivals: dict[int, Callable[[], None]] = {}


_library = torch.library.Library("lohan", "DEF")
_library.define("fetch(Tensor shell, int slot) -> Tensor")
_library.define("swap_out(Tensor x, int slot, str tier) -> Tensor")
_library.define("swap_in(Tensor handle, int slot) -> Tensor")
_library.define("wait(Tensor(a) t) -> Tensor(a)")
_library.define("offload_grad(Tensor g, int slot) -> ()")

_handlers: dict[int, Handler] = {}
_expected = _Expected()
_slots = itertools.count()
_lock = threading.Lock()


def new_slots(count: int) -> range:
    """``count`` slot numbers that no other model of this process uses."""
    with _lock:
        first = next(_slots)
        for _ in range(count - 1):
            next(_slots)
    return range(first, first + count)


def bind(slots: Iterable[int], handler: Handler) -> None:
    """From now on the ops on ``slots`` go to ``handler``."""
    _handlers.update(dict.fromkeys(slots, handler))


def unbind(slots: Iterable[int]) -> None:
    """Forget ``slots``; an op on one of them raises from now on."""
    for slot in slots:
        _handlers.pop(slot, None)


def expect(t: torch.Tensor, arrival: Callable[[], None]) -> None:
    """``wait(t)`` will call ``arrival``, which returns once ``t`` holds its value, or raises what went wrong.

    The runtime that expects ``t`` keeps it alive until then, so that its address names it.
    """
    _expected.arrivals[t._cdata] = arrival


@contextlib.contextmanager
def expecting() -> Iterator[None]:
    """Around a graph: where it fails, what it started and will not wait for any more is let go."""
    before = dict(_expected.arrivals)
    try:
        yield
    except BaseException:
        _expected.arrivals = before
        raise


def _handler(slot: int) -> Handler:
    handler = _handlers.get(slot)
    if handler is None:
        raise LohanError(
            f"slot {slot} has no runtime: its model was released; call lohan_fx.compile on the model again"
        )
    return handler


def _fetch(shell: torch.Tensor, slot: int) -> torch.Tensor:
    return _handler(slot).fetch(shell, slot)


def _swap_out(x: torch.Tensor, slot: int, tier: str) -> torch.Tensor:
    return _handler(slot).swap_out(x, slot, tier)


def _swap_in(handle: torch.Tensor, slot: int) -> torch.Tensor:
    return _handler(slot).swap_in(handle, slot)


def _wait(t: torch.Tensor) -> torch.Tensor:
    arrival = _expected.arrivals.pop(t._cdata, None)
    if arrival is not None:
        arrival()
    return t


def _offload_grad(g: torch.Tensor, slot: int) -> None:
    _handler(slot).offload_grad(g, slot)


_library.impl("fetch", _fetch, "CompositeExplicitAutograd")
_library.impl("swap_out", _swap_out, "CompositeExplicitAutograd")
_library.impl("swap_in", _swap_in, "CompositeExplicitAutograd")
_library.impl("wait", _wait, "CompositeExplicitAutograd")
_library.impl("offload_grad", _offload_grad, "CompositeExplicitAutograd")

_library.impl("fetch", lambda shell, slot: torch.empty_like(shell), "Meta")
_library.impl("swap_out", lambda x, slot, tier: empty_handle(x.device), "Meta")
_library.impl("wait", lambda t: t, "Meta")
_library.impl("offload_grad", lambda g, slot: None, "Meta")


def empty_handle(device: torch.device) -> torch.Tensor:
    """What a handle looks like: uint8, shape (0,), no bytes."""
    return torch.empty(0, dtype=torch.uint8, device=device)


FETCH: Any = torch.ops.lohan.fetch.default
SWAP_OUT: Any = torch.ops.lohan.swap_out.default
SWAP_IN: Any = torch.ops.lohan.swap_in.default
WAIT: Any = torch.ops.lohan.wait.default
OFFLOAD_GRAD: Any = torch.ops.lohan.offload_grad.default

STARTS = (FETCH, SWAP_IN)
ALL = (FETCH, SWAP_OUT, SWAP_IN, WAIT, OFFLOAD_GRAD)

FUNCTIONS: dict[Any, Callable[..., Any]] = {
    FETCH: _fetch,
    SWAP_OUT: _swap_out,
    SWAP_IN: _swap_in,
    WAIT: _wait,
    OFFLOAD_GRAD: _offload_grad,
}
"""What runs each op. By way of the dispatcher a call lets other threads have the interpreter, twice, and waits to get it back."""

for _op in (SWAP_OUT, OFFLOAD_GRAD):
    torch.fx.node.has_side_effect(_op)
