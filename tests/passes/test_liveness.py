"""liveness against an interpreter that looks at the storages which are really alive after each node."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_leaves

from lohan_fx import ops
from lohan_fx.passes.annotate import annotate
from lohan_fx.passes.halves import Halves
from lohan_fx.passes.liveness import Peak, alive, bytes_at, device_peaks, peak_bytes, peaks, rises, swap_out_room
from lohan_fx.plan import Keep, Plan, Swap, Tier, Windows
from tests.passes.fake_runtime import FakeRuntime, backward_inputs, bound, forward_inputs
from tests.passes.graphs import DECISIONS, MODELS, WINDOWS, Captured, both, captured, plan_for, rewrite, take_scratch


class Meter(fx.Interpreter):
    """Measures, after each op, the distinct storages of all values that are still to be read.

    ``held``: tensors that the caller holds; ``left_out``: storages that do not count.
    """

    def measure(self, *args: Any, held: list[Any], left_out: list[torch.Tensor]) -> Peak:
        self.held, self.left_out = held, {t.untyped_storage().data_ptr() for t in left_out}
        self.found: Peak | None = None
        self.end = 0
        self.result = self.run(*args)
        assert self.found is not None
        return Peak(self.found.bytes, self.found.node, self.end)

    def run_node(self, n: Node) -> Any:
        if n.op == "call_function" and self.found is None:
            self.found = Peak(self.alive(None), "inputs", 0)
        result = super().run_node(n)
        if n.op == "call_function":
            assert self.found is not None
            alive = self.alive(result)
            if alive > self.found.bytes:
                self.found = Peak(alive, n.name, 0)
        if n.op == "output":
            self.end = self.alive(result)
        return result

    def alive(self, result: Any) -> int:
        values = [*self.env.values(), result, self.held]
        storages = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for t in tree_leaves(values)
            if torch.is_tensor(t)
        }
        return sum(nbytes for address, nbytes in storages.items() if address not in self.left_out)


def measured(found: Captured, halves: Halves, *, resident: bool) -> dict[str, Peak]:
    """The peaks of both halves while they run with a fake runtime."""
    runtime = FakeRuntime(found.parameter_values(), resident=range(len(found.parameters)) if resident else ())
    at_home = list(runtime.parameters.values()) if resident else []
    with bound(halves, runtime), torch.no_grad():
        inputs = forward_inputs(found, shells=True)
        forward, backward = Meter(both(halves)[0]), Meter(both(halves)[1])
        first = forward.measure(*inputs, held=inputs, left_out=at_home)
        taken = backward_inputs(halves, found, list(forward.result))
        forward.env.clear()
        second = backward.measure(*taken, held=inputs, left_out=at_home)
    return {"forward": first, "backward": second}


class Looks(Meter):
    """Measures, from each fetch and each gradient that leaves (and from the beginning) to the next, how far memory rises where
    nothing that is handed over meanwhile has left before the end."""

    def run_node(self, n: Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        if self.found is None:
            self.handed_over: list[torch.Tensor] = []
            self.look, self.base, self.rises = None, self.alive(None), {None: 0}
        if n.target in (ops.FETCH, ops.OFFLOAD_GRAD):
            self.handed_over.clear()
            self.look, self.base = (n.target, n.args[1]), self.alive(None)
        if n.target in (ops.SWAP_OUT, ops.OFFLOAD_GRAD):
            self.handed_over.append(self.env[n.all_input_nodes[0]])
        result = super().run_node(n)
        self.rises[self.look] = max(self.rises.get(self.look, 0), self.alive(result) - self.base)
        return result

    def alive(self, result: Any) -> int:
        return super().alive((result, self.handed_over))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("decision", DECISIONS)
def test_rises_are_those_of_the_storages_that_are_alive(name: str, decision: str) -> None:
    found = captured(name)
    plan = plan_for(found, DECISIONS[decision](found))
    halves = rewrite(found, plan)
    runtime = FakeRuntime(found.parameter_values())
    with bound(halves, runtime), torch.no_grad():
        inputs = forward_inputs(found, shells=True)
        forward, backward = Looks(both(halves)[0]), Looks(both(halves)[1])
        first = forward.measure(*inputs, held=inputs, left_out=[])
        taken = backward_inputs(halves, found, list(forward.result))
        forward.env.clear()
        second = backward.measure(*taken, held=inputs, left_out=[])
    expected = {"forward": forward.rises, "backward": backward.rises}
    assert rises(halves, plan) == expected
    assert all(max(half.values()) > 0 for half in expected.values())
    assert first.bytes > 0 and second.bytes > 0


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("decision", DECISIONS)
def test_peaks_are_those_of_the_storages_that_are_alive(name: str, decision: str) -> None:
    found = captured(name)
    plan = plan_for(found, DECISIONS[decision](found))
    halves = rewrite(found, plan)
    expected = measured(found, halves, resident=False)
    held_elsewhere = _inputs_that_do_not_cross(found, halves)
    backward = expected["backward"]
    expected["backward"] = Peak(backward.bytes - held_elsewhere, backward.node, backward.end_bytes - held_elsewhere)
    assert peaks(halves, plan) == expected


def _inputs_that_do_not_cross(found: Captured, halves: Halves) -> int:
    """The backward knows nothing of them, but the caller holds them all the same."""
    inputs = {name: v for name, v in found.values.items() if name not in found.parameters and torch.is_tensor(v)}
    return sum(value.nbytes for name, value in inputs.items() if name not in halves.saved_placeholders())


@pytest.mark.parametrize("decision", DECISIONS)
def test_what_kernels_take_is_there_while_they_run(decision: str) -> None:
    found = captured("transformer")
    plan = plan_for(found, DECISIONS[decision](found))
    halves = rewrite(found, plan)
    before, ends = bytes_at(halves, plan), {half: peak.end_bytes for half, peak in peaks(halves, plan).items()}
    without = list(alive(halves, plan))
    matmuls = take_scratch(halves, 1 << 20)
    for half, alive_at in bytes_at(halves, plan).items():
        more = {name: nbytes - before[half][name] for name, nbytes in alive_at.items()}
        assert more == {name: (1 << 20) * (name in matmuls) for name in more}
        assert any(more.values())
    assert {half: peak.end_bytes for half, peak in peaks(halves, plan).items()} == ends
    assert all(peak.bytes > 1 << 20 and peak.node in matmuls for peak in device_peaks(halves, plan).values())
    assert list(alive(halves, plan, scratch=False)) == without


def test_parameters_at_home_on_the_device_are_left_out() -> None:
    found = captured("transformer")
    plan = plan_for(found, Keep(), home=Tier.DEVICE)
    halves = rewrite(found, plan)
    expected, streamed = measured(found, halves, resident=True), peaks(halves, plan_for(found, Keep()))
    assert peaks(halves, plan) == expected
    assert streamed["forward"].bytes > expected["forward"].bytes


def test_windows_cost_what_they_hold() -> None:
    found = captured("transformer")
    plan = plan_for(found, Swap(Tier.HOST))
    everything_at_once = peaks(rewrite(found, plan), plan)
    narrow = plan_for(found, Swap(Tier.HOST), windows=_windows(0))
    one_by_one = peaks(rewrite(found, narrow), narrow)
    parameters = sum(v.nbytes for v in found.parameter_values().values())
    assert everything_at_once["forward"].bytes >= parameters > one_by_one["forward"].bytes


def _windows(nbytes: int) -> Windows:
    return replace(WINDOWS, fetch_bytes=nbytes, swap_in_bytes=nbytes)


def test_what_is_swapped_does_not_stay() -> None:
    found = captured("transformer")
    ends = {
        str(decision): peaks(rewrite(found, plan_for(found, decision)), plan_for(found, decision))["forward"].end_bytes
        for decision in (Keep(), Swap(Tier.HOST))
    }
    assert ends["swap:host"] < ends["keep"] / 10


# --- what is leaving ------------------------------------------------------------------------------------------


class Lingering(FakeRuntime):
    """Nothing leaves the device before the windows ask for it."""

    def __init__(self, parameters: Any, windows: Windows) -> None:
        super().__init__(parameters)
        self.leaving: dict[str, list[torch.Tensor]] = {"swaps": [], "gradients": []}
        self.limits = {"swaps": windows.swap_out_bytes, "gradients": windows.gradient_bytes}
        self.sent: dict[int, torch.Tensor] = {}

    def swap_out(self, x: torch.Tensor, slot: int, tier: str) -> torch.Tensor:
        self.linger("swaps", x)
        self.sent[slot] = x
        return super().swap_out(x, slot, tier)

    def swap_in(self, handle: torch.Tensor, slot: int) -> torch.Tensor:
        back = self.sent.pop(slot, None)
        waiting = self.leaving["swaps"]
        gone = next((place for place, x in enumerate(waiting) if x is back), -1)
        del waiting[: gone + 1]
        return super().swap_in(handle, slot)

    def offload_grad(self, g: torch.Tensor, slot: int) -> None:
        self.linger("gradients", g)
        super().offload_grad(g, slot)

    def linger(self, kind: str, x: torch.Tensor) -> None:
        waiting = self.leaving[kind]
        while waiting and sum(map(_storage_bytes, (*waiting, x))) > self.limits[kind]:
            del waiting[0]
        waiting.append(x)


def _storage_bytes(x: torch.Tensor) -> int:
    return x.untyped_storage().nbytes()


def lingering(found: Captured, plan: Plan) -> dict[str, int]:
    """The peaks of both halves where nothing leaves before it must."""
    halves = rewrite(found, plan)
    runtime = Lingering(found.parameter_values(), plan.windows)
    with bound(halves, runtime), torch.no_grad():
        inputs = forward_inputs(found, shells=True)
        forward, backward = Meter(both(halves)[0]), Meter(both(halves)[1])
        first = forward.measure(*inputs, held=[inputs, runtime.leaving], left_out=[])
        taken = backward_inputs(halves, found, list(forward.result))
        forward.env.clear()
        runtime.sent = {slot: x for slot, x in runtime.sent.items() if any(x is y for y in runtime.leaving["swaps"])}
        second = backward.measure(*taken, held=[inputs, runtime.leaving], left_out=[])
    return {"forward": first.bytes, "backward": second.bytes - _inputs_that_do_not_cross(found, halves)}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("window", [0, 3000, 1 << 30])
def test_no_runtime_that_obeys_the_windows_needs_more(name: str, window: int) -> None:
    found = captured(name)
    given = replace(WINDOWS, swap_out_bytes=window, gradient_bytes=window)
    plan = plan_for(found, Swap(Tier.HOST), windows=given)
    halves = rewrite(found, plan)
    bound_of, without, needed = device_peaks(halves, plan), peaks(halves, plan), lingering(found, plan)
    for half, most in needed.items():
        assert without[half].bytes <= most <= bound_of[half].bytes
    if window == 1 << 30:
        assert needed["forward"] == bound_of["forward"].bytes


def test_the_widest_window_that_fits() -> None:
    found = captured("transformer")
    plan = plan_for(found, Swap(Tier.HOST))
    halves = rewrite(found, plan)

    def peak(window: int) -> int:
        asked = replace(plan, windows=replace(plan.windows, swap_out_bytes=window))
        return max(half.bytes for half in device_peaks(halves, asked).values())

    everything = swap_out_room(halves, plan, 1 << 40)
    assert peak(everything) == peak(1 << 40) > peak(0)
    for limit in range(peak(0), peak(everything), (peak(everything) - peak(0)) // 7):
        room = swap_out_room(halves, plan, limit)
        assert peak(room) <= limit < peak(room + 1)


# --- by hand --------------------------------------------------------------------------------------------------

aten = torch.ops.aten


def graph_of(*calls: tuple[str, Any, tuple[Any, ...], object], outputs: tuple[str, ...]) -> GraphModule:
    """(name, op or None for an input, arguments where a name stands for its node, value)."""
    graph = Graph()
    made: dict[str, Node] = {}
    for name, op, args, value in calls:
        arguments = tuple(made.get(a, a) if isinstance(a, str) else a for a in args)
        made[name] = (
            graph.placeholder(name) if op is None else graph.create_node("call_function", op, arguments, name=name)
        )
        made[name].meta["val"] = value
    graph.output(tuple(made[name] for name in outputs))
    gm = GraphModule({}, graph)
    annotate(gm)
    return gm


def floats(count: int) -> torch.Tensor:
    return torch.empty(count)


def test_a_view_keeps_its_storage_alive() -> None:
    gm = graph_of(
        ("x", None, (), floats(8)),
        ("a", aten.relu.default, ("x",), floats(8)),
        ("v", aten.view.default, ("a", [2, 4]), floats(8)),
        ("b", aten.sum.default, ("x",), floats(1)),
        ("c", aten.sum.default, ("v",), floats(1)),
        outputs=("b", "c"),
    )
    assert peak_bytes(gm) == Peak(4 * (8 + 8 + 1), "b", 4 * 2)


def test_held_inputs_outputs_and_their_views_do_not_die() -> None:
    gm = graph_of(
        ("x", None, (), floats(8)),
        ("y", None, (), floats(4)),
        ("a", aten.relu.default, ("x",), floats(8)),
        ("v", aten.view.default, ("a", [2, 4]), floats(8)),
        ("b", aten.sum.default, ("y",), floats(1)),
        outputs=("v", "b"),
    )
    assert peak_bytes(gm, held=["x", "y"]).end_bytes == 4 * (8 + 4 + 8 + 1)
    assert peak_bytes(gm, held=["y"]).end_bytes == 4 * (4 + 8 + 1)
    assert peak_bytes(gm).end_bytes == 4 * (8 + 1)
    assert peak_bytes(gm, shells=["x"]).bytes == 4 * (4 + 8 + 1)


def test_results_of_one_op_are_alive_from_the_op_on_also_those_that_nothing_reads() -> None:
    gm = graph_of(
        ("x", None, (), floats(8)),
        ("pair", aten.native_dropout.default, ("x", 0.5, True), (floats(8), floats(8))),
        ("first", operator.getitem, ("pair", 0), floats(8)),
        ("a", aten.sum.default, ("first",), floats(1)),
        outputs=("a",),
    )
    assert peak_bytes(gm) == Peak(4 * (8 + 16), "pair", 4 * 1)


def test_parts_stay_until_the_last_has_been_taken_out() -> None:
    gm = graph_of(
        ("x", None, (), floats(8)),
        ("pair", aten.native_dropout.default, ("x", 0.5, True), (floats(8), floats(2))),
        ("first", operator.getitem, ("pair", 0), floats(8)),
        ("a", aten.sum.default, ("first",), floats(1)),
        ("b", aten.relu.default, ("a",), floats(6)),
        ("second", operator.getitem, ("pair", 1), floats(2)),
        ("c", aten.sum.default, ("second",), floats(1)),
        outputs=("b", "c"),
    )
    assert peak_bytes(gm) == Peak(4 * (8 + 8 + 2), "pair", 4 * 7)
    assert peak_bytes(gm, shells=["x"]) == Peak(4 * (8 + 2 + 1 + 6), "b", 4 * 7)


def test_an_input_that_nothing_reads_and_no_inputs_at_all() -> None:
    assert peak_bytes(graph_of(("x", None, (), floats(8)), outputs=())) == Peak(32, "inputs", 32)
    assert peak_bytes(graph_of(outputs=())) == Peak(0, "inputs", 0)
