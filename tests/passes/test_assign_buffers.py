"""assign_buffers: lifetimes recomputed from the storages that really are there, and the same bits as in the heap."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

from lohan_fx import meta, ops
from lohan_fx.buffered import Buffered
from lohan_fx.passes.annotate import annotate
from lohan_fx.passes.assign_buffers import (
    SIZES,
    add_rows,
    assign,
    assign_buffers,
    cleared_bytes,
    into,
    is_assignable,
    note_clearing,
    shared_bytes,
    write_into,
    writing,
)
from lohan_fx.passes.halves import Assignment, Halves
from lohan_fx.passes.liveness import device_peaks, storage_of
from lohan_fx.passes.touched_values import outliving_bytes
from lohan_fx.runtime.room import Room
from lohan_fx.runtime.workspace import Workspace
from tests.passes.fake_runtime import (
    SEED,
    FakeRuntime,
    Step,
    at_another_size,
    backward_inputs,
    bound,
    eager,
    forward_inputs,
)
from tests.passes.graphs import DECISIONS, MODELS, Captured, both, capture, captured, plan_for, rewrite

ALL = range(1, sys.maxsize)
aten = torch.ops.aten


def rewritten(name: str, decision: str) -> tuple[Captured, Halves]:
    found = captured(name)
    return found, rewrite(found, plan_for(found, DECISIONS[decision](found)))


class Storages(fx.Interpreter):
    """Notes, for each op, which storages are still to be read after it has run, and which op made which."""

    def run_recording(self, *args: Any) -> list[Any]:
        self.made: dict[int, str] = {}
        self.alive: list[set[int]] = []
        self.kept: list[Any] = []  # so that no address is used twice
        result = self.run(*args)
        self.leaving = {t.untyped_storage().data_ptr() for t in tree_leaves(result) if torch.is_tensor(t)}
        return list(result)

    def run_node(self, n: Node) -> Any:
        reads = [self.env[source] for source in n.all_input_nodes if source in self.env]
        result = super().run_node(n)
        if n.op == "call_function":
            storages = [t.untyped_storage().data_ptr() for t in tree_leaves(result) if torch.is_tensor(t)]
            for storage in storages:
                self.made.setdefault(storage, n.name)
            values = tree_leaves([list(self.env.values()), reads, result])
            self.kept.append(values)
            self.alive.append({t.untyped_storage().data_ptr() for t in values if torch.is_tensor(t)})
        return result


def overlapping(assignment: Assignment, sizes: dict[str, int], run: Storages) -> set[tuple[str, str]]:
    """Pairs of assigned values that share bytes although both are alive at some op."""
    found = set()
    for alive in run.alive:
        names = sorted(run.made[s] for s in alive if run.made.get(s) in assignment.offsets)
        for i, one in enumerate(names):
            for other in names[i + 1 :]:
                a, b = assignment.offsets[one], assignment.offsets[other]
                if a < b + sizes[other] and b < a + sizes[one]:
                    found.add((one, other))
    return found


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("decision", DECISIONS)
def test_values_that_live_at_once_share_no_byte(name: str, decision: str) -> None:
    found, halves = rewritten(name, decision)
    runtime = FakeRuntime(found.parameter_values())
    torch.manual_seed(SEED)
    with bound(halves, runtime), torch.no_grad():
        forward, backward = (Storages(gm) for gm in both(halves))
        outputs = forward.run_recording(*forward_inputs(found, shells=True))
        backward.run_recording(*backward_inputs(halves, found, outputs))
    for gm, run in zip(both(halves), (forward, backward), strict=True):
        assignment = assign(gm, ALL)
        sizes = {n.name: meta.cost(n).bytes for n in gm.graph.nodes}
        assert not overlapping(assignment, sizes, run)
        assert all(o % 64 == 0 and o + sizes[n] <= assignment.nbytes for n, o in assignment.offsets.items())
        assert not {run.made.get(storage) for storage in run.leaving} & assignment.offsets.keys()
        at_once = max((sum(sizes[n] for n in {run.made.get(s) for s in alive} & assignment.offsets.keys())
                       for alive in run.alive), default=0)  # fmt: skip
        assert at_once <= assignment.nbytes
        assert assignment.nbytes <= 64 * len(assignment.offsets) + 2 * at_once


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("decision", DECISIONS)
def test_bits_are_those_of_the_heap(name: str, decision: str) -> None:
    found, halves = rewritten(name, decision)
    assigned = {half: assign(gm, ALL, halves.returned(half)) for half, gm in halves.graphs()}
    assert sum(len(one.offsets) for one in assigned.values()) > 0
    # A swapped value stays where the runtime spoils it, and a gradient where it reads it.
    for half, gm in halves.graphs():
        handed = {n.args[0].name for op in (ops.SWAP_OUT, ops.OFFLOAD_GRAD) for n in gm.graph.find_nodes(
            op="call_function", target=op)}  # fmt: skip
        assert not handed & assigned[half].offsets.keys()
    workspace = Workspace()
    for _ in range(2):
        assert step(found, halves, assigned, workspace).equals(eager(found))


@pytest.mark.parametrize("name", MODELS)
def test_what_is_handed_over_or_crosses_has_a_place_of_its_own(name: str) -> None:
    _, halves = rewritten(name, "mixed")
    theirs = {half: {n.name for n in halves.returned(half)} for half, _ in halves.graphs()}
    outliving: set[str] = set()
    for half, gm in halves.graphs():
        assignment = assign(gm, ALL, halves.returned(half))
        assert not assignment.outliving & (assignment.offsets.keys() | theirs[half])
        outliving |= assignment.outliving
    offloads = both(halves)[1].graph.find_nodes(op="call_function", target=ops.OFFLOAD_GRAD)
    assert outliving & {storage_of(n.args[0]).name for n in offloads}
    swapped = halves.forward.graph.find_nodes(op="call_function", target=ops.SWAP_OUT)
    assert {storage_of(n.args[0]).name for n in swapped if is_assignable(storage_of(n.args[0]))} <= outliving


def test_room_for_what_outlives_is_what_lives_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lohan_fx.passes.assign_buffers.SIZES", (ALL,))
    found, halves = rewritten("transformer", "keep")
    plan = plan_for(found, DECISIONS["keep"](found))
    assert outliving_bytes(halves, plan) == 0  # nothing is assigned yet
    assign_buffers(halves, plan, room_bytes=1 << 30)
    sizes = {n.name: meta.cost(n).bytes for n in halves.forward.graph.nodes}
    crossing = sum(sizes[name] for name in halves.assigned["forward"].outliving)
    assert crossing <= outliving_bytes(halves, plan) <= max(p.bytes for p in device_peaks(halves, plan).values())


def step(found: Captured, halves: Halves, assigned: dict[str, Assignment], workspace: Workspace) -> Step:
    nbytes, room = shared_bytes(assigned), Room()
    room.reserve(1 << 20)
    linked = [Buffered(gm, assigned[half], workspace, nbytes, room) for half, gm in halves.graphs()]
    return run_linked(found, halves, linked, workspace, nbytes)


def run_linked(found: Captured, halves: Halves, linked: Sequence[Buffered], workspace: Workspace, nbytes: int) -> Step:
    forward, backward = linked
    runtime = FakeRuntime(found.parameter_values())
    torch.manual_seed(SEED)
    with bound(halves, runtime), torch.no_grad():
        spoil(workspace, nbytes)
        outputs = list(forward(forward_inputs(found, shells=True)))
        spoil(workspace, nbytes)
        returned = [o.clone() for o in outputs[: found.num_outputs]]
        list(backward(backward_inputs(halves, found, outputs)))
    return Step(returned, runtime.gradients)


def spoil(workspace: Workspace, nbytes: int) -> None:
    with workspace.borrowed(nbytes) as memory:
        assert memory is not None
        memory.fill_(255)  # NaN in every floating-point type


def test_a_graph_takes_the_heap_while_another_has_the_workspace() -> None:
    found, halves = rewritten("transformer", "keep")
    assigned = {half: assign(gm, ALL, halves.returned(half)) for half, gm in halves.graphs()}
    workspace = Workspace()
    forward = Buffered(halves.forward, assigned["forward"], workspace, shared_bytes(assigned), Room())
    with bound(halves, FakeRuntime(found.parameter_values())), torch.no_grad():
        torch.manual_seed(SEED)
        alone = _with_values(forward(forward_inputs(found, shells=True)))
        with workspace.borrowed(shared_bytes(assigned)) as memory:
            assert memory is not None
            before = memory.clone()
            torch.manual_seed(SEED)
            beside = _with_values(forward(forward_inputs(found, shells=True)))
            assert torch.equal(memory, before)
    assert len(alone) == len(beside) > 1 and all(torch.equal(a, b) for a, b in zip(alone, beside, strict=True))


def _with_values(outputs: Any) -> list[Tensor]:
    """Copies of the tensors among ``outputs``, without shells, which have no values."""
    return [v.clone() for v in outputs if torch.is_tensor(v) and v.untyped_storage().nbytes()]


@pytest.mark.parametrize("decision", ["keep", "recompute", "swap-host"])
@pytest.mark.parametrize("name", ["two-layers", "branches"])
def test_symbolic_sizes_have_room_for_those_that_were_traced(name: str, decision: str) -> None:
    """Smaller inputs lie in part of it; larger ones, which training never has, in the heap."""
    found = captured(name, dynamic=True)
    halves = rewrite(found, plan_for(found, DECISIONS[decision](found)))
    assigned = {half: assign(gm, ALL, halves.returned(half)) for half, gm in halves.graphs()}
    named = {n.name: n for gm in both(halves) for n in gm.graph.nodes}
    placed = {name for one in assigned.values() for name in (*one.offsets, *one.outliving)}
    assert any(not isinstance(size, int) for name in placed for size in named[name].meta["val"].shape)
    workspace, nbytes, room = Workspace(), shared_bytes(assigned), Room()
    room.reserve(1 << 20)
    linked = [Buffered(gm, assigned[half], workspace, nbytes, room) for half, gm in halves.graphs()]
    (rows, width) = found.inputs[0].shape
    for size in (rows, rows - 1, 7, rows, 2):
        other = at_another_size(found, torch.linspace(-2, 2, size * width).view(size, width))
        assert run_linked(other, halves, linked, workspace, nbytes).equals(eager(other))
    with workspace.borrowed(nbytes) as memory:
        assert memory is not None
        before = memory.clone()
    other = at_another_size(found, torch.linspace(-2, 2, 9 * width).view(9, width))
    runtime = FakeRuntime(other.parameter_values())
    with bound(halves, runtime), torch.no_grad():
        linked[0](forward_inputs(other, shells=True))
    with workspace.borrowed(nbytes) as memory:
        assert memory is not None and torch.equal(memory, before)


class Products(torch.nn.Module):
    """Makes a value that is as large whatever the number of rows is."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh((x.t() * self.scale) @ x).sum()


def test_of_smaller_inputs_what_is_as_large_as_ever_has_its_place() -> None:
    rows, width = 6, 5
    found = capture(Products(), torch.linspace(-1, 1, rows * width).view(rows, width), dynamic=True)
    halves = rewrite(found, plan_for(found, DECISIONS["recompute"](found)))
    assigned = assign(halves.forward, ALL, halves.returned("forward"))
    workspace, room = Workspace(), Room()
    room.reserve(1 << 20)
    forward = Buffered(halves.forward, assigned, workspace, assigned.nbytes, room)
    sizes = {
        name: rows - 1 if value == rows else value for name, value in found.values.items() if isinstance(value, int)
    }
    tensors = {name: value[: rows - 1] for name, value in found.values.items() if value is found.inputs[0]}
    with bound(halves, FakeRuntime(found.parameter_values())), torch.no_grad():
        spoil(workspace, assigned.nbytes)
        forward(forward_inputs(replace(found, values={**found.values, **sizes, **tensors}), shells=True))
    with workspace.borrowed(assigned.nbytes) as memory:
        assert memory is not None and bool((memory != 255).any())


def test_small_values_stay_with_the_heap() -> None:
    found, halves = rewritten("transformer", "recompute")
    plan = plan_for(found, DECISIONS["recompute"](found))
    assert assign_buffers(halves, plan, room_bytes=1 << 40) == 0
    assert not any(one.offsets for one in halves.assigned.values())  # all values are smaller than SIZES begins
    assert SIZES[0].start > max(meta.cost(n).bytes for gm in both(halves) for n in gm.graph.nodes)


@pytest.mark.parametrize("room_bytes", [1 << 30, -(1 << 30)])
def test_no_more_than_the_room(room_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lohan_fx.passes.assign_buffers.SIZES", (ALL,))
    found, halves = rewritten("transformer", "keep")
    plan = plan_for(found, DECISIONS["keep"](found))
    more = assign_buffers(halves, plan, room_bytes=room_bytes)
    if room_bytes < 0:
        assert more == 0
        assert not any(one.offsets or one.nbytes for one in halves.assigned.values())
        assert any(one.outliving for one in halves.assigned.values())  # these take no more there than in the heap
        return
    apart = {half: one.offsets.keys() for half, one in halves.assigned.items()}
    peaks = [
        max(p.bytes for p in device_peaks(halves, plan, elsewhere=elsewhere).values()) for elsewhere in ({}, apart)
    ]
    assert more == peaks[1] + shared_bytes(halves.assigned) - peaks[0]
    assert more < peaks[0]


def test_what_has_no_place_and_is_mapped_anew_is_cleared_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lohan_fx.passes.assign_buffers.SIZES", (ALL,))
    found, halves = rewritten("transformer", "keep")
    plan = plan_for(found, DECISIONS["keep"](found))
    large = max(meta.cost(n).bytes for gm in both(halves) for n in gm.graph.nodes if is_assignable(n))
    monkeypatch.setattr("lohan_fx.passes.assign_buffers._MAPPED_BYTES", large - 1)
    assign_buffers(halves, plan, room_bytes=-(1 << 30))
    apart = {name for one in halves.assigned.values() for name in one.outliving}
    expected = [
        n for gm in both(halves) for n in gm.graph.nodes
        if is_assignable(n) and meta.cost(n).bytes == large and n.name not in apart
    ]  # fmt: skip
    assert expected and note_clearing(halves) and not note_clearing(halves)
    assert cleared_bytes(halves, halves.assigned) == large * len(expected)
    assert {n for gm in both(halves) for n in gm.graph.nodes if meta.cost(n).cleared_bytes} == set(expected)
    assign_buffers(halves, plan, room_bytes=1 << 30)
    assert cleared_bytes(halves, halves.assigned) == 0 and note_clearing(halves)
    assert not any(meta.cost(n).cleared_bytes for gm in both(halves) for n in gm.graph.nodes)


# --- each op that is used so ------------------------------------------------------------------------------------


def _values(*shape: int, dtype: torch.dtype) -> Tensor:
    count = math.prod(shape)
    return (torch.arange(count, dtype=torch.float32).sin() * 3).view(shape).to(dtype)


def _cases(dtype: torch.dtype) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    x, y, square = (_values(*shape, dtype=dtype) for shape in ((6, 8), (6, 8), (8, 8)))
    row, batch = _values(8, dtype=dtype), _values(2, 6, 8, dtype=dtype)
    scores = _values(6, 8, dtype=torch.float32)
    logged = torch.log_softmax(scores, -1)
    target = torch.tensor([1, 2, -100, 3, 0, 7])
    other = torch.float32 if dtype is torch.bfloat16 else torch.bfloat16
    read = torch.tensor([[1, 4, 1], [0, 1, 4]])
    embedded = _values(2, 3, 8, dtype=dtype)
    return [
        (aten.mm.default, (x, square), {}),
        (aten.mm.default, (x.t(), y), {}),
        (aten.addmm.default, (row, x, square), {}),
        (aten.bmm.default, (batch, batch.transpose(1, 2)), {}),
        (aten.add.Tensor, (x, y), {}),
        (aten.add.Tensor, (x, row), {"alpha": 2}),
        (aten.add.Tensor, (x, 1.5), {}),
        (aten.sub.Tensor, (x, y), {}),
        (aten.mul.Tensor, (x, y), {}),
        (aten.mul.Tensor, (x, 0.1), {}),
        (aten.mul.Scalar, (x, 0.1), {}),
        (aten.div.Scalar, (x, 3), {}),
        (aten.div.Tensor, (x, 3), {}),
        (aten.pow.Tensor_Scalar, (x, 3.0), {}),
        (aten.neg.default, (x,), {}),
        (aten.tanh.default, (x,), {}),
        (aten.sigmoid.default, (x,), {}),
        (aten.silu.default, (x,), {}),
        (aten.silu_backward.default, (x, y), {}),
        (aten.gelu.default, (x,), {"approximate": "tanh"}),
        (aten.gelu_backward.default, (x, y), {}),
        (aten.tanh_backward.default, (x, y), {}),
        (aten.threshold_backward.default, (x, y, 0), {}),
        (aten.rsqrt.default, (x.abs() + 1,), {}),
        (aten.mean.dim, (x, [-1], True), {}),
        (aten.sum.dim_IntList, (x, [0], True), {}),
        (aten.cat.default, ([x, y], -1), {}),
        (aten.where.self, (x > 0, x, y), {}),
        (aten._softmax.default, (scores, -1, False), {}),
        (aten._log_softmax.default, (scores, -1, False), {}),
        (aten._log_softmax_backward_data.default, (scores, logged, -1, torch.float32), {}),
        (aten._softmax_backward_data.default, (scores, scores.softmax(-1), -1, torch.float32), {}),
        (
            aten.nll_loss_backward.default,
            (torch.tensor(1.0), logged, target, None, 1, -100, torch.tensor(5.0)),
            {},
        ),
        (aten._to_copy.default, (x,), {"dtype": other}),
        (aten.clone.default, (x.t(),), {"memory_format": torch.contiguous_format}),
        (aten.clone.default, (x.t(),), {}),
        (aten.embedding_dense_backward.default, (embedded, read, 5, -1, False), {}),
        (aten.embedding_dense_backward.default, (embedded.transpose(0, 1), read.t().int(), 5, 4, False), {}),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("place", range(len(_cases(torch.float32))))
def test_an_op_gives_the_same_bits_into_a_given_tensor(place: int, dtype: torch.dtype) -> None:
    op, args, kwargs = _cases(dtype)[place]
    expected = op(*args, **kwargs)
    out = torch.empty_strided(expected.shape, expected.stride(), dtype=expected.dtype)
    out.view(torch.uint8).fill_(255) if out.is_contiguous() else out.fill_(float("nan"))
    where = out.data_ptr()
    target, args, kwargs = into(op, args, kwargs, out)
    result = target(*args, **kwargs)
    assert result.data_ptr() == where == out.data_ptr()
    assert torch.equal(out, expected) and out.stride() == expected.stride()


def test_an_op_that_would_copy_is_not_used() -> None:
    for op in (aten.native_layer_norm.default, aten.embedding.default, aten.embedding_dense_backward.default):
        assert writing(op) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [50, 20_000])
def test_an_embeddings_gradient_is_summed_in_order_and_rounded_each_time(rows: int, dtype: torch.dtype) -> None:
    drawn = torch.Generator().manual_seed(SEED)
    read = torch.randint(0, rows, (4, 512), generator=drawn)
    gradient = torch.randn(4, 512, 128, generator=drawn).to(dtype)  # enough for torch to divide it between threads
    out = torch.full((rows, 128), float("nan"), dtype=dtype)
    add_rows(out, gradient, read, 3)
    assert torch.equal(out, aten.embedding_dense_backward(gradient, read, rows, 3, False))


@pytest.mark.parametrize("scaled", [False, True])
def test_an_embeddings_gradient_has_a_place_unless_it_is_scaled(scaled: bool) -> None:
    gradient, read = torch.ones(2, 3, 8), torch.tensor([[1, 4, 1], [0, 1, 4]])

    def backward(gradient: Tensor, read: Tensor) -> tuple[Tensor]:
        return (aten.embedding_dense_backward.default(gradient, read, 5, -1, scaled),)

    gm = make_fx(backward, tracing_mode="fake")(gradient, read)
    annotate(gm)
    (node,) = gm.graph.find_nodes(op="call_function", target=aten.embedding_dense_backward.default)
    assert is_assignable(node) is not scaled
    expected, place = backward(gradient, read)[0], torch.full((5, 8), float("nan"))
    write_into(gm, assign(gm, ALL), lambda _: lambda: place)
    gm.recompile()
    (made,) = gm(gradient, read)
    assert torch.equal(made, expected) and (made is place) is not scaled


@pytest.mark.parametrize("width", [4, 8])
def test_what_is_not_dense_has_no_place(width: int) -> None:
    gm = make_fx(aten.neg.default)(torch.empty(4, 8))
    node = next(n for n in gm.graph.nodes if n.op == "call_function")
    node.meta["val"] = torch.empty(4, 8)[:, :width]
    annotate(gm)
    assert is_assignable(node) == (width == 8)
