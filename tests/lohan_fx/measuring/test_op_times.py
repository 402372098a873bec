"""op_times: what is measured, once per distinct op, and that measuring changes nothing."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable

import pytest
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch.fx import GraphModule

from lohan_fx import meta
from lohan_fx.measuring import op_times
from lohan_fx.measuring.op_times import Measured, signature_of, time_ops
from lohan_fx.meta import Lane
from lohan_fx.passes.annotate import annotate
from tests.passes.graphs import MODELS, captured

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_times, "_measured", {})
    monkeypatch.setattr(op_times, "FIRST_RUNS", 1)
    monkeypatch.setattr(op_times, "ROUNDS", 2)
    monkeypatch.setattr(op_times, "COLD_BYTES", 4096)


@pytest.fixture
def _costless(monkeypatch: pytest.MonkeyPatch) -> None:
    """For nodes of which only the name is needed."""
    monkeypatch.setattr(op_times, "_is_watched", lambda node, device: False)


def joint_of(name: str) -> GraphModule:
    """A copy: the captured graph itself is shared by the tests of a session, and has no seconds."""
    return copy.deepcopy(captured(name).joint)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_on_a_gpu_no_kernel_is_tried_that_reads_its_seed_on_the_host(dropout: float) -> None:
    """Where the tensor made for the seed lies on the GPU, the process would end."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default
    node = graph.call_function(backward, (x, x, x, x, None, x, x, x, x, dropout, [True, True, True, False]))
    assert op_times._reads_its_seed(node) is (dropout > 0)
    assert not op_times._reads_its_seed(graph.call_function(torch.ops.aten.mm.default, (x, x)))


@pytest.mark.parametrize("name", MODELS)
def test_every_op_that_computes_gets_seconds_and_no_other_node(name: str) -> None:
    joint = joint_of(name)
    time_ops(joint, CPU)
    for node in joint.graph.nodes:
        found = meta.cost(node)
        is_op = isinstance(node.target, torch._ops.OpOverload)
        computes = is_op and found.lane is Lane.COMPUTE
        assert (found.measured_s is not None) == computes, node.format_node()
        assert found.measured_s is None or found.measured_s > 0


def test_equal_ops_are_measured_once() -> None:
    joint = joint_of("transformer")
    time_ops(joint, CPU)
    timed = [n for n in joint.graph.nodes if meta.cost(n).measured_s is not None]
    assert len(op_times._measured) == len({signature_of(n) for n in timed}) < len(timed)
    by_signature: dict[object, set[float | None]] = {}
    for node in timed:
        by_signature.setdefault(signature_of(node), set()).add(meta.cost(node).measured_s)
    assert all(len(seconds) == 1 for seconds in by_signature.values())


def test_random_ops_that_are_measured_leave_the_generator_alone() -> None:
    joints = [joint_of(name) for name in MODELS]  # which seeds the generator where nobody has captured them yet
    before = torch.get_rng_state()
    for joint in joints:
        time_ops(joint, CPU)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("took", "mean_s"), [((5.0, 1.0, 3.0), 3.0), ((1.0, 100.0, 2.0), 3.0), ((2.0, 2.0, 2.0), 2.0)])
def test_the_mean_run_counts_and_a_hiccup_for_three(took: tuple[float, ...], mean_s: float) -> None:
    assert op_times._mean_s(list(took)) == mean_s


@pytest.mark.usefixtures("_costless")
def test_the_first_run_warms_up_and_what_adds_nothing_is_run_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_times, "FIRST_RUNS", 2)
    monkeypatch.setattr(op_times, "ROUNDS", 3)
    monkeypatch.setattr(op_times, "ROUND_S", 4.0)
    monkeypatch.setattr(op_times, "LONG_S", 10.0)
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    large, small = (graph.call_function(op, (x,)) for op in (torch.ops.aten.sin.default, torch.ops.aten.cos.default))
    took = {large: iter((9.0, 1.0, 3.0, *8 * [2.0])), small: iter((9.0, 1e-3, 1e-3))}
    monkeypatch.setattr(op_times, "_runner", lambda node, device: node)
    monkeypatch.setattr(op_times, "timed", lambda node, device: next(took[node]))
    found = op_times._in_rounds({("large",): [large], ("small",): [small]}, CPU)
    assert found == {("large",): Measured(2.0, 0), ("small",): Measured(1e-3, 0)}
    assert len(list(took[large])) == 8 - 2 * 2  # two rounds of four seconds each


@pytest.mark.usefixtures("_costless")
@pytest.mark.parametrize(("op_s", "runs"), [(1e-6, 1), (2e-2, op_times.MOST_RUNS)])
def test_a_small_graph_is_not_timed_for_many_of_its_steps(
    op_s: float, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What touching other bytes takes before each run counts: of a small op it is nearly all."""
    now_s = 0.0
    runs_of: dict[str, int] = {}

    def timed(node: torch.fx.Node, device: torch.device) -> float:
        nonlocal now_s
        now_s += op_s + 1e-2
        runs_of[node.name] = runs_of.get(node.name, 0) + 1
        return op_s

    monkeypatch.setattr(op_times.time, "perf_counter", lambda: now_s)
    monkeypatch.setattr(op_times, "_runner", lambda node, device: node)
    monkeypatch.setattr(op_times, "timed", timed)
    graph = torch.fx.Graph()
    nodes = [graph.placeholder(name) for name in ("x", "y")]
    op_times._in_rounds({(node.name,): [node] * 40 for node in nodes}, CPU)
    assert runs_of == {node.name: 1 + op_times.FIRST_RUNS + (op_times.ROUNDS - 1) * runs for node in nodes}


@pytest.mark.usefixtures("_costless")
def test_an_op_that_takes_long_is_run_once_after_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_times, "FIRST_RUNS", 3)
    node = torch.fx.Graph().placeholder("x")
    took = iter((70.0, 60.0))
    monkeypatch.setattr(op_times, "_runner", lambda node, device: node)
    monkeypatch.setattr(op_times, "timed", lambda node, device: next(took))
    assert op_times._in_rounds({("slow",): [node]}, CPU) == {("slow",): Measured(60.0, 0)}


def test_a_strided_input_is_another_op() -> None:
    graph = torch.fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    x.meta["val"], y.meta["val"] = torch.empty(4, 6), torch.empty(6, 4).t()
    square = [graph.call_function(torch.ops.aten.mul.Tensor, (each, each)) for each in (x, y, x)]
    assert signature_of(square[0]) == signature_of(square[2]) != signature_of(square[1])


def test_an_op_that_refuses_made_up_values_has_no_seconds_and_an_assertion_is_not_tried() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.ones(4, dtype=torch.int64)
    sevenths = graph.call_function(torch.ops.aten.floor_divide.default, (x, x))
    doubled = graph.call_function(torch.ops.aten.mul.Tensor, (x, 2))
    checked = graph.call_function(torch.ops.aten._assert_async.msg, (x, "positive"))
    for node, value in ((sevenths, x.meta["val"]), (doubled, x.meta["val"]), (checked, None)):
        node.meta["val"] = value
    graph.output((sevenths, doubled))
    gm = GraphModule({}, graph)
    annotate(gm)
    time_ops(gm, CPU)
    seconds = {n.name: meta.cost(n).measured_s for n in (sevenths, doubled, checked)}
    assert [s is None for s in seconds.values()] == [True, False, True], seconds


@torch.library.custom_op("lohan_tests::doubled_with_scratch", mutates_args=())
def doubled_with_scratch(x: torch.Tensor) -> torch.Tensor:
    """Takes three times the memory of ``x`` beside its result."""
    copies = torch.stack([x, x, x])
    time.sleep(0.02)  # on a machine that has other work the thread that looks may come late
    return copies.sum(0) - x


@doubled_with_scratch.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_what_a_kernel_takes_beside_its_values_is_noted_where_it_could_matter() -> None:
    graph = torch.fx.Graph()
    large, small = graph.placeholder("large"), graph.placeholder("small")
    large.meta["val"], small.meta["val"] = torch.ones(4 << 20), torch.ones(1 << 10)
    op = torch.ops.lohan_tests.doubled_with_scratch.default
    taking, sparing = graph.call_function(op, (large,)), graph.call_function(op, (small,))
    adding = graph.call_function(torch.ops.aten.add.Tensor, (large, large))
    for node in (taking, sparing, adding):
        node.meta["val"] = torch.empty_like(node.args[0].meta["val"])  # type: ignore[union-attr]
    graph.output((taking, sparing, adding))
    gm = GraphModule({}, graph)
    annotate(gm)
    time_ops(gm, CPU)
    assert 48 << 20 <= meta.cost(taking).scratch_bytes <= 66 << 20  # the copies; at their sum one of them more
    assert meta.cost(sparing).scratch_bytes == meta.cost(adding).scratch_bytes == 0
    assert meta.cost(taking).measured_s is not None


def test_ops_are_timed_without_what_tracing_has_switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dispatcher in Python keeps the interpreter while a kernel runs, and takes longer than a small one."""
    key, found = torch._C.DispatchKey.PythonDispatcher, set[bool]()

    def timed(run: Callable[[], object], device: torch.device) -> float:
        found.add(torch._C._dispatch_tls_is_dispatch_key_included(key))
        return 1e-3

    monkeypatch.setattr(op_times, "timed", timed)
    joint = joint_of("two-layers")
    with enable_python_dispatcher():
        assert torch._C._dispatch_tls_is_dispatch_key_included(key)
        time_ops(joint, CPU)
    assert found == {False}
