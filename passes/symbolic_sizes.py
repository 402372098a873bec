"""symbolic_sizes: graphs that were traced for many sizes at once: up to which ones they hold, and which ones a call has.

Dynamo traces a second input shape with symbols for the sizes that have changed. What is planned for such a graph are its sizes
when it was traced, so larger inputs get graphs, and a plan, of their own (``hold_up_to_traced``). What has smaller ones runs by
this plan, in less memory (docs/0048).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import sympy
import torch
from torch.fx import GraphModule

from lohan_fx import meta
from lohan_fx.passes.annotate import as_expr, at_hint

Sizes = tuple[int, ...]
SHARES_TRIED = (0.0, 0.25, 0.5, 0.75, 0.99)
"""Of the traced sizes."""
NEGLIGIBLE_BYTES = 64 << 10


def is_symbolic(gm: GraphModule) -> bool:
    """Whether ``gm`` was traced for many sizes."""
    return bool(_inputs(gm))


def hold_up_to_traced(gm: GraphModule) -> None:
    """Have Dynamo trace anew for inputs larger than those that ``gm`` is being traced with, in any size; or for all others, where
    some value takes more memory for smaller ones, as what a decoder fills up to a given length does."""
    inputs = _inputs(gm)
    if not inputs:
        return
    sizes = (size for n in gm.graph.nodes for size in _symbolic(meta.value(n)))
    used = set[sympy.Symbol]().union(*(size.node.expr.free_symbols for size in sizes))
    most = _takes_most_as_traced(gm, inputs)
    for size in inputs:
        if size.node.expr.free_symbols & used:
            # A comparison of a symbolic size is noted, and guards the graph; not within an assert, which python -O leaves out.
            held = bool(size <= at_hint(size) if most else size == at_hint(size))
            assert held


def _takes_most_as_traced(gm: GraphModule, inputs: Sequence[torch.SymInt]) -> bool:
    """Whether no value of ``gm`` is larger for smaller inputs, as far as trying some tells; by less than ``NEGLIGIBLE_BYTES``
    does not count."""
    traced: dict[sympy.Symbol, int] = {
        size.node.expr: at_hint(size) for size in inputs if isinstance(size.node.expr, sympy.Symbol)
    }
    values = (value for n in gm.graph.nodes for value in _tensors(meta.value(n)) if _symbolic(value))
    takes = {sympy.prod(map(as_expr, value.shape)) * value.element_size() for value in values}
    if any(not nbytes.free_symbols <= traced.keys() for nbytes in takes):
        return False
    for share in SHARES_TRIED:
        less = {symbol: max(min(2, size), int(share * size)) for symbol, size in traced.items()}
        for tried in (less, *(traced | {symbol: size} for symbol, size in less.items())):
            if any(_at(nbytes, tried) > _at(nbytes, traced) + NEGLIGIBLE_BYTES for nbytes in takes):
                return False
    return True


def _at(expr: sympy.Expr, sizes: Mapping[sympy.Symbol, int]) -> int:
    return int(cast(Any, expr.xreplace({symbol: sympy.Integer(size) for symbol, size in sizes.items()})))


def _inputs(gm: GraphModule) -> list[torch.SymInt]:
    """The symbolic sizes of the inputs, and the inputs that are integers themselves."""
    values = [meta.value(node) for node in gm.graph.find_nodes(op="placeholder")]
    numbers = [value for value in values if isinstance(value, torch.SymInt)]
    return numbers + [size for value in values for size in _symbolic(value)]


def _symbolic(value: object) -> list[torch.SymInt]:
    """The sizes of the tensors in ``value`` that are no numbers."""
    sizes: list[int | torch.SymInt] = [size for tensor in _tensors(value) for size in tensor.shape]
    return [size for size in sizes if isinstance(size, torch.SymInt)]


def _tensors(value: object) -> list[torch.Tensor]:
    if isinstance(value, tuple | list):
        return [tensor for item in value for tensor in _tensors(item)]
    return [value] if isinstance(value, torch.Tensor) else []


def has_numbers(value: torch.Tensor) -> bool:
    """Whether no size or stride of ``value`` is symbolic."""
    return all(isinstance(size, int) for size in (*value.shape, *value.stride()))


def is_dense(value: torch.Tensor) -> bool:
    """Whether ``value`` fills a stretch of memory, whatever its symbolic sizes are."""
    if has_numbers(value):
        span = 1 + sum((size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True))
        return bool(span == value.numel())
    return _fills(tuple(map(as_expr, value.shape)), tuple(map(as_expr, value.stride())))


@functools.lru_cache(maxsize=4096)
def _fills(shape: tuple[sympy.Expr, ...], stride: tuple[sympy.Expr, ...]) -> bool:
    span = sum(((size - 1) * step for size, step in zip(shape, stride, strict=True)), sympy.Integer(1))
    return bool(sympy.expand(span - sympy.prod(shape)) == 0)


class CallSizes:
    """The sizes of the calls of one graph. ``planned``: those that it was traced with."""

    def __init__(self, gm: GraphModule) -> None:
        self._tell: dict[sympy.Symbol, Callable[[Sequence[Any]], int]] = {}
        planned: list[int] = []
        for place, node in enumerate(gm.graph.find_nodes(op="placeholder")):
            value = meta.value(node)
            for size, tell in _told(value, place):
                symbol = size.node.expr
                if isinstance(symbol, sympy.Symbol) and symbol not in self._tell:
                    self._tell[symbol] = tell
                    planned.append(at_hint(size))
        self.planned: Sizes = tuple(planned)

    def of(self, inputs: Sequence[Any]) -> Sizes:
        """Those of a call with ``inputs``."""
        return tuple([tell(inputs) for tell in self._tell.values()])

    def know(self, value: torch.Tensor) -> bool:
        """Whether they tell the shape of ``value``."""
        return all(as_expr(size).free_symbols <= self._tell.keys() for size in (*value.shape, *value.stride()))

    def shaped(self, values: dict[str, torch.Tensor], sizes: Sizes) -> dict[str, tuple[torch.Size, Sizes]]:
        """Name -> (shape, strides) of ``values`` in a call of ``sizes``."""
        at = {symbol: sympy.Integer(size) for symbol, size in zip(self._tell, sizes, strict=True)}

        @functools.cache
        def number(size: sympy.Expr) -> int:
            return int(cast(Any, size.xreplace(at)))

        def numbers(sizes: Sequence[Any]) -> Sizes:
            return tuple(number(size.node.expr) if isinstance(size, torch.SymInt) else int(size) for size in sizes)

        return {name: (torch.Size(numbers(v.shape)), numbers(v.stride())) for name, v in values.items()}


def _told(value: object, place: int) -> list[tuple[torch.SymInt, Callable[[Sequence[Any]], int]]]:
    """What the input at ``place`` tells of the sizes that ``value``, which stands for it, has."""
    if isinstance(value, torch.SymInt):
        return [(value, lambda inputs: int(inputs[place]))]
    shape: Sequence[int | torch.SymInt] = value.shape if isinstance(value, torch.Tensor) else ()
    return [
        (size, functools.partial(_size_of, place, dimension))
        for dimension, size in enumerate(shape)
        if isinstance(size, torch.SymInt)
    ]


def _size_of(place: int, dimension: int, inputs: Sequence[Any]) -> int:
    return int(inputs[place].shape[dimension])
