"""segment_trial: a compiled segment beside the ops that it replaces: bits, bytes, seconds.

Both run on the same random numbers, in tensors of the segment's own shapes, strides and dtypes. Outputs are compared by
their checksums, so that no more memory is taken than in training.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch.fx import Node
from torch.fx.graph import _BoxedCodeGen
from torch.utils._python_dispatch import _disable_current_modes

from lohan_fx import meta
from lohan_fx.measuring.op_times import timed
from lohan_fx.passes.cut_segments import Run, Segment, extract

PATTERN_ELEMENTS = 1_000_003
"""Distinct numbers per input; a prime, so that no two rows get the same."""
TIMED_ROUNDS = 3
COLD_BYTES = 32 << 20
"""Before each timed run so many other bytes are touched, as in a graph, where an op finds its inputs in memory."""


@dataclass(frozen=True)
class Trial:
    """``peak_bytes``: most bytes that a call makes beside its inputs, None if that could not be counted; ``*seconds``:
    the fastest of some calls."""

    is_exact: bool
    peak_bytes: int | None
    seconds: float
    ops_seconds: float


def try_out(segment: Segment, run: Run, namespace: dict[str, Any]) -> Trial:
    """``run`` against the ops of ``segment``; ``namespace``: the names that the code of ``run`` sees."""
    with _disable_current_modes(), torch.no_grad():
        ops = _op_by_op(segment)
        exact = True
        for signed in (True, False):  # numbers of both signs, and positive ones, for roots and logarithms
            inputs = _inputs(segment, signed=signed)
            exact = exact and _checksum(ops(list(inputs))) == _checksum(run(list(inputs)))
        peak_bytes = _peak_bytes(run, inputs, namespace)
        seconds, ops_seconds = _alternating_seconds(inputs, run, ops)
    return Trial(exact, peak_bytes, seconds, ops_seconds)


def empty_like(node: Node) -> torch.Tensor:
    """A tensor like the value of ``node``, on its device."""
    value = meta.tensor(node)
    assert value is not None, f"{node.name} is not a tensor"
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _op_by_op(segment: Segment) -> Run:
    gm = extract(segment)
    gm.graph.set_codegen(_BoxedCodeGen())
    gm.recompile()

    def run(args: list[Any]) -> Sequence[Any]:
        return gm.forward(args)  # type: ignore[no-any-return]

    return run


def _inputs(segment: Segment, *, signed: bool) -> list[torch.Tensor]:
    pattern = torch.randn(PATTERN_ELEMENTS, generator=torch.Generator().manual_seed(len(segment.inputs)))
    made = []
    for node in segment.inputs:
        pattern = pattern.roll(1013)
        made.append(empty_like(node))
        _fill(made[-1], pattern if signed else pattern.abs() + 1e-3)
    return made


def _fill(tensor: torch.Tensor, pattern: torch.Tensor) -> None:
    if tensor.dtype is torch.bool:
        pattern = pattern > 0.5
    elif not tensor.dtype.is_floating_point:
        pattern = 3 * pattern.abs()
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    for piece in tensor.as_strided((elements,), (1,)).split(len(pattern)):
        piece.copy_(pattern[: len(piece)])


def _checksum(outputs: Sequence[torch.Tensor]) -> bytes:
    """Of dtypes, shapes, strides, and all bits but those by which not-a-numbers differ."""
    total = xxhash.xxh3_128()
    for output in outputs:
        total.update(repr((output.dtype, tuple(output.shape), output.stride())).encode())
        elements = _storage_bytes(output) // output.element_size()
        for piece in output.as_strided((elements,), (1,)).split(PATTERN_ELEMENTS):
            bits = piece.cpu()
            if bits.dtype.is_floating_point:
                bits = bits.masked_fill(bits.isnan(), 0)
            total.update(bits.view(torch.uint8).numpy().data)
    return total.digest()


def _peak_bytes(run: Run, inputs: Sequence[torch.Tensor], namespace: dict[str, Any]) -> int | None:
    """Counted where the code of ``run`` allocates, which is where ``namespace`` says; None if it does so elsewhere."""
    alive = peak = made = 0

    def let_go(nbytes: int) -> None:
        nonlocal alive
        alive -= nbytes

    def counted(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def allocating(*args: Any) -> torch.Tensor:
            nonlocal alive, peak, made
            value = allocate(*args)
            nbytes = _storage_bytes(value)
            weakref.finalize(value.untyped_storage(), let_go, nbytes)
            alive, made = alive + nbytes, made + nbytes
            peak = max(peak, alive)
            return value

        return allocating

    allocators = {name: held for name, held in namespace.items() if name.startswith("empty_strided_")}
    namespace.update({name: counted(held) for name, held in allocators.items()})
    try:
        outputs = run(list(inputs))
    finally:
        namespace.update(allocators)
    return peak if made >= sum(_storage_bytes(output) for output in outputs) else None


def _storage_bytes(value: torch.Tensor) -> int:
    return value.untyped_storage().nbytes()


def _alternating_seconds(inputs: Sequence[torch.Tensor], *runs: Run) -> tuple[float, ...]:
    device = inputs[0].device if inputs else torch.device("cpu")
    cold = torch.empty(COLD_BYTES, dtype=torch.uint8, device=device)
    found: list[list[float]] = [[] for _ in runs]
    for number in range(TIMED_ROUNDS):
        for run, taken in zip(runs, found, strict=True):
            cold.fill_(number)
            taken.append(timed(lambda run=run: run(list(inputs)), device))  # type: ignore[misc]
    return tuple(min(taken) for taken in found)
