"""A runtime that does at once, from dicts, what the real one does in time, and spoils what a wrong graph would read.

What has been started but not waited for, a value that has been swapped out, and a parameter whose gradient has left
hold garbage: a graph that reads one of them gives other numbers than eager PyTorch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from lohan_fx import ops
from lohan_fx.passes.halves import Halves
from tests.passes.graphs import Captured, forward_values

SEED = 7


def spoil(t: torch.Tensor) -> None:
    """Overwrite the storage of ``t``."""
    with torch.no_grad():
        t.fill_(float("nan") if t.is_floating_point() else 0)


class FakeRuntime:
    """``lohan_fx.ops.Handler`` over dicts. ``parameters``: slot -> value; ``calls``: (op, slot) in order."""

    def __init__(self, parameters: Mapping[int, torch.Tensor], *, resident: Collection[int] = ()) -> None:
        self.parameters = {slot: value.clone() for slot, value in parameters.items()}
        self.resident = resident
        self.swapped: dict[int, tuple[torch.Tensor, str]] = {}
        self.gradients: dict[int, torch.Tensor] = {}
        self.calls: list[tuple[str, int]] = []

    def fetch(self, shell: torch.Tensor, slot: int) -> torch.Tensor:
        self.calls.append(("fetch", slot))
        assert shell.untyped_storage().nbytes() == 0
        value = self.parameters[slot]
        return value if slot in self.resident else self._arriving(value)

    def swap_out(self, x: torch.Tensor, slot: int, tier: str) -> torch.Tensor:
        self.calls.append(("swap_out", slot))
        assert slot not in self.swapped
        self.swapped[slot] = x.clone(), tier
        spoil(x)
        return ops.empty_handle(x.device)

    def swap_in(self, handle: torch.Tensor, slot: int) -> torch.Tensor:
        self.calls.append(("swap_in", slot))
        assert handle.dtype is torch.uint8 and handle.numel() == 0
        return self._arriving(self.swapped.pop(slot)[0])

    def offload_grad(self, g: torch.Tensor, slot: int) -> None:
        self.calls.append(("offload_grad", slot))
        assert slot not in self.gradients
        self.gradients[slot] = g.clone()
        spoil(self.parameters[slot])

    @staticmethod
    def _arriving(value: torch.Tensor) -> torch.Tensor:
        arriving = torch.empty_like(value)
        spoil(arriving)

        def arrive() -> None:
            arriving.copy_(value)

        ops.expect(arriving, arrive)
        return arriving


@contextmanager
def bound(halves: Halves, runtime: FakeRuntime) -> Iterator[None]:
    """Within: the slots of ``halves`` go to ``runtime``."""
    slots = [*(p.slot for p in halves.parameters.values()), *halves.activation_slots]
    ops.bind(slots, runtime)
    try:
        yield
    finally:
        ops.unbind(slots)


@dataclass(frozen=True)
class Step:
    """Outputs of one training step and the gradients of parameters by slot."""

    outputs: list[torch.Tensor]
    gradients: dict[int, torch.Tensor]

    def equals(self, other: Step) -> bool:
        """Whether every number is the same, bit for bit."""
        return (
            len(self.outputs) == len(other.outputs)
            and all(torch.equal(a, b) for a, b in zip(self.outputs, other.outputs, strict=True))
            and self.gradients.keys() == other.gradients.keys()
            and all(torch.equal(g, other.gradients[slot]) for slot, g in self.gradients.items())
        )


def eager(found: Captured) -> Step:
    """The step as plain PyTorch does it."""
    torch.manual_seed(SEED)
    outputs = found.model(*found.inputs)
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    trained = [p for p in found.parameters.values() if p.trainable]
    by_name = dict(found.model.named_parameters())
    gradients = torch.autograd.grad(outputs, [by_name[p.name] for p in trained], [torch.ones_like(o) for o in outputs])
    return Step([o.detach() for o in outputs], {p.slot: g for p, g in zip(trained, gradients, strict=True)})


def at_another_size(found: Captured, x: torch.Tensor) -> Captured:
    """``found``, captured with a symbolic batch, with ``x`` as its only input."""
    values = {
        name: value if name in found.parameters else x if torch.is_tensor(value) else len(x)
        for name, value in found.values.items()
    }
    return replace(found, inputs=(x,), values=values)


def forward_inputs(found: Captured, *, shells: bool) -> list[Any]:
    """What AOTAutograd would pass: parameters as shells without storage, or (before ``insert_fetches``) as they are."""
    plain = forward_values(found)
    shelled = found.parameters if shells else ()
    return [_shell(value) if name in shelled else value for name, value in zip(found.values, plain, strict=True)]


def backward_inputs(halves: Halves, found: Captured, outputs: list[Any]) -> list[Any]:
    """Sizes, saved values and tangents of ones, from what the forward returned."""
    returned, saved = outputs[: found.num_outputs], outputs[found.num_outputs :]
    crossing = halves.crossing()
    assert len(crossing) == len(saved)
    sizes = [value for value in saved if not torch.is_tensor(value)]
    return [*sizes, *(v for v in saved if torch.is_tensor(v)), *(torch.ones_like(o) for o in returned)]


def run(
    halves: Halves,
    found: Captured,
    *,
    resident: Collection[int] = (),
    interpreter: type[fx.Interpreter] = fx.Interpreter,
) -> Step:
    """The step as ``halves`` do it, with a fake runtime where they have nodes of ours."""
    assert halves.backward is not None
    fetches = any(n.target is ops.FETCH for n in halves.forward.graph.nodes)
    runtime = FakeRuntime(found.parameter_values(), resident=resident)
    torch.manual_seed(SEED)
    with bound(halves, runtime), torch.no_grad():
        outputs = list(interpreter(halves.forward).run(*forward_inputs(found, shells=fetches)))
        returned = [o.clone() for o in outputs[: found.num_outputs]]
        gradients = interpreter(halves.backward).run(*backward_inputs(halves, found, outputs))
    by_node = {halves.gradients[i].slot: g for i, g in enumerate(gradients) if i in halves.gradients and g is not None}
    assert not runtime.swapped, "swapped out and never back"
    return Step(returned, {**by_node, **runtime.gradients})


def _shell(value: torch.Tensor) -> torch.Tensor:
    shell = torch.empty_like(value)
    shell.untyped_storage().resize_(0)
    return shell
