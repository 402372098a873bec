"""annotate against PyTorch's own FLOP counter, real storages, and the same function traced at other sizes."""

from __future__ import annotations

import operator
from typing import Any, Literal

import pytest
import torch
from torch import fx
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from lohan_fx import meta, ops
from lohan_fx.errors import CaptureError
from lohan_fx.meta import Lane, Phase
from lohan_fx.passes.annotate import annotate, at_hint, block_of, is_random, layer_of
from lohan_fx.plan import Keep, Recompute, Swap, Tier
from tests.passes.graphs import CPU_ATTENTION, DECISIONS, MODELS, Captured, captured, forward_values, plan_for, rewrite

aten = torch.ops.aten


def calls(gm: GraphModule) -> list[Node]:
    return [n for n in gm.graph.nodes if n.op == "call_function"]


# --- FLOPs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_flops_are_those_that_pytorch_counts_while_running(name: str) -> None:
    found = captured(name)
    forward, step = (FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION) for _ in range(2))
    with forward:
        found.model(*found.inputs)
    with step:
        outputs = found.model(*found.inputs)
        sum(o.sum() for o in (outputs if isinstance(outputs, tuple) else (outputs,))).backward()
    costs = [meta.cost(n) for n in calls(found.joint)]
    assert sum(c.flops for c in costs if c.phase is Phase.FORWARD) == forward.get_total_flops() > 0
    assert sum(c.flops for c in costs) == step.get_total_flops()
    found.model.zero_grad()


def test_fused_attention_is_two_matmuls_forward_and_five_backward() -> None:
    costs = {n.name: meta.cost(n) for n in calls(captured("transformer").joint)}
    matmul = 2 * (2 * 2) * 8 * 8 * 8  # 2 flop, batch * heads, queries, keys, width of a head
    assert costs["_scaled_dot_product_flash_attention_for_cpu"].flops == 2 * matmul
    assert costs["_scaled_dot_product_flash_attention_for_cpu_backward"].flops == 5 * matmul


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_of_experts_are_multiplied_once_forward_and_twice_backward(dtype: torch.dtype) -> None:
    """PyTorch's op for bfloat16, and Hugging Face's for what that does not take; neither is in PyTorch's registry."""
    pytest.importorskip("transformers.integrations.moe")
    rows, width, experts, out = 24, 16, 3, 32

    def step(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if dtype is torch.bfloat16:
            y = torch._grouped_mm(x, weight, offs=ends)
        else:
            y = torch.ops.transformers.grouped_mm_fallback(x, weight, ends)
        return torch.autograd.grad(y.float().sum(), (x, weight))

    x = torch.randn(rows, width, dtype=dtype, requires_grad=True)
    weight = torch.randn(experts, width, out, dtype=dtype, requires_grad=True)
    gm = make_fx(step, tracing_mode="fake")(x, weight, torch.tensor([8, 8, 24], dtype=torch.int32))
    annotate(gm)
    assert sum(meta.cost(node).flops for node in calls(gm)) == 3 * 2 * rows * width * out


def test_columns_of_experts_are_multiplied_once() -> None:
    left, right = torch.randn(2, 16, 32, dtype=torch.bfloat16), torch.randn(32, 48, dtype=torch.bfloat16)
    ends = torch.tensor([16, 48], dtype=torch.int32)
    gm = make_fx(lambda a, b, offs: torch._grouped_mm(a, b, offs=offs), tracing_mode="fake")(left, right, ends)
    annotate(gm)
    assert sum(meta.cost(node).flops for node in calls(gm)) == 2 * 16 * 32 * 48


def test_attention_flops_take_queries_and_keys_of_different_lengths_and_widths() -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[0]

    sizes = (2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)
    gm = make_fx(attend, tracing_mode="fake")(*(torch.randn(s) for s in sizes))
    annotate(gm)
    assert max(meta.cost(n).flops for n in calls(gm)) == sdpa_flop_count(*sizes)


# --- bytes ----------------------------------------------------------------------------------------------------


class Storages(fx.Interpreter):
    """Runs a graph and holds each annotated byte against the storages that really come to be."""

    def run_node(self, n: Node) -> Any:
        args, _ = self.fetch_args_kwargs_from_env(n)
        result = super().run_node(n)
        if n.op == "call_function" and torch.is_tensor(result):
            self.check(n, result, [t for t in torch.utils._pytree.tree_leaves(args) if torch.is_tensor(t)])
        return result

    def check(self, n: Node, result: torch.Tensor, inputs: list[torch.Tensor]) -> None:
        storage = result.untyped_storage()
        cost = meta.cost(n)
        is_getitem = n.target is operator.getitem
        shared = storage.data_ptr() in {t.untyped_storage().data_ptr() for t in inputs}
        if cost.is_view:
            assert (shared or is_getitem) and cost.bytes == 0, n
        else:
            assert (not shared or is_getitem) and cost.bytes == storage.nbytes() > 0, n
            self.seen = getattr(self, "seen", 0) + 1


@pytest.mark.parametrize("name", MODELS)
def test_bytes_are_those_of_the_storages_that_ops_make(name: str) -> None:
    found = captured(name)
    values = forward_values(found)
    with torch.no_grad():
        outputs = found.model(*found.inputs)
        tangents = [torch.ones_like(o) for o in (outputs if isinstance(outputs, tuple) else (outputs,))]
        interpreter = Storages(found.joint)
        interpreter.run(*values, *tangents)
    assert interpreter.seen == sum(meta.cost(n).bytes > 0 for n in calls(found.joint))
    for node in found.joint.graph.find_nodes(op="placeholder"):
        assert meta.cost(node).bytes == (node.meta["val"].nbytes if torch.is_tensor(node.meta["val"]) else 0)


def test_an_op_touches_what_it_reads_and_writes_and_a_view_touches_nothing() -> None:
    costs = {n.name: meta.cost(n) for n in calls(captured("two-layers").joint)}
    assert costs["addmm"].touched_bytes == 4 * (8 + 3 * 4 + 4 * 8 + 3 * 8)
    assert costs["addmm"].bytes == 4 * 3 * 8
    assert costs["t"].touched_bytes == 0


def test_bytes_of_several_outputs_are_with_the_parts() -> None:
    costs = {n.name: meta.cost(n) for n in calls(captured("transformer").joint)}
    assert costs["native_layer_norm"].bytes == 0
    assert [costs[f"getitem{i}"].bytes for i in ("", "_1", "_2")] == [4 * 2 * 8 * 16, 4 * 2 * 8, 4 * 2 * 8]
    assert costs["native_layer_norm"].touched_bytes == 4 * (2 * 8 * 16 + 16 + 16) + 4 * (2 * 8 * 16 + 2 * 2 * 8)
    assert costs["getitem"].touched_bytes == 0


# --- where a node belongs -------------------------------------------------------------------------------------


def test_blocks_are_layers_and_so_are_the_modules_around_them() -> None:
    joint = captured("transformer").joint
    layers: dict[str, set[tuple[str, Phase]]] = {}
    for node in calls(joint):
        cost = meta.cost(node)
        layers.setdefault(str(node.target), set()).add((cost.layer, cost.phase))
    blocks = {f"layers.{i}" for i in range(3)}
    assert layers["aten.embedding.default"] == {("embed", Phase.FORWARD)}
    assert layers["aten.embedding_dense_backward.default"] == {("embed", Phase.BACKWARD)}
    assert layers["aten.addmm.default"] == {(block, Phase.FORWARD) for block in blocks}
    assert layers["aten.gelu_backward.default"] == {(block, Phase.BACKWARD) for block in blocks}
    assert {("head", phase) for phase in Phase} <= layers["aten.mm.default"]
    assert {meta.cost(n).layer_kind for n in calls(joint) if meta.cost(n).layer in blocks} == {"Block"}


def test_an_op_outside_of_all_modules_belongs_to_the_layer_before_it() -> None:
    costs = {n.name: meta.cost(n) for n in calls(captured("two-layers").joint)}
    assert (costs["relu"].layer, costs["relu"].layer_kind) == ("first", "Linear")
    assert costs["mean"].layer == "second"


@pytest.mark.parametrize(
    ("stack", "layer"),
    [
        (["", "model", "model.layers.3", "model.layers.3.mlp.experts.1"], "model.layers.3"),
        (["", "model", "model.layers.3"], "model.layers.3"),
        (["L['self'].layers[0]", "L['self'].layers[0].attention"], "layers.0"),
        (["L['model']._modules['layers']._modules['2']._modules['fc']"], "layers.2"),
        (["", "stages.0.1"], "stages.0.1"),
        (["", "stages.0.1", "stages.0.1.conv"], "stages.0.1"),
        (["", "layer1", "layer1.0", "layer1.0.conv1"], "layer1.0"),
        (["", "conv1"], "conv1"),
        (["", "stem1.norm"], "stem1.norm"),
        (["", "0"], "0"),
    ],
)
def test_layer_is_the_outermost_numbered_module_or_the_innermost(stack: list[str], layer: str) -> None:
    node = fx.Graph().placeholder("x")
    node.meta["nn_module_stack"] = {path: (path, torch.nn.Linear) for path in stack}
    assert layer_of(node) == (layer, "Linear")


def test_layer_is_unknown_without_a_stack() -> None:
    assert layer_of(fx.Graph().placeholder("x")) is None


@pytest.mark.parametrize(
    ("path", "block"),
    [
        ("model.layers.3.mlp.experts.7", "model.layers.3"),
        ("0", "0"),
        ("t5.encoder.block.2", "t5.encoder.block.2"),
        ("layer1.0.conv1", "layer1.0"),
        ("conv1", None),
        ("h2.attention", None),
        ("", None),
    ],
)
def test_block_is_the_outermost_numbered_part(path: str, block: str | None) -> None:
    assert block_of(path) == block


def test_our_nodes_use_the_lane_of_what_they_move() -> None:
    found = captured("two-layers")
    halves = rewrite(found, plan_for(found, Swap(Tier.HOST)))
    assert halves.backward is not None
    lanes = {n.target: meta.cost(n).lane for _, gm in halves.graphs() for n in calls(gm)}
    ours = {op: lanes.pop(op) for op in ops.ALL}
    assert ours == {
        ops.FETCH: Lane.H2D,
        ops.SWAP_OUT: Lane.D2H,
        ops.SWAP_IN: Lane.H2D,
        ops.OFFLOAD_GRAD: Lane.D2H,
        ops.WAIT: Lane.COMPUTE,
    }
    assert set(lanes.values()) == {Lane.COMPUTE}


def test_a_recomputed_op_costs_what_the_op_costs_but_in_the_backward() -> None:
    found = captured("two-layers")
    halves = rewrite(found, plan_for(found, Recompute()))
    assert halves.backward is not None
    costs = {n.name: meta.cost(n) for n in calls(halves.backward)}
    original = next(meta.cost(n) for n in calls(found.joint) if n.name == "addmm")
    assert costs["recompute_addmm"].flops == original.flops > 0
    assert (costs["recompute_addmm"].phase, original.phase) == (Phase.BACKWARD, Phase.FORWARD)


def test_an_input_costs_its_bytes_and_no_flops_also_where_an_op_made_it_in_the_other_half() -> None:
    found = captured("two-layers")
    halves = rewrite(found, plan_for(found, Keep()))
    saved = halves.saved_placeholders()["mm"]
    assert (meta.cost(saved).flops, meta.cost(saved).bytes) == (0, 4 * 3 * 4)


# --- random ops -----------------------------------------------------------------------------------------------


def _call(op: object, *args: object, **kwargs: object) -> Node:
    return fx.Graph().call_function(op, args, kwargs)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (_call(aten.native_dropout.default, None, 0.5, True), True),
        (_call(aten.rand.default, [3]), True),
        (_call(aten.bernoulli.p, None, 0.5), True),
        (_call(aten.mm.default, None, None), False),
        (_call(aten._scaled_dot_product_flash_attention_for_cpu.default, None, None, None), False),
        (_call(aten._scaled_dot_product_flash_attention_for_cpu.default, None, None, None, 0.0, True), False),
        (_call(aten._scaled_dot_product_flash_attention_for_cpu.default, None, None, None, 0.1, True), True),
        (_call(aten._scaled_dot_product_efficient_attention.default, None, None, None, None, True), False),
        (_call(aten._scaled_dot_product_efficient_attention.default, None, None, None, None, True, 0.1), True),
        (_call(aten._scaled_dot_product_flash_attention.default, None, None, None, dropout_p=0.1), True),
        (_call(max, 1, 2), False),
        (_call(torch.ops.higher_order.auto_functionalized_v2, aten.bernoulli_.float, p=0.5), True),
        (_call(torch.ops.higher_order.auto_functionalized_v2, aten.sin_.default), False),
    ],
    ids=str,
)
def test_random_is_what_draws_numbers(node: Node, expected: bool) -> None:
    assert is_random(node) is expected


# --- symbolic sizes -------------------------------------------------------------------------------------------


def _layer(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """(batch, length, width): projected, split into heads, attended, projected back, normalised."""
    batch, length, width = x.shape
    heads = (x @ w).view(batch, length, 2, width // 2).transpose(1, 2)
    attended = aten._scaled_dot_product_flash_attention_for_cpu(heads, heads, heads)[0]
    out = torch.relu(attended.transpose(1, 2).reshape(batch, length, width) @ v)
    return torch.nn.functional.layer_norm(torch.cat([x, out], 1), (width,))


def _traced(batch: int, length: int, width: int, mode: Literal["fake", "symbolic"]) -> GraphModule:
    inputs = torch.randn(batch, length, width), torch.randn(width, width), torch.randn(width, width)
    gm = make_fx(_layer, tracing_mode=mode)(*inputs)
    annotate(gm)
    return gm


def test_symbolic_costs_are_those_of_the_sizes_put_in() -> None:
    symbolic = _traced(3, 5, 14, "symbolic")
    batch, length, width = (s.node.expr for s in next(iter(symbolic.graph.nodes)).meta["val"].shape)
    for sizes in ((3, 5, 14), (7, 11, 26)):
        concrete = {n.name: meta.cost(n) for n in _traced(*sizes, "fake").graph.nodes}
        put_in = dict(zip((batch, length, width), sizes, strict=True))
        compared = 0
        for node in symbolic.graph.nodes:
            cost = meta.cost(node)
            if node.name in concrete and cost.bytes:
                assert cost.flops_expr.subs(put_in) == concrete[node.name].flops, node
                assert cost.bytes_expr.subs(put_in) == concrete[node.name].bytes, node
                compared += cost.flops > 0
        assert compared >= 2
        attention = next(c for name, c in concrete.items() if name.startswith("_scaled"))
        found = next(meta.cost(n) for n in symbolic.graph.nodes if n.name.startswith("_scaled"))
        assert found.flops_expr.subs(put_in) == attention.flops > 0


def test_symbolic_costs_are_numbers_at_the_traced_sizes() -> None:
    node = next(n for n in _traced(3, 5, 14, "symbolic").graph.nodes if n.name == "relu")
    assert (meta.cost(node).bytes, meta.cost(node).bytes_expr.is_number) == (4 * 3 * 5 * 14, False)


def test_a_joint_graph_of_symbolic_sizes_has_the_numbers_of_a_static_one() -> None:
    static, dynamic = captured("two-layers"), captured("two-layers", dynamic=True)

    def totals(found: Captured) -> tuple[int, int]:
        costs = [meta.cost(n) for n in calls(found.joint)]
        return sum(c.flops for c in costs), sum(c.bytes for c in costs)

    assert totals(dynamic) == totals(static)


def test_a_size_that_depends_on_data_cannot_be_counted() -> None:
    with pytest.raises(CaptureError, match="depends on values"):
        at_hint(ShapeEnv().create_unbacked_symint())


# --- notes ----------------------------------------------------------------------------------------------------


def test_annotate_leaves_what_is_noted_and_completes_the_rest() -> None:
    gm = _traced(2, 3, 4, "fake")
    first, second = calls(gm)[:2]
    noted = meta.cost(first)
    meta.clear_cost(second)
    with pytest.raises(AssertionError, match=rf"node {second.name} has no cost: run lohan_fx.passes.annotate first"):
        meta.cost(second)
    annotate(gm)
    assert meta.cost(first) is noted
    assert meta.has_cost(second)


@pytest.mark.parametrize("decision", DECISIONS)
def test_every_node_of_rewritten_halves_has_a_cost(decision: str) -> None:
    found = captured("tied")
    halves = rewrite(found, plan_for(found, DECISIONS[decision](found)))
    assert all(meta.has_cost(n) for _, gm in halves.graphs() for n in gm.graph.nodes)
