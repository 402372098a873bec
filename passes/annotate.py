"""annotate: note on every node its FLOPs, bytes, layer, phase and lane.

Requires: a traced graph whose nodes carry ``meta["val"]``.
Ensures: ``meta.cost(node)`` answers for every node. The graph itself is unchanged.
"""

from __future__ import annotations

import functools
import itertools
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any, cast

import sympy
import torch
from torch.fx import GraphModule, Node
from torch.utils.flop_counter import flop_registry

from lohan_fx import meta, ops
from lohan_fx.errors import CaptureError
from lohan_fx.meta import Cost, Lane, Phase

Size = int | torch.SymInt

_LANES = {
    ops.FETCH: Lane.H2D,
    ops.SWAP_IN: Lane.H2D,
    ops.SWAP_OUT: Lane.D2H,
    ops.OFFLOAD_GRAD: Lane.D2H,
}

# Views whose schema does not say so: they hand their input's storage on.
_SILENT_VIEWS = (
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.unsafe_split.Tensor,  # also of `unsafe_chunk`, as in LSTM and GRU cells
    torch.ops.aten.unsafe_split_with_sizes.default,
    ops.WAIT,
)


def annotate(gm: GraphModule) -> None:
    """Note a ``Cost`` on each node of ``gm`` that has none yet."""
    previous = ("", "")
    for node in gm.graph.nodes:
        if meta.has_cost(node):
            previous = (meta.cost(node).layer, meta.cost(node).layer_kind)
            continue
        layer = layer_of(node)
        if layer is None:
            layer = previous if node.op == "call_function" else ("", "")
        previous = layer
        meta.set_cost(node, _cost(node, *layer))


def _cost(node: Node, layer: str, layer_kind: str) -> Cost:
    view = is_view(node)
    made = 0 if view or node.op in ("output", "get_attr") else storage_bytes(meta.value(node))
    inputs = [storage_bytes(meta.value(n)) for n in node.all_input_nodes]
    touched = 0 if view or node.op != "call_function" or _is_getitem(node) else sum(inputs, start=made)
    flops = node_flops(node)
    return Cost(
        flops=at_hint(flops),
        bytes=0 if _is_getitem_parent(node) else at_hint(made),
        touched_bytes=at_hint(touched),
        flops_expr=as_expr(flops),
        bytes_expr=as_expr(0 if _is_getitem_parent(node) else made),
        layer=layer,
        layer_kind=layer_kind,
        phase=_phase(node),
        lane=_LANES.get(cast(Any, node.target), Lane.COMPUTE),
        is_view=view,
        is_random=is_random(node),
        runs_unread=_runs_unread(node),
    )


def _phase(node: Node) -> Phase:
    return Phase.BACKWARD if node.meta.get("partitioner_tag") == "is_backward" else Phase.FORWARD


# --- which layer ----------------------------------------------------------------------------------------------


def layer_of(node: Node) -> tuple[str, str] | None:
    """(path, class name) of the layer that ``node`` belongs to, from ``nn_module_stack``; None where unknown.

    The layer is the outermost repeated block (``model.layers.3``), or the innermost module outside of blocks.
    """
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return None
    entries = [(_module_path(str(path)), _class_name(kind)) for path, kind in stack.values()]
    for path, kind in entries:
        if path.rpartition(".")[2].isdigit():
            return path, kind
    path, kind = entries[-1]
    return block_of(path) or path, kind


def block_of(path: str) -> str | None:
    """The outermost numbered part of a module's path, ``model.layers.3`` of ``model.layers.3.mlp.experts.7``."""
    block = re.match(r"((?:[^.]+\.)*?\d+)(?:\.|$)", path)
    return block.group(1) if block else None


@functools.lru_cache(maxsize=1 << 16)
def _module_path(path: str) -> str:
    path = re.sub(r"^L\['?\w+'?\]", "", path)
    path = re.sub(r"\._modules\['(\w+)'\]", r".\1", path)
    return re.sub(r"\['?(\w+)'?\]", r".\1", path).strip(".")


def _class_name(kind: object) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind).rpartition(".")[2]


# --- how many FLOPs -------------------------------------------------------------------------------------------


def node_flops(node: Node) -> Size:
    """Floating-point operations of ``node`` (2 per multiply-add); 0 for pointwise ops, as PyTorch counts."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return 0
    values = [meta.value(a) if isinstance(a, Node) else a for a in node.args]
    for known in (_attention_flops, _grouped_flops):
        if (found := known(node.target, values)) is not None:
            return found
    formula = cast("Callable[..., Size] | None", flop_registry.get(node.target._overloadpacket))
    if formula is None:
        return 0
    keywords = {k: meta.value(v) if isinstance(v, Node) else v for k, v in node.kwargs.items()}
    return formula(*values, **keywords, out_val=meta.value(node))


def _attention_flops(op: torch._ops.OpOverload, values: Sequence[Any]) -> Size | None:
    """FLOPs of fused attention, forward (2 matmuls) and backward (5), from its shapes.

    PyTorch's registry lacks the CPU kernel, and 2.11's asserts on grouped-query shapes. Like PyTorch's, this
    counts the full square also under a causal mask.
    """
    name = op._opname
    if not name.startswith("_scaled_dot_product_"):
        return None
    backward = "backward" in name
    query, key, value = values[1:4] if backward else values[0:3]
    batch, heads, length, width = query.shape
    scores = 2 * batch * heads * length * key.shape[-2] * width
    context = 2 * batch * heads * length * key.shape[-2] * value.shape[-1]
    return cast(Size, 3 * scores + 2 * context if backward else scores + context)


def _grouped_flops(op: torch._ops.OpOverload, values: Sequence[Any]) -> Size | None:
    """FLOPs of matmuls whose rows go to one of several matrices each (experts), torch's and Hugging Face's for other dtypes,
    which PyTorch's registry lacks."""
    if op._opname == "grouped_mm_fallback_backward":
        rows, experts = values[0], values[1]
        return cast(Size, 4 * rows.numel() * experts.shape[-1])
    if op._opname not in ("_grouped_mm", "grouped_mm_fallback"):
        return None
    left, right = values[:2]
    apart = left.shape[0] if left.dim() == 3 and right.dim() == 2 else 1  # each column is of one group
    return cast(Size, 2 * left.numel() * right.shape[-1] // apart)


# --- how many bytes -------------------------------------------------------------------------------------------


def storage_bytes(value: object) -> Size:
    """Bytes of a (fake) tensor, or of all tensors in a tuple; 0 for anything else."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, tuple | list):
        total: Size = 0
        for item in value:
            total = total + storage_bytes(item)
        return total
    return 0


def is_view(node: Node) -> bool:
    """Whether ``node`` hands on the storage of one of its inputs."""
    if node.op != "call_function":
        return False
    if node.target in _SILENT_VIEWS:
        return True
    if _is_getitem(node):
        return is_view(node.all_input_nodes[0])
    if not isinstance(node.target, torch._ops.OpOverload) or len(node.target._schema.returns) != 1:
        return False
    alias = node.target._schema.returns[0].alias_info
    return alias is not None and not alias.is_write


def is_random(node: Node) -> bool:
    """Whether running ``node`` again would give other numbers; attention without dropout draws none, and ``torch.cond`` what its
    branches do."""
    op = node.target
    if isinstance(op, torch._ops.HigherOrderOperator):
        return any(map(_draws, (*node.args, *node.kwargs.values()), itertools.repeat(node.graph.owning_module)))
    if not isinstance(op, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    for place, argument in enumerate(op._schema.arguments):
        if argument.name == "dropout_p":
            drops = node.args[place] if place < len(node.args) else node.kwargs.get("dropout_p", argument.default_value)
            return bool(drops != 0.0)
    return True


def _draws(argument: object, owner: torch.nn.Module | None) -> bool:
    """Whether a higher-order op draws random numbers by what it is given, an op or a graph of ``owner``."""
    if isinstance(argument, torch._ops.OpOverload):
        return torch.Tag.nondeterministic_seeded in argument.tags
    if not isinstance(argument, Node) or argument.op != "get_attr" or owner is None:
        return False
    found = operator.attrgetter(str(argument.target))(owner)
    return isinstance(found, GraphModule) and any(n.op == "call_function" and is_random(n) for n in found.graph.nodes)


def _runs_unread(node: Node) -> bool:
    """Random ops do, since the draws after them depend on them, and those with an effect, such as ``aten._assert_async``."""
    return node.op == "call_function" and (is_random(node) or node.is_impure(impure_random=False))


def _is_getitem(node: Node) -> bool:
    return node.target is operator.getitem


def _is_getitem_parent(node: Node) -> bool:
    return isinstance(meta.value(node), tuple | list)


# --- symbolic sizes -------------------------------------------------------------------------------------------


def as_expr(size: Size) -> sympy.Expr:
    """``size`` as a sympy expression."""
    return cast(sympy.Expr, size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(int(size)))


def at_hint(size: Size) -> int:
    """``size`` as a number: a symbolic one at the value it had when traced."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    hint = size.node.hint
    if hint is None:
        raise CaptureError(
            f"a tensor has the size {size}, which depends on values and not on input shapes, so no memory can be planned "
            "for it: replace what makes it (nonzero, masked_select, x[mask]) by torch.where or padding"
        )
    if not isinstance(hint, int):
        raise CaptureError(
            f"a tensor has the size {size}, of a nested tensor whose parts differ in length, which lohan_fx cannot plan: pad the "
            "inputs, x.to_padded_tensor(0.0)"
        )
    return int(hint)
